// What a reducer refuses, what it promises about steps that go wrong, and what it never keeps.
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tests/grad/reducer_fixture.h"
#include "tests/support/contains.h"

namespace tessera::grad {
namespace {

ReduceCase small_case(std::int64_t bucket_bytes = 200) {
  ReduceCase test;
  test.shapes = {{40}, {7}, {64}, {9, false}, {130}};
  test.options.bucket_bytes = bucket_bytes;
  return test;
}

constexpr int kFrozen = 3;

TEST(ReducerUse, RefusesAGradientThatComesTwiceAndGoesOn) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, small_case());
      const Source source{group.rank(), 0, 0};
      add(world, source, 2);
      expect_error<ConfigError>([&] { add(world, source, 2); }, "'p2' has come twice");
      for (const int id : {0, 1, 4}) {
        add(world, source, id);
      }
      expect_error<ConfigError>([&] { add(world, source, 4); }, "'p4'");
      world.reducer().finish_backward();
      expect_sums(world, 0, 1, always);
      add(world, {group.rank(), 0, 1}, 2);  // the next backward may
      world.reducer().finish_backward();
    });
  }
}

TEST(ReducerUse, RefusesWrongUseByName) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, small_case());
      ReducerFixture other(group, small_case());
      Reducer& reducer = world.reducer();
      const Source source{group.rank(), 0, 0};
      expect_error<ConfigError>([&] { add(world, source, kFrozen); }, "'p3' is frozen");
      expect_error<ConfigError>([&] { reducer.shard_gradient(kFrozen); }, "'p3' is frozen");
      expect_error<InternalError>([&] { reducer.shard_gradient(17); }, "17");
      expect_error<InternalError>([&] { reducer.add(world.params()[0], {}); },
                                  "'p0' has no memory");
      expect_error<InternalError>(
          [&] {
            reducer.add(other.params()[0],
                        make_gradient(source, other.params()[0], DType::kFloat32));
          },
          "'p0' belongs to another table");
      FullGradient wide = make_gradient(source, world.params()[0], DType::kFloat32);
      wide.dtype = DType::kFloat64;
      expect_error<ConfigError>([&] { reducer.add(world.params()[0], wide); }, "'p0' is fp64");
      EXPECT_FALSE(reducer.in_backward()) << "what was refused has not begun anything";
      add(world, source, 0);
      EXPECT_TRUE(reducer.in_backward());
      expect_error<InternalError>([&] { reducer.shard_gradient(0); }, "inside a backward");
      reducer.finish_backward();
      EXPECT_FALSE(reducer.in_backward());
      expect_sums(world, 0, 1, [](const Source&, int id) { return id == 0; });
    });
  }
}

TEST(ReducerUse, AGradientThatDidNotComeIsZeroNeverTheLastOne) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int num_ranks : {1, 2, 3}) {
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        ReduceCase test = small_case();
        test.param_dtype = dtype;
        ReducerFixture world(group, test);
        expect_sums(world, 0, 0, never);  // before anything came
        add_all(world, {group.rank(), 0, 0});
        world.reducer().finish_backward();
        expect_sums(world, 0, 1, always);
        world.reducer().clear();
        expect_sums(world, 0, 0, never);  // between steps
        for (const int id : {4, 0}) {
          add(world, {group.rank(), 1, 0}, id);
        }
        world.reducer().finish_backward();
        expect_sums(world, 1, 1, [](const Source&, int id) { return id == 4 || id == 0; });
        world.reducer().clear();
        world.reducer().finish_backward();  // a backward that touched nothing
        expect_sums(world, 2, 1, never);
      });
    }
  }
}

TEST(ReducerUse, GoesOnAfterAnExceptionInTheMiddle) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    for (const int num_ranks : {1, 2, 3}) {
      for (int num_come = 0; num_come <= 4; ++num_come) {
        comm::run_ranks(num_ranks, [&](comm::Group& group) {
          ReduceCase test = small_case();
          test.device = device;
          ReducerFixture world(group, test);
          const std::vector<int> order = {4, 2, 1, 0};
          for (int step = 0; step < 3; ++step) {
            // A whole micro-batch, then one that ends early on all ranks alike.
            add_all(world, {group.rank(), step, 0});
            world.reducer().finish_backward();
            for (int i = 0; i < num_come; ++i) {
              add(world, {group.rank(), step, 1}, order[static_cast<std::size_t>(i)]);
            }
            world.reducer().clear();
            EXPECT_FALSE(world.reducer().in_backward());
            EXPECT_EQ(world.reducer().num_backwards(), 0);
            expect_sums(world, step, 0, never);
            add_all(world, {group.rank(), step, 0});
            world.reducer().finish_backward();
            expect_sums(world, step, 1, always);
            world.reducer().clear();
          }
        });
      }
    }
  }
}

