// How reducers with replicas are used: parameters that some copy does not use, ranks that are late,
// calls that are work of streams, failures, and memory.
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/grad/gradient_bytes.h"
#include "tests/grad/replica_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

constexpr Copies kTwoByTwo = {4, 2};

ReduceCase use_case(int num_micro_batches) {
  ReduceCase test;
  test.shapes = {{640}, {64}, {300}, {17}, {640}, {96}, {1}, {500}};
  test.options.bucket_bytes = 64 * sizeof(float);
  test.ranks_per_copy = kTwoByTwo.ranks_per_copy;
  test.num_micro_batches = num_micro_batches;
  return test;
}

TEST(ReducerReplicasUse, AParameterIsUsedIfSomeRankOfSomeCopyUsedIt) {
  // p1 by the second copy alone, p2 by one rank of the first, p3 by nobody.
  const IsUsed uses = [](const Source& source, int id) {
    return id == 1 ? source.rank >= 2 : id == 2 ? source.rank == 1 : id != 3;
  };
  for (const int k : {0, 1, 2}) {
    for (const Home home : all_homes()) {
      ReduceCase test = use_case(k);
      test.shapes[1].numel = 9000;
      comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
        ReducerFixture world(group, at_home(test, home));
        for (int step = 0; step < 2; ++step) {
          for (int backward = 0; backward < 2; ++backward) {
            run_static(world, step, backward, uses);
          }
          for (int id = 0; id < world.params().num_params(); ++id) {
            EXPECT_EQ(world.reducer().has_gradient(id), id != 3) << id;
          }
          expect_replica_sums(world, step, 2, uses);
          world.reducer().clear();
          EXPECT_FALSE(world.reducer().has_gradient(1));
        }
      });
    }
  }
}

TEST(ReducerReplicasUse, SumsStayRightWhenRanksAreLateAndOutOfStep) {
  for (std::uint64_t seed = 1; seed <= support::rounds(4U, 2U); ++seed) {
    for (const int k : {1, 2}) {
      ReduceCase test = at_home(use_case(k), seed % 2 == 0 ? Home::kLateCpu : Home::kHost);
      comm::ThreadWorldOptions ranks;
      ranks.num_ranks = 6;
      ranks.max_delay_us = 30;
      ranks.seed = seed;
      comm::run_ranks(ranks, {}, [&](comm::Group& group) {
        ReducerFixture world(group, test);
        for (int step = 0; step < 3; ++step) {
          for (int backward = 0; backward < 2; ++backward) {
            run_static(world, step, backward, is_used);
          }
          expect_replica_sums(world, step, 2, is_used);
          world.reducer().clear();
        }
      });
    }
  }
}

// Those that are reduced from where they lie need no slot, for which one would wait.
TEST(ReducerReplicasUse, ATotalHasWhatEarlierBackwardsHaveStarted) {
  for (const Home home : {Home::kCpu, Home::kHost}) {
    ReduceCase test = use_case(2);
    test.shapes = {{64}, {64}};
    test = at_home(test, home);
    comm::ThreadWorldOptions ranks;
    ranks.num_ranks = kTwoByTwo.num_ranks;
    ranks.max_delay_us = 300;
    comm::run_ranks(ranks, {}, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      for (int step = 0; step < support::rounds(10, 3); ++step) {
        for (int backward = 0; backward < 2; ++backward) {
          run_static(world, step, backward, always);
        }
        expect_replica_sums(world, step, 2, always);
        world.reducer().clear();
      }
    });
  }
}

// A rank that uses nothing sends nothing until its backward ends, and may need the others before:
// none of them waits for it, in whichever copy they are.
TEST(ReducerReplicasUse, NoRankWaitsForACopyOneOfWhoseRanksIsNotThereYet) {
  const IsUsed uses = [](const Source& source, int /*id*/) { return source.rank != 3; };
  for (const int k : {1, 2}) {
    comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, use_case(k));
      for (int step = 0; step < 2; ++step) {
        world.reducer().take_stats();
        for (int backward = 0; backward < k; ++backward) {
          const Source source{group.rank(), step, backward};
          for (int id = world.params().num_params() - 1; id >= 0; --id) {
            if (uses(source, id)) {
              add(world, source, id);
            }
            if (id == 0 && group.rank() == 2) {
              EXPECT_EQ(world.reducer().take_stats().num_replica_sums, 0U)
                  << "a replica would believe that its end depends on the network alone";
            }
            group.start_barrier().wait();
          }
          world.reducer().finish_backward();
        }
        expect_replica_sums(world, step, k, uses);
        world.reducer().clear();
      }
    });
  }
}

