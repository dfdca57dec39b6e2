// Dynamic parameters: what they cost, what is refused, and the way back after an exception. And
// reducers that are made anew, since other parameters are trained.
#include <algorithm>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"

namespace tessera::grad {
namespace {

// Static: 0, 4. Dynamic: 1, 2, 5. Frozen: 3.
ReduceCase dynamic_case() {
  ReduceCase test;
  test.shapes = {{40},  {7, true, true}, {64, true, true}, {9, false, true},
                 {130}, {30, true, true}};
  test.options.bucket_bytes = 256;
  return test;
}
const std::vector<int> kDynamic = {1, 2, 5};

void run_one_backward(ReducerFixture& world, const Source& source) {
  add_all(world, source);
  std::vector<int> ids;
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (world.params()[id].trainable() && world.params()[id].dynamic()) {
      ids.push_back(id);
    }
  }
  world.reducer().reduce_dynamic(ids);
  world.reducer().finish_backward();
}

bool is_static(const Source& /*source*/, int param) { return param == 0 || param == 4; }

std::size_t region_bytes(const BucketLayout& layout) {
  return static_cast<std::size_t>(layout.region_numel) * sizeof(float);
}

TEST(ReducerDynamicUse, WhatNobodyUsesCostsNoCall) {
  comm::run_ranks(3, [](comm::Group& group) {
    ReducerFixture world(group, dynamic_case());
    const BucketLayout& layout = world.reducer().layout();
    for (int step = 0; step < 2; ++step) {
      const comm::WireBytes before = group.wire_bytes();
      for (const int id : {4, 0}) {
        add(world, {group.rank(), step, 0}, id);
      }
      world.reducer().reduce_dynamic({});
      world.reducer().finish_backward();
      expect_sums(world, step, 1, is_static);
      // And one call that says so, with a bit per parameter.
      const auto word_bytes = (static_cast<std::uint64_t>(world.params().num_params()) + 7) / 8;
      EXPECT_EQ(group.wire_bytes().num_calls - before.num_calls, layout.buckets.size() + 1);
      EXPECT_EQ(
          group.wire_bytes().payload - before.payload,
          (static_cast<std::uint64_t>(layout.bucketed_numel) * sizeof(float) + word_bytes) * 2);
      world.reducer().clear();
      run_one_backward(world, {group.rank(), step, 0});
      expect_sums(world, step, 1, always);
      world.reducer().clear();
    }
  });
}

TEST(ReducerDynamicUse, CallsAndBytesAreCountedAndSmallParametersTravelTogether) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReduceCase test = dynamic_case();
    test.options.bucket_bytes = 1 << 20;
    ReducerFixture world(group, test);
    world.reducer().reduce_dynamic(kDynamic);
    const ReducerStats stats = world.reducer().take_stats();
    EXPECT_EQ(stats.num_reductions, 1U);
    const BucketLayout& layout = world.reducer().layout();
    EXPECT_EQ(stats.reduced_bytes,
              static_cast<std::uint64_t>(layout.region_numel - layout.bucketed_numel) * 2 * 4);
    world.reducer().finish_backward();
    expect_sums(world, 0, 1, never);
  });
}

TEST(ReducerDynamicUse, AGradientIsHeldUntilItIsListed) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReducerFixture world(group, dynamic_case());
    EXPECT_EQ(world.gradient_bytes(), 0U) << "nothing before the first gradient";
    const Source source{group.rank(), 0, 0};
    const std::weak_ptr<void> small = add(world, source, 1);
    const std::weak_ptr<void> large = add(world, source, 5);
    EXPECT_EQ(world.gradient_bytes(), region_bytes(world.reducer().layout()));
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, (7 + 30) * 4);
    world.reducer().reduce_dynamic(std::vector<int>{1});
    EXPECT_TRUE(small.expired()) << "copied, since it has padding";
    EXPECT_FALSE(large.expired());
    EXPECT_EQ(world.reducer().pending_dynamic(), std::vector<int>{5});
    world.reducer().take_stats();
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 30 * 4);
    world.reducer().clear();
    EXPECT_TRUE(large.expired()) << "forgotten";
    EXPECT_TRUE(world.reducer().pending_dynamic().empty());
    world.reducer().take_stats();
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 0);
    run_one_backward(world, source);
    expect_sums(world, 0, 1, always);
  });
}