TEST(ReducerUse, RanksThatStoppedAtDifferentGradientsMeetAgain) {
  comm::run_ranks(3, [&](comm::Group& group) {
    ReducerFixture world(group, small_case());
    const std::vector<int> order = {4, 2, 1, 0};
    for (int i = 0; i < 1 + group.rank(); ++i) {
      add(world, {group.rank(), 0, 0}, order[static_cast<std::size_t>(i)]);
    }
    world.reducer().finish_backward();
    world.reducer().clear();
    add_all(world, {group.rank(), 1, 0});
    world.reducer().finish_backward();
    expect_sums(world, 1, 1, always);
  });
}

TEST(ReducerUse, FinishingABackwardWaitsForNobody) {
  // Rank 1 takes part only after rank 0 has started everything: a wait would never end.
  std::promise<void> started;
  std::shared_future<void> all_started = started.get_future().share();
  comm::run_ranks(2, [&](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{64}, {64}, {64}, {64}, {64}, {64}, {3}, {5}};  // six travel alone, two share
    test.options.bucket_bytes = 64 * sizeof(float);
    ReducerFixture world(group, test);
    ASSERT_EQ(world.reducer().layout().buckets.size(), 7U);
    if (group.rank() == 1) {
      all_started.wait();
    }
    add_all(world, {group.rank(), 0, 0});
    world.reducer().finish_backward();
    if (group.rank() == 0) {
      started.set_value();
    }
    expect_sums(world, 0, 1, always);
  });
}

TEST(ReducerUse, AFailedReductionIsThrownByWhoeverAsksForGradients) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    for (const std::uint64_t call : {1, 2, 3}) {
      comm::ThreadWorldOptions options;
      options.num_ranks = 2;
      options.fault = comm::ThreadFault{1, call, comm::ThreadFault::Kind::kThrow};
      comm::run_ranks(options, {}, [&](comm::Group& group) {
        ReduceCase test = small_case();
        test.device = device;
        ReducerFixture world(group, test);
        ASSERT_GE(world.reducer().layout().buckets.size(), 3U);
        add_all(world, {group.rank(), 0, 0});
        world.reducer().finish_backward();
        EXPECT_THROW(world.reducer().shard_gradient(0), CommError);
        EXPECT_THROW(world.reducer().shard_gradient(0), CommError) << "every time";
        EXPECT_NO_THROW(world.reducer().clear());
        add_all(world, {group.rank(), 1, 0});
        world.reducer().finish_backward();
        EXPECT_THROW(world.reducer().shard_gradient(0), CommError) << "the group repeats it";
      });
    }
  }
}

// What a rank's body throws, or null. A wait that must not be would end at the time limit, which
// the text says then.
std::vector<std::exception_ptr> failures_of_two(const std::function<void(comm::Group&)>& body) {
  comm::ThreadWorldOptions world;
  world.num_ranks = 2;
  comm::GroupOptions options;
  options.heartbeat = std::chrono::milliseconds(20);
  options.timeout = std::chrono::seconds(60);
  return comm::run_ranks_collecting(world, options, body);
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Rank 0 needs rank 1 to go before it starts what rank 1 has in flight, as where it must gather
// something first. In the second case rank 1 owes nothing but what it has said at the end.
TEST(ReducerUse, ARankThatFailsDoesNotWaitForRanksThatWaitForIt) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    for (const bool all_is_sent : {false, true}) {
      std::promise<void> left;
      std::shared_future<void> has_left = left.get_future().share();
      const auto failures = failures_of_two([&](comm::Group& group) {
        ReduceCase test = small_case(all_is_sent ? 1 << 20 : 200);  // else the end waits for a slot
        test.device = device;
        if (group.rank() == 0) {
          ReducerFixture world(group, test);
          has_left.wait();
          add_all(world, {0, 0, 0});
          world.reducer().finish_backward();
          world.reducer().wait();
          FAIL() << "the sums of a rank that has failed are there";
        }
        const std::shared_ptr<void> leaves(nullptr, [&](void*) { left.set_value(); });
        ReducerFixture world(group, test);
        add_all(world, {1, 0, 0});
        if (all_is_sent) {
          world.reducer().finish_backward();
        }
        throw std::runtime_error("out of cheese");
      });
      ASSERT_TRUE(failures[0] && failures[1]);
      EXPECT_EQ(text_of(failures[1]), "out of cheese");
      EXPECT_HAS(text_of(failures[0]), "rank 1");
      EXPECT_LACKS(text_of(failures[0]), "comm.timeout_s");
    }
  }
}

TEST(ReducerUse, AFailureBesideFinishedReductionsCostsNoGroup) {
  comm::run_ranks(2, [](comm::Group& group) {
    for (int step = 0; step < 3; ++step) {
      try {
        ReducerFixture world(group, small_case());
        add_all(world, {group.rank(), step, 0});
        world.reducer().finish_backward();
        expect_sums(world, step, 1, always);
        throw std::runtime_error("out of cheese");
      } catch (const std::runtime_error&) {  // and goes on with another
      }
    }
  });
}