TEST(ReducerReplicasUse, ReadsStartTheSumsThatAreMissing) {
  comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
    ReducerFixture world(group, use_case(3));
    world.reducer().finish_replica_sums();
    EXPECT_EQ(world.reducer().take_stats().num_replica_sums, 0U) << "nothing has come";
    run_static(world, 0, 0, always);
    EXPECT_EQ(world.reducer().take_stats().num_replica_sums, 0U);
    world.reducer().shard_gradient(0);
    const std::uint64_t num_buckets = world.reducer().layout().buckets.size();
    EXPECT_EQ(world.reducer().take_stats().num_replica_sums, num_buckets);
    expect_replica_sums(world, 0, 1, always);
    EXPECT_EQ(world.reducer().take_stats().num_replica_sums, 0U) << "once";
    world.reducer().begin_backward();
    expect_error<InternalError>([&] { world.reducer().finish_replica_sums(); },
                                "inside a backward");
    world.reducer().clear();
  });
}

// What was started is ended, and the next step knows nothing of it.
TEST(ReducerReplicasUse, ClearForgetsABackwardInItsMiddle) {
  for (const int k : {1, 2}) {
    for (const Home home : all_homes()) {
      comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
        ReducerFixture world(group, at_home(use_case(k), home));
        for (int backward = 0; backward + 1 < k; ++backward) {
          run_static(world, 5, backward, always);
        }
        for (const int id : {7, 6, 5, 4}) {
          add(world, {group.rank(), 5, k - 1}, id);
        }
        world.reducer().clear();
        for (int backward = 0; backward < k; ++backward) {
          run_static(world, 0, backward, always);
        }
        expect_replica_sums(world, 0, k, always);
      });
    }
  }
}

TEST(ReducerReplicasUse, SumsOfSquaresAreMadeOfTheSumsOverReplicas) {
  for (const Home home : {Home::kDiscrete, Home::kHost}) {
    for (const int k : {0, 1, 2, 3}) {
      ReduceCase test = at_home(use_case(k), home);
      test.shapes = {{9000, true, false, test.shapes[0].tier},
                     {50, true, false, test.shapes[0].tier}};
      test.options = {60000, DType::kBFloat16};
      test.param_dtype = DType::kBFloat16;
      comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
        ReducerFixture world(group, test);
        for (int step = 0; step < 2; ++step) {
          for (int backward = 0; backward < std::max(1, k); ++backward) {
            run_static(world, step, backward, always);
          }
          ShardSums sums;  // compares them
          append_sums(world, sums);
          EXPECT_EQ(sums.num_on_the_way, 2) << name_of(home) << ", " << k;
          world.reducer().clear();
        }
      });
    }
  }
}

TEST(ReducerReplicasUse, ALoneCopyIsNotSummedAgain) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      ReduceCase test = use_case(2);
      test.ranks_per_copy = num_ranks;
      ReducerFixture world(group, test);
      for (int backward = 0; backward < 2; ++backward) {
        run_static(world, 0, backward, always);
      }
      expect_sums(world, 0, 2, always);
      EXPECT_EQ(world.gradient_bytes() == 0, num_ranks == 1) << "adopted where nothing is sent";
      EXPECT_EQ(world.reducer().take_stats().num_replica_sums, 0U);
      EXPECT_EQ(world.replicas().wire_bytes().num_calls, 0U);
    });
  }
}

// Each rank uses something else, so buckets are sent at different times; calls of both groups are
// work of one stream.
TEST(ReducerReplicasOnStreams, GiveTheSameSums) {
  for (const int k : {0, 1, 2}) {
    for (const bool is_discrete : {false, true}) {
      for (const Copies& copies : {kTwoByTwo, Copies{3, 1}}) {
        ReduceCase test = use_case(k);
        test.ranks_per_copy = copies.ranks_per_copy;
        test.device = DeviceKind::kRandom;
        test.is_discrete = is_discrete;
        comm::ThreadWorldOptions ranks;
        ranks.num_ranks = copies.num_ranks;
        ranks.on_streams = true;
        comm::run_ranks(ranks, {}, [&](comm::Group& group) {
          ReducerFixture world(group, test);
          EXPECT_EQ(world.reducer().is_ordered(), is_discrete);
          for (int step = 0; step < 2; ++step) {
            for (int backward = 0; backward < 2; ++backward) {
              run_static(world, step, backward, is_used);
            }
            if (is_discrete) {
              world.reducer().finish_replica_sums();
              for (int id = 0; id < world.params().num_params(); ++id) {
                EXPECT_NE(world.reducer().ordered_gradient(id).values, nullptr);
              }
              world.reducer().wait_agreed();
              world.reducer().wait_reduced();
            }
            expect_replica_sums(world, step, 2, is_used);
            world.reducer().clear();
          }
        });
      }
    }
  }
}

