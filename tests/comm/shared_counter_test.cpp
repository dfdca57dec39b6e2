// What ranks that share memory wait with.
#include "tessera/comm/shared_counter.h"

#include <sys/resource.h>

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

// How often this thread has left its core to wait.
long num_sleeps() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

TEST(SharedCounter, AWaitThatSpinsInVainSleepsFromOneLookToTheNext) {
  SharedCounter counter;
  std::atomic<int> num_looks{0};
  long slept = 0;
  std::thread waiting([&] {
    const long before = num_sleeps();
    counter.wait(1, [&] { ++num_looks; });
    slept = num_sleeps() - before;
  });
  while (num_looks < 4) {
    std::this_thread::yield();
  }
  counter.advance(1);
  waiting.join();
  EXPECT_GE(slept, num_looks - 1) << "the last look may find the value there";
}

TEST(SharedCounter, AWaitForWhatIsThereNeitherLooksNorSleeps) {
  SharedCounter counter;
  counter.advance(7);
  const long before = num_sleeps();
  for (const std::uint32_t value : {6U, 7U}) {
    counter.wait(value, [] { ADD_FAILURE() << "it looked"; });
  }
  EXPECT_EQ(num_sleeps(), before);
}

}  // namespace
}  // namespace tessera::comm