TEST(ReducerUse, AnOwnerThatLeavesWithoutAnExceptionWaitsForNobody) {
  std::promise<void> left;
  std::shared_future<void> has_left = left.get_future().share();
  const auto failures = failures_of_two([&](comm::Group& group) {
    ReducerFixture world(group, small_case());
    if (group.rank() == 0) {
      has_left.wait();
      add_all(world, {0, 0, 0});
      world.reducer().finish_backward();
      world.reducer().wait();
      return;
    }
    add_all(world, {1, 0, 0});
    world.reducer().leave();
    world.reducer().clear();
    left.set_value();
    add_all(world, {1, 1, 0});
    world.reducer().finish_backward();
    world.reducer().wait();
  });
  ASSERT_TRUE(failures[0] && failures[1]);
  EXPECT_HAS(text_of(failures[1]),
             "leaves reductions of gradients that other ranks have not started");
  EXPECT_HAS(text_of(failures[0]), "rank 1");
  EXPECT_LACKS(text_of(failures[0]), "comm.timeout_s");
}

TEST(ReducerUse, TakesItsOptionsFromTheConfig) {
  Config config;
  EXPECT_EQ(ReducerOptions::from(config, DType::kBFloat16).wire_dtype, DType::kBFloat16);
  EXPECT_EQ(ReducerOptions::from(config, DType::kFloat32).wire_dtype, DType::kFloat32);
  EXPECT_EQ(ReducerOptions::from(config, DType::kFloat32).bucket_bytes,
            ReducerOptions().bucket_bytes);
  config.set("grad.bucket_bytes", "3MiB");
  EXPECT_EQ(ReducerOptions::from(config, DType::kFloat32).bucket_bytes, 3 << 20);
  for (const auto& [text, dtype] : {std::pair{"fp32", DType::kFloat32},
                                    {"bf16", DType::kBFloat16},
                                    {"fp16", DType::kFloat16}}) {
    config.set("grad.wire_dtype", text);
    EXPECT_EQ(ReducerOptions::from(config, DType::kFloat32).wire_dtype, dtype);
  }
}

TEST(ReducerUse, RefusesAWireThatGradientsCannotTravelOn) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test = small_case();
    test.options.wire_dtype = DType::kInt32;
    expect_error<ConfigError>([&] { ReducerFixture(group, test); }, "int32");
  });
}

// A network whose calls are work of streams brings numbers before the ranks have agreed on them.
ReduceCase case_on_streams() {
  ReduceCase test = small_case();
  test.device = DeviceKind::kRandom;
  return test;
}

TEST(ReducerOnStreams, GivesTheSameSums) {
  comm::ThreadWorldOptions ranks;
  ranks.num_ranks = 3;
  ranks.on_streams = true;
  comm::run_ranks(ranks, {}, [](comm::Group& group) {
    ReducerFixture world(group, case_on_streams());
    for (int step = 0; step < 3; ++step) {
      for (int backward = 0; backward < 2; ++backward) {
        for (const int id : {4, 2, 1, 0}) {
          add(world, {group.rank(), step, backward}, id);
        }
        world.reducer().finish_backward();
      }
      expect_sums(world, step, 2, always);
      world.reducer().clear();
    }
  });
}

TEST(ReducerOnStreams, GivesNoGradientBeforeTheRanksHaveAgreedOnIt) {
  const auto gate = std::make_shared<device::Completion>();
  std::atomic<bool> is_open = false;
  std::latch have_numbers(2);
  comm::ThreadWorldOptions ranks;
  ranks.num_ranks = 2;
  ranks.on_streams = true;
  ranks.tags_arrive_after = device::Pending(gate);
  std::thread opener([&] {
    have_numbers.wait();
    is_open = true;
    gate->succeed();
  });
  const auto failures = comm::run_ranks_collecting(ranks, {}, [&](comm::Group& group) {
    ReduceCase test = case_on_streams();
    test.shapes = {{40}};
    test.name = group.rank() == 0 ? "p" : "q";  // which no network sees
    ReducerFixture world(group, test);
    add(world, {group.rank(), 0, 0}, 0);
    world.device().stream(device::StreamKind::kReduce).synchronize();
    have_numbers.count_down();
    world.reducer().finish_backward();
    expect_error<comm::MismatchError>([&] { world.reducer().shard_gradient(0); },
                                      "rank 1 called reduce_scatter #1");
    EXPECT_TRUE(is_open);
  });
  opener.join();
  for (const auto& failure : failures) {
    EXPECT_EQ(failure, nullptr);
  }
}

}  // namespace
}  // namespace tessera::grad