TEST(ReducerReplicasFail, WhereCopiesMeanOtherBuckets) {
  for (const int k : {0, 1, 2}) {
    comm::ThreadWorldOptions ranks;
    ranks.num_ranks = kTwoByTwo.num_ranks;
    const auto failures = comm::run_ranks_collecting(ranks, {}, [&](comm::Group& group) {
      ReduceCase test = use_case(k);
      test.options.bucket_bytes = group.rank() < 2 ? 256 : 1024;
      ReducerFixture world(group, test);
      expect_error<comm::MismatchError>(
          [&] {
            for (int backward = 0; backward < 2; ++backward) {
              run_static(world, 0, backward, always);
            }
            world.reducer().shard_gradient(0);
          },
          "gradients of replicas");
      expect_error<comm::MismatchError>([&] { world.reducer().wait(); }, "p7");
    });
    for (const auto& failure : failures) {
      EXPECT_EQ(failure, nullptr);
    }
  }
}

TEST(ReducerReplicasFail, WhereShardsAreNumberedTwice) {
  comm::run_ranks(kTwoByTwo.num_ranks, [&](comm::Group& group) {
    ReduceCase test = use_case(1);
    test.shard_of_rank = {1, 1};
    expect_error<InternalError>([&] { ReducerFixture(group, test); }, "one shard each");
  });
}

TEST(ReducerReplicasMemory, TheLedgerIsWhatWasPlanned) {
  for (const Copies& copies : {kTwoByTwo, Copies{2, 1}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int k : {0, 1, 2}) {
        ReduceCase test;
        test.shapes = {{5000},     {70001}, {300}, {6000, true, true}, {40001, true, true},
                       {60, false}};
        test.param_dtype = dtype;
        test.options = {20000, dtype};
        test.ranks_per_copy = copies.ranks_per_copy;
        test.num_micro_batches = k;
        test.has_dynamic_group = true;
        test = at_home(test, Home::kNvme);
        std::vector<GradientShape> shapes;
        for (const ParamShape& shape : test.shapes) {
          shapes.push_back({shape.numel, shape.trainable, shape.dynamic, shape.tier});
        }
        const GradientBytes planned = gradient_bytes(shapes, copies.ranks_per_copy, test.options,
                                                     dtype, {copies.num_copies(), k});
        const auto device_bytes = static_cast<std::size_t>(planned.shards + planned.slots);
        comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
          ReducerFixture world(group, test);
          EXPECT_EQ(world.gradient_bytes(), device_bytes);
          for (int backward = 0; backward < 3; ++backward) {
            add_all(world, {group.rank(), 0, backward});
            world.reducer().reduce_dynamic(std::vector<int>{3, 4});
            world.reducer().finish_backward();
          }
          world.reducer().wait();
          EXPECT_EQ(world.ledger().peak_bytes(Tier::kDevice, Role::kGradient), device_bytes);
          EXPECT_EQ(world.ledger().peak_bytes(Tier::kHost, Role::kGradient),
                    static_cast<std::size_t>(planned.block_sums));
        });
      }
    }
  }
}

// A total takes the place of what was on the wire: in a copy of several ranks it costs nothing.
TEST(ReducerReplicasMemory, TotalsTakeTheMemoryOfBuckets) {
  const std::vector<GradientShape> shapes = {{40000}, {300}};
  const ReducerOptions options{1 << 20, DType::kBFloat16};
  for (const int num_ranks : {2, 3, 8}) {
    EXPECT_EQ(gradient_bytes(shapes, num_ranks, options, DType::kBFloat16, {4, 2}).total(),
              gradient_bytes(shapes, num_ranks, options, DType::kBFloat16).total());
  }
  EXPECT_EQ(gradient_bytes(shapes, 1, options, DType::kBFloat16, {1, 2}).total(),
            gradient_bytes(shapes, 1, options, DType::kBFloat16).total());
}

}  // namespace
}  // namespace tessera::grad
