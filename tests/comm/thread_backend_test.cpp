// What only ranks as threads can do: faults on demand, and memory that must not be touched too
// late.
#include "testing/thread_backend.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/comm/contract.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

void reduce_once(Group& group) {
  std::vector<float> data(100, 1.0F);
  CallOptions options;
  options.label = {"h.1", "mlp.weight"};
  group.start_all_reduce(data.data(), 100, DType::kFloat32, Reduction::kSum, options).wait();
  EXPECT_EQ(data[99], static_cast<float>(group.size()));
}

TEST(ThreadBackend, AnInjectedFaultFailsTheNthCallOfItsRankAndEndsTheOthers) {
  for (const std::uint64_t call : {1, 2, 5}) {
    ThreadWorldOptions world;
    world.num_ranks = 3;
    world.fault = ThreadFault{1, call, ThreadFault::Kind::kThrow};
    std::atomic<int> completed{0};
    const auto failures = run_ranks_collecting(world, patient(), [&](Group& group) {
      for (int i = 0; i < 6; ++i) {
        reduce_once(group);
        completed += group.rank() == 1 ? 1 : 0;
      }
    });
    EXPECT_EQ(completed.load(), static_cast<int>(call) - 1);
    EXPECT_NE(text_of(failures[1]).find("injected fault in call"), std::string::npos);
    for (const int other : {0, 2}) {
      const std::string text = text_of(failures[static_cast<std::size_t>(other)]);
      EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
      EXPECT_NE(text.find("injected fault"), std::string::npos) << text;
      EXPECT_NE(text.find("unit 'h.1', parameter 'mlp.weight'"), std::string::npos) << text;
    }
  }
}

TEST(ThreadBackend, ARankWhoseNetworkIsDeadIsReportedByTheOthers) {
  ThreadWorldOptions world;
  world.num_ranks = 3;
  world.fault = ThreadFault{2, 3, ThreadFault::Kind::kNever};
  const auto failures = run_ranks_collecting(world, hasty(), [&](Group& group) {
    for (int i = 0; i < 4; ++i) {
      reduce_once(group);
    }
  });
  // Rank 2 did call, so it has arrived as far as the status store knows; what all can say is where
  // they wait.
  for (const auto& failure : failures) {
    EXPECT_NE(text_of(failure).find("all_reduce #3"), std::string::npos) << text_of(failure);
    EXPECT_NE(text_of(failure).find("'mlp.weight'"), std::string::npos) << text_of(failure);
  }
}

TEST(ThreadBackend, RunRanksThrowsTheCauseAndNotAConsequence) {
  try {
    ThreadWorldOptions world;
    world.num_ranks = 4;
    run_ranks(world, patient(), [](Group& group) {
      group.start_barrier().wait();
      TESSERA_CHECK(group.rank() != 3, ConfigError, "rank 3 has had enough");
      group.start_barrier().wait();
    });
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "rank 3 has had enough");
  }
}

// Memory of a call is given back as soon as its Pending has failed, on every rank, while peers may
// be anywhere: the address sanitizer watches this test.
TEST(ThreadBackend, NobodyReadsMemoryAfterItsOwnerWasToldOfTheFailure) {
  for (std::uint64_t seed = 0; seed < support::rounds(20U, 8U); ++seed) {
    ThreadWorldOptions world;
    world.num_ranks = 4;
    world.max_delay_us = 200;
    world.seed = seed;
    world.fault = ThreadFault{static_cast<int>(seed % 4), 1 + seed % 3, ThreadFault::Kind::kThrow};
    run_ranks_collecting(world, patient(), [](Group& group) {
      for (int i = 0; i < 4; ++i) {
        auto data = std::make_unique<std::vector<float>>(50000, 1.0F);
        group.start_all_reduce(data->data(), 50000, DType::kFloat32).wait();
      }
    });
  }
}

// Rank 1 never joins the call that rank 0 has in flight; rank 0 fails for a reason of its own.
// With the limit of ten minutes this test would not end if the group waited.
TEST(ThreadBackend, AnExceptionOnItsWayOutDoesNotWaitForCallsInFlight) {
  ThreadWorld world(ThreadWorldOptions{2, 0, 0, {}});
  Group other(world.make_backend(1), "world", {0, 1}, {});
  std::vector<float> data(100, 1.0F);
  Pending in_flight;
  try {
    Group group(world.make_backend(0), "world", {0, 1}, {});
    in_flight = group.start_all_reduce(data.data(), 100, DType::kFloat32);
    throw IoError("no space left");
  } catch (const IoError&) {
    EXPECT_TRUE(in_flight.done());
    EXPECT_THROW(in_flight.wait(), PeerError);
  }
}

TEST(ThreadBackend, KeepAliveIsHeldUntilTheCallIsOver) {
  run_ranks(2, [](Group& group) {
    auto data = std::make_shared<std::vector<float>>(1000, 1.0F);
    CallOptions options;
    options.keep_alive = data;
    const Pending pending =
        group.start_all_reduce(data->data(), 1000, DType::kFloat32, Reduction::kSum, options);
    const std::weak_ptr<std::vector<float>> watched = data;
    data.reset();
    options.keep_alive.reset();
    pending.wait();
    group.start_barrier().wait();  // the worker has freed the call before it
    EXPECT_TRUE(watched.expired());
  });
}

TEST(ThreadBackend, CallsAreRecordedAsSpansWithTheirLabels) {
  const SteadyClock clock;
  Spans spans(clock, 64);
  GroupOptions options;
  options.spans = &spans;
  ThreadWorldOptions world;
  world.num_ranks = 2;
  run_ranks(world, options, [](Group& group) {
    for (int i = 0; i < 3; ++i) {
      reduce_once(group);
    }
  });
  const LabelId parameter = spans.intern("mlp.weight");
  int num_reduces = 0;
  for (const Span& span : spans.snapshot()) {
    num_reduces += std::string(span.name) == "all_reduce" ? 1 : 0;
    EXPECT_EQ(span.args.bytes, 400);
    EXPECT_EQ(span.args.parameter, parameter);
    EXPECT_GE(span.end_ns, span.start_ns);
  }
  EXPECT_EQ(num_reduces, 2 * 3);
}

}  // namespace
}  // namespace tessera::comm