TEST(ReducerDynamicUse, MemoryEqualsItsClosedForm) {
  for (const DType wire : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t bucket_bytes : {400, 1 << 20}) {
      comm::run_ranks(3, [&](comm::Group& group) {
        ReduceCase test = dynamic_case();
        test.options = {bucket_bytes, wire};
        ReducerFixture world(group, test);
        const BucketLayout& layout = world.reducer().layout();
        const auto buffer_bytes = [&](std::int64_t numel) {
          return static_cast<std::size_t>(numel) * 3 * bytes_of(wire);
        };
        const auto result_bytes = [&](std::int64_t numel) {
          return static_cast<std::size_t>(numel) * bytes_of(wire);
        };
        // Straight into the region, if that is of their type: alone, or a neighbour of what travels
        // with it.
        const bool is_straight = wire == DType::kFloat32;
        for (const int id : {4, 0}) {
          add(world, {group.rank(), 0, 0}, id);
        }
        const std::size_t before = world.gradient_bytes();
        const std::int64_t largest = layout.largest_dynamic_numel;
        world.reducer().reduce_dynamic(std::vector<int>{2});
        EXPECT_EQ(world.gradient_bytes() - before,
                  buffer_bytes(largest) + (is_straight ? 0 : result_bytes(largest)));
        world.reducer().reduce_dynamic(std::vector<int>{1, 5});
        const std::size_t straight = 2 * buffer_bytes(largest);
        EXPECT_EQ(world.gradient_bytes() - before,
                  straight + (is_straight ? 1 : 2) * result_bytes(largest))
            << "1 and 5 share a bucket, and are no neighbours";
        for (int i = 0; i < 3; ++i) {
          world.reducer().reduce_dynamic(kDynamic);
          world.reducer().reduce_dynamic(kDynamic);
          EXPECT_EQ(world.gradient_bytes() - before, straight + 2 * result_bytes(largest));
        }
        world.reducer().finish_backward();
        expect_sums(world, 0, 1, is_static);
        world.destroy_reducer();
        EXPECT_EQ(world.gradient_bytes(), 0U);
      });
    }
  }
}

// Of a micro-batch that is alone, on a device that the host cannot reach.
TEST(ReducerDynamicUse, TakesNoMoreMemoryHoweverOftenAParameterIsListed) {
  for (const Tier home : {Tier::kDevice, Tier::kHost}) {
    for (const int num_micro_batches : {1, 2}) {
      SCOPED_TRACE(::testing::Message() << to_string(home) << ", " << num_micro_batches);
      comm::run_ranks(2, [&](comm::Group& group) {
        ReduceCase test;
        test.shapes = {{40}, {64, true, true, home}};
        test.param_dtype = test.options.wire_dtype = DType::kBFloat16;
        test.device = DeviceKind::kRandom;
        test.is_discrete = true;
        test.is_planned = true;
        test.num_micro_batches = num_micro_batches;
        ReducerFixture world(group, test);
        const auto peak = [&](Tier tier) {
          return world.ledger().peak_bytes(tier, Role::kGradient);
        };
        const std::size_t planned_device = peak(Tier::kDevice);
        const std::size_t planned_pinned = peak(Tier::kPinned);
        const std::vector<int> list = {1};
        for (int step = 0; step < 2; ++step) {
          for (int backward = 0; backward < num_micro_batches; ++backward) {
            for (int rank = 0; rank < 2; ++rank) {  // first one uses it, then the other
              if (rank == group.rank()) {
                add(world, {rank, step, backward}, 1);
              }
              world.reducer().reduce_dynamic(list);
            }
            add(world, {group.rank(), step, backward}, 0);
            world.reducer().finish_backward();
          }
          const ShardGradient gradient = world.reducer().shard_gradient(1);
          const shard::ElementRange range = world.params()[1].range();
          const std::vector<float> values = values_of(world, gradient, range.numel);
          for (std::int64_t i = 0; i < range.numel; ++i) {
            float sum = 0;
            for (int backward = 0; backward < num_micro_batches; ++backward) {
              for (int rank = 0; rank < 2; ++rank) {
                sum += rounded(gradient_value({rank, step, backward}, 1, range.begin + i),
                               DType::kBFloat16);
              }
            }
            ASSERT_EQ(values[static_cast<std::size_t>(i)], sum) << i << " in step " << step;
          }
          world.reducer().clear();
        }
        EXPECT_EQ(peak(Tier::kDevice), planned_device);
        EXPECT_EQ(peak(Tier::kPinned), planned_pinned);
      });
    }
  }
}

TEST(ReducerDynamicUse, AWholeParameterIsReducedFromWhereItLies) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{64, true, true}, {128, true, true}};
    test.options.bucket_bytes = 128 * 4;
    ReducerFixture world(group, test);
    run_one_backward(world, {group.rank(), 0, 0});
    expect_sums(world, 0, 1, always);
    EXPECT_EQ(world.gradient_bytes(), region_bytes(world.reducer().layout()));
  });
}

