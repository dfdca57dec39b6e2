// Where a shard's gradient lives changes no bit: device, host and NVMe, for any number of ranks and
// micro-batches; and whether it was said how many come.
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/grad/gradient_bytes.h"
#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

struct Types {
  DType param = DType::kFloat32;
  DType wire = DType::kFloat32;
};
constexpr Types kAllTypes[] = {{DType::kFloat32, DType::kFloat32},
                               {DType::kBFloat16, DType::kBFloat16},
                               {DType::kFloat16, DType::kFloat32},
                               {DType::kFloat32, DType::kBFloat16}};

// Some are cut at whole blocks of the norm, some share a bucket, some are padding on the last rank.
ReduceCase places_case(const Types& types, bool with_dynamic) {
  ReduceCase test;
  test.shapes = {{40},    {9001}, {7, true, with_dynamic},    {64, false},
                 {20011}, {3},    {5000, true, with_dynamic}, {130},
                 {0},     {1}};
  test.param_dtype = types.param;
  test.options = {40000, types.wire};
  test.has_dynamic_group = with_dynamic;
  return test;
}

std::vector<ShardSums> sums_of_ranks(const ReduceCase& test, int num_ranks, int num_backwards) {
  std::vector<ShardSums> all(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(num_ranks, [&](comm::Group& group) {
    ReducerFixture world(group, test);
    all[static_cast<std::size_t>(group.rank())] = train(world, 2, num_backwards);
  });
  return all;
}

class ReducerPlaces : public ::testing::TestWithParam<int> {};

TEST_P(ReducerPlaces, HaveTheBitsOfOneMemory) {
  const int num_ranks = GetParam();
  for (const Types& types : kAllTypes) {
    for (const int num_backwards : {1, 2, 3, 6}) {
      // Every count with one pair of types, every pair with one count.
      if (support::kIsSanitized && num_backwards != 3 && types.param != DType::kBFloat16) {
        continue;
      }
      const ReduceCase memory = places_case(types, true);
      const std::vector<ShardSums> expected = sums_of_ranks(memory, num_ranks, num_backwards);
      const auto least = least_host_buffers(types.wire, num_backwards);
      const auto good = good_host_buffers(types.wire, num_backwards);
      // What it is told of: micro-batches, and buffers for them on the host.
      for (const auto& [num_micro_batches, num_buffers] :
           std::set<std::pair<int, int>>{{0, 0},
                                         {1, 0},
                                         {2, 0},
                                         {num_backwards, 0},
                                         {num_backwards, least},
                                         {num_backwards, good}}) {
        ReduceCase test = memory;
        test.device = num_backwards == 2 ? DeviceKind::kLazy : DeviceKind::kRandom;
        test.is_discrete = true;
        test.num_micro_batches = num_micro_batches;
        test.num_host_buffers = num_buffers;
        for (std::size_t i = 0; i < test.shapes.size(); ++i) {
          test.shapes[i].tier = i % 3 != 2 ? Tier::kHost : Tier::kDevice;
        }
        SCOPED_TRACE(::testing::Message()
                     << to_string(types.param) << " as " << to_string(types.wire) << ", "
                     << num_backwards << " backwards, told of " << test.num_micro_batches
                     << ", with " << num_buffers << " buffers");
        const std::vector<ShardSums> found = sums_of_ranks(test, num_ranks, num_backwards);
        for (std::size_t rank = 0; rank < found.size(); ++rank) {
          expect_same_bits(found[rank], expected[rank]);
          if (::testing::Test::HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

// Those of several are made by the host, where the gradients are there.
TEST_P(ReducerPlaces, SumSquaresOnTheWayOfSeveralMicroBatchesOnTheHost) {
  constexpr int kBackwards = 5;
  for (const int num_buffers : {0, 3, 4}) {
    ReduceCase test = places_case({DType::kBFloat16, DType::kBFloat16}, false);
    test.device = DeviceKind::kRandom;
    test.is_discrete = true;
    test.num_micro_batches = kBackwards;
    test.num_host_buffers = num_buffers;
    for (ParamShape& shape : test.shapes) {
      shape.tier = Tier::kHost;
    }
    comm::run_ranks(GetParam(), [&](comm::Group& group) {
      ReducerFixture world(group, test);
      for (int step = 0; step < 2; ++step) {
        for (int backward = 0; backward < kBackwards; ++backward) {
          add_all(world, {group.rank(), step, backward});
          world.reducer().finish_backward();
        }
        // All but the last are one sum, in halves, whatever memory there was.
        EXPECT_NE(world.reducer().shard_gradient(0).low, nullptr);
        EXPECT_EQ(world.reducer().shard_gradient(0).later.size(), 1U);
        expect_sums(world, step, kBackwards, always);
        ShardSums sums;
        append_sums(world, sums);
        EXPECT_EQ(sums.num_on_the_way, static_cast<int>(sums.shards.size()));
        world.reducer().clear();
      }
    });
  }
}

// Buckets of any size cut shards in other places; the sum of squares is that of the shard.
TEST_P(ReducerPlaces, SumSquaresOnTheWayOfOneMicroBatch) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const std::int64_t bucket_bytes : {300, 40000, 1 << 20}) {
      ReduceCase test = places_case({DType::kBFloat16, DType::kBFloat16}, false);
      test.options.bucket_bytes = bucket_bytes;
      test.device = DeviceKind::kRandom;
      test.is_discrete = true;
      test.num_micro_batches = 1;
      for (ParamShape& shape : test.shapes) {
        shape.tier = tier;
      }
      for (const ShardSums& sums : sums_of_ranks(test, GetParam(), 1)) {
        const int all = static_cast<int>(sums.shards.size());
        if (bucket_bytes > 300 || GetParam() == 1) {
          EXPECT_EQ(sums.num_on_the_way, all);
        } else {
          EXPECT_LT(sums.num_on_the_way, all) << "cut inside of a block of the norm";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReducerPlaces, ::testing::Values(1, 2, 3, 4),
                         [](const auto& param) { return std::to_string(param.param); });

TEST(ReducerPlacesOnHost, ACopyOfEachMicroBatchLeavesAsItIsReduced) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      ReduceCase test;
      test.shapes = {{4096, true, false, Tier::kHost}, {100}, {300, true, false, Tier::kHost}};
      test.param_dtype = DType::kBFloat16;
      test.options = {1 << 20, DType::kBFloat16};
      test.device = DeviceKind::kLazy;
      test.is_discrete = true;
      test.num_micro_batches = 2;
      ReducerFixture world(group, test);
      const auto on_host = [&] {
        return world.ledger().current_bytes(Tier::kPinned, Role::kGradient);
      };
      const std::size_t planned = on_host();
      std::size_t shard_bytes = 0;
      for (const int id : {0, 2}) {
        shard_bytes += 2 * static_cast<std::size_t>(world.params()[id].layout().shard_numel());
      }
      EXPECT_GE(planned, 2 * shard_bytes);
      for (int step = 0; step < 2; ++step) {
        for (int backward = 0; backward < 3; ++backward) {
          add_all(world, {group.rank(), step, backward});
          world.reducer().finish_backward();
          world.reducer().wait();
          EXPECT_EQ(on_host() > planned, step > 0 || backward == 2) << "for one more than planned";
        }
        expect_sums(world, step, 3, always);
        EXPECT_EQ(world.reducer().shard_gradient(0).later.size(), 2U);
        world.reducer().clear();
      }
      EXPECT_GE(world.reducer().take_stats().host_bytes,
                6 * 2 * std::uint64_t{4396} / static_cast<unsigned>(group.size()));
    });
  }
}

}  // namespace
}  // namespace tessera::grad
