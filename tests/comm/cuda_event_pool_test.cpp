// Events of the emulated GPU, of a pool whose events are all in use. Its calls are made in a fork,
// as those of all tests of this program.
#include "tessera/device/cuda_event_pool.h"

#include <atomic>
#include <future>
#include <thread>

#include <gtest/gtest.h>

#include "testing/cuda_emulation/cuda_emulation.h"
#include "tests/comm/forked_ranks.h"

namespace tessera::comm {
namespace {

// Somebody hands work to a stream that is full, and holds up every call into CUDA; somebody else
// needs events that have to be made. A host function of the stream, which has to end first, gives
// one back. If the two do not come that far in time the test shows nothing: it can miss a mistake,
// never invent one.
TEST(EmulatedCudaEventPool, AnEventIsGivenBackWhileOthersAreMade) {
  EXPECT_TRUE(is_true_in_a_fork([] {
    device::CudaEventPool pool(0, cudaEventDisableTiming);
    cudaEvent_t used = nullptr;
    cudaStream_t stream = nullptr;
    if (cudaEventCreateWithFlags(&used, 0) != cudaSuccess ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      return false;
    }
    std::promise<void> begun;
    std::promise<void> opened;
    testing::enqueue_emulated(stream, [&begun, gate = opened.get_future().share()] {
      begun.set_value();
      gate.wait();
    });
    begun.get_future().wait();  // from here on nothing makes room in the queue
    std::atomic<std::size_t> num_given{0};
    std::thread giver([&] {
      for (; num_given < testing::kMaxQueued + 10; ++num_given) {
        testing::enqueue_emulated(stream, [] {});
      }
    });
    while (num_given < testing::kMaxQueued) {
      std::this_thread::yield();
    }
    std::atomic<bool> is_taking{false};
    auto taken = std::async(std::launch::async, [&] {
      is_taking = true;
      return pool.take();
    });
    while (!is_taking) {
      std::this_thread::yield();
    }
    for (int i = 0; i < 1000; ++i) {
      std::this_thread::yield();
    }
    pool.give_back(used);
    opened.set_value();
    giver.join();
    pool.give_back(taken.get());
    return true;
  }));
}

}  // namespace
}  // namespace tessera::comm