TEST(ReducerDynamicUse, AGroupOfOneHasNothingToAgreeOn) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReducerFixture world(group, dynamic_case());
    const std::weak_ptr<void> gradient = add(world, {0, 0, 0}, 2);
    EXPECT_TRUE(world.reducer().pending_dynamic().empty());
    world.reducer().finish_backward();
    EXPECT_EQ(world.gradient_bytes(), 0U) << "adopted";
    expect_sums(world, 0, 1, [](const Source&, int id) { return id == 2; });
    run_one_backward(world, {0, 0, 1});
    expect_sums(world, 0, 2, [](const Source& s, int id) { return id == 2 || s.backward == 1; });
    EXPECT_FALSE(gradient.expired());
    EXPECT_EQ(group.wire_bytes().num_calls, 0U);
  });
}

TEST(ReducerDynamicUse, RefusesWrongUseByName) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReducerFixture world(group, dynamic_case());
    Reducer& reducer = world.reducer();
    const auto reduce = [&](const std::vector<int>& ids) {
      return [&, ids] { reducer.reduce_dynamic(ids); };
    };
    expect_error<InternalError>(reduce({0}), "'p0' is reduced in its bucket");
    expect_error<InternalError>(reduce({1, 2, 1}), "'p1' is listed twice");
    expect_error<ConfigError>(reduce({3}), "'p3' is frozen");
    expect_error<InternalError>(reduce({6}), "parameter 6");
    EXPECT_FALSE(reducer.in_backward()) << "what was refused has not begun anything";
    const Source source{group.rank(), 0, 0};
    add(world, source, 5);
    add(world, source, 2);
    expect_error<ConfigError>([&] { add(world, source, 2); }, "'p2' has come twice");
    expect_error<InternalError>([&] { reducer.finish_backward(); }, "2 dynamic gradients");
    expect_error<InternalError>([&] { reducer.finish_backward(); }, "'p2'; reduce_dynamic()");
    reducer.reduce_dynamic(std::vector<int>{5, 2});
    expect_error<ConfigError>([&] { add(world, source, 2); }, "'p2' has come twice");
    reducer.finish_backward();
    expect_sums(world, 0, 1, [](const Source&, int id) { return id == 2 || id == 5; });
  });
}

TEST(ReducerDynamicUse, ListsThatDifferAreAnErrorOnEveryRankThatNamesParameters) {
  comm::ThreadWorldOptions options;
  options.num_ranks = 2;
  const auto errors = comm::run_ranks_collecting(options, {}, [](comm::Group& group) {
    ReduceCase test = dynamic_case();
    test.options.bucket_bytes = 1 << 20;
    ReducerFixture world(group, test);
    world.reducer().reduce_dynamic(group.rank() == 0 ? std::vector<int>{1, 2}
                                                     : std::vector<int>{2, 1});
    world.reducer().finish_backward();
    world.reducer().shard_gradient(0);
  });
  const std::vector<std::string> names = {"'p2 and 1 more'", "'p1 and 1 more'"};
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_NE(errors[rank], nullptr);
    expect_error<CommError>([&] { std::rethrow_exception(errors[rank]); }, "dynamic gradients");
    expect_error<CommError>([&] { std::rethrow_exception(errors[rank]); }, names[rank]);
  }
}

TEST(ReducerDynamicUse, AFailedReductionIsThrownByWhoeverAsksForGradients) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    comm::ThreadWorldOptions options;
    options.num_ranks = 2;
    options.fault = comm::ThreadFault{1, 1, comm::ThreadFault::Kind::kThrow};
    comm::run_ranks(options, {}, [&](comm::Group& group) {
      ReduceCase test = dynamic_case();
      test.device = device;
      ReducerFixture world(group, test);
      world.reducer().reduce_dynamic(kDynamic);
      world.reducer().finish_backward();
      EXPECT_THROW(world.reducer().shard_gradient(0), CommError);
      EXPECT_THROW(world.reducer().shard_gradient(1), CommError) << "every time";
      EXPECT_NO_THROW(world.reducer().clear());
    });
  }
}

TEST(ReducerDynamicUse, RanksThatStoppedAtDifferentGradientsMeetAgain) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    comm::run_ranks(3, [&](comm::Group& group) {
      ReduceCase test = dynamic_case();
      test.device = device;
      test.has_dynamic_group = true;
      ReducerFixture world(group, test);
      const std::vector<int> order = {5, 4, 2, 1, 0};
      for (int step = 0; step < 2; ++step) {
        for (int i = 0; i < 1 + 2 * group.rank(); ++i) {
          add(world, {group.rank(), step, 0}, order[static_cast<std::size_t>(i)]);
        }
        world.reducer().drop_dynamic();
        EXPECT_TRUE(world.reducer().pending_dynamic().empty());
        world.reducer().finish_backward();
        world.reducer().clear();
        run_one_backward(world, {group.rank(), step, 0});
        expect_sums(world, step, 1, always);
        world.reducer().clear();
        expect_sums(world, step, 0, never);
      }
    });
  }
}

TEST(ReducerDynamicUse, ListsAreReducedWhileStaticBucketsWaitForTheEndOfAnotherRank) {
  // Rank 1 gives its static gradients only after the lists are through on rank 0.
  std::promise<void> through;
  std::shared_future<void> lists_are_through = through.get_future().share();
  comm::run_ranks(2, [&](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{50}, {50}, {50}, {50}, {50, true, true}};
    test.options.bucket_bytes = 256;
    test.has_dynamic_group = true;
    ReducerFixture world(group, test);
    ASSERT_EQ(world.reducer().layout().buckets.size(), 4U) << "more than there are buffers";
    const Source source{group.rank(), 0, 0};
    const auto add_static = [&] {
      for (const int id : {3, 2, 1, 0}) {
        add(world, source, id);
      }
    };
    if (group.rank() == 0) {
      add_static();
      EXPECT_GT(world.reducer().take_stats().held_bytes_peak, 0) << "kept, not waited for";
    }
    add(world, source, 4);
    for (int i = 0; i < 6; ++i) {
      world.reducer().reduce_dynamic(std::vector<int>{4});
    }
    if (group.rank() == 0) {
      through.set_value();
    } else {
      lists_are_through.wait();
      add_static();
    }
    world.reducer().finish_backward();
    expect_sums(world, 0, 1, always);
  });
}

TEST(ReducerRemade, FollowsParametersThatAreFrozenAndUnfrozen) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy}) {
    for (const int num_ranks : {1, 2, 3}) {
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        ReduceCase test = dynamic_case();
        test.device = device;
        ReducerFixture world(group, test);
        const std::vector<std::vector<int>> frozen = {{3}, {}, {0, 2}, {0, 1, 2, 3, 4, 5}, {4}};
        for (int step = 0; step < static_cast<int>(frozen.size()); ++step) {
          const std::vector<int>& now = frozen[static_cast<std::size_t>(step)];
          for (int id = 0; id < world.params().num_params(); ++id) {
            world.params()[id].set_trainable(std::find(now.begin(), now.end(), id) == now.end());
          }
          world.make_reducer();
          EXPECT_EQ(world.gradient_bytes(), 0U) << "the one before has given everything back";
          for (int backward = 0; backward < 2; ++backward) {
            run_one_backward(world, {group.rank(), step, backward});
          }
          expect_sums(world, step, 2, always);
          const BucketLayout& layout = world.reducer().layout();
          EXPECT_EQ(layout.region_numel == 0, now.size() == 6U);
          if (num_ranks > 1) {
            EXPECT_GE(world.gradient_bytes(), region_bytes(layout));
          }
          EXPECT_EQ(world.gradient_bytes() == 0, num_ranks == 1 || now.size() == 6U);
          if (step % 2 == 0) {
            world.reducer().clear();
          }  // else destroyed with sums that nobody took
        }
        world.destroy_reducer();
        EXPECT_EQ(world.gradient_bytes(), 0U);
      });
    }
  }
}

TEST(ReducerRemade, AReducerThatWasNotMadeAnewRefusesWhatItDoesNotKnow) {
  for (const int num_ranks : {1, 2}) {
    for (const int frozen : {3, 5}) {  // 5: the last of the table
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        ReduceCase test = dynamic_case();
        test.shapes[5].trainable = frozen != 5;
        ReducerFixture world(group, test);
        world.params()[frozen].set_trainable(true);
        const std::string name = "'p" + std::to_string(frozen) + "' was frozen";
        expect_error<InternalError>([&] { add(world, {group.rank(), 0, 0}, frozen); }, name);
        expect_error<InternalError>([&] { world.reducer().shard_gradient(frozen); }, name);
        expect_error<InternalError>(
            [&] { world.reducer().reduce_dynamic(std::vector<int>{frozen}); }, name);
        world.params()[frozen].set_trainable(false);
        world.params()[1].set_dynamic(false);  // decided when the reducer was made
        add(world, {group.rank(), 0, 0}, 1);
        world.reducer().reduce_dynamic(std::vector<int>{1});
        world.reducer().finish_backward();
        expect_sums(world, 0, 1, [](const Source&, int id) { return id == 1; });
      });
    }
  }
}

}  // namespace
}  // namespace tessera::grad
