// Sums of gradients over ranks and micro-batches, to the bit, whatever the order in which they
// come.
#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

// Sizes below, at and above the granule and the ranks, without and with padding, one frozen.
const std::vector<ParamShape> kShapes = {{5},   {0},  {1},         {96},  {3},         {1024}, {17},
                                         {257}, {48}, {12, false}, {640}, {33, false}, {2},    {8}};

// The same answer on every rank.
bool comes_now(const Source& source, int param) {
  const unsigned mix =
      static_cast<unsigned>(source.rank * 31 + source.step * 17 + source.backward * 7 + param * 13);
  return kShapes[static_cast<std::size_t>(param)].trainable && mix % 5 != 0;
}

void run_backward(ReducerFixture& world, const Source& source, std::mt19937& random) {
  std::vector<int> order;
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (comes_now(source, id)) {
      order.push_back(id);
    }
  }
  // Every rank in another order.
  std::shuffle(order.begin(), order.end(), random);
  for (const int id : order) {
    const shard::Param& param = world.params()[id];
    world.reducer().add(param, make_gradient(source, param, world.test().param_dtype));
  }
  world.reducer().finish_backward();
}

void train(comm::Group& group, const ReduceCase& test, int num_steps) {
  ReducerFixture world(group, test);
  std::mt19937 random(static_cast<unsigned>(group.rank()) * 101 + 1);
  const comm::WireBytes before = group.wire_bytes();
  std::uint64_t num_backwards_in_all = 0;
  for (int step = 0; step < num_steps; ++step) {
    const int num_backwards = 1 + step % 3;
    for (int backward = 0; backward < num_backwards; ++backward) {
      run_backward(world, {group.rank(), step, backward}, random);
      ++num_backwards_in_all;
    }
    EXPECT_EQ(world.reducer().num_backwards(), num_backwards);
    expect_sums(world, step, num_backwards, comes_now);
    world.reducer().clear();
  }
  // Exactly the region times the peers, in one call per bucket and backward, whatever came; and one
  // more, with a bit per parameter.
  const BucketLayout& layout = world.reducer().layout();
  const comm::WireBytes after = group.wire_bytes();
  const auto peers = static_cast<std::uint64_t>(group.size() - 1);
  const std::uint64_t bytes = static_cast<std::uint64_t>(layout.region_numel) *
                              bytes_of(test.options.wire_dtype) * num_backwards_in_all;
  const std::uint64_t word_bytes =
      (static_cast<std::uint64_t>(world.params().num_params()) + 7) / 8;
  EXPECT_EQ(after.payload - before.payload, (bytes + word_bytes * num_backwards_in_all) * peers);
  const std::uint64_t num_calls =
      group.size() == 1 ? 0 : layout.buckets.size() * num_backwards_in_all;
  EXPECT_EQ(after.num_calls - before.num_calls,
            num_calls + (group.size() == 1 ? 0 : num_backwards_in_all));
  const ReducerStats stats = world.reducer().take_stats();
  EXPECT_EQ(stats.num_reductions, num_calls);
  EXPECT_EQ(stats.reduced_bytes,
            group.size() == 1 ? 0 : bytes * static_cast<std::uint64_t>(group.size()));
}

class ReducerSums : public ::testing::TestWithParam<DeviceKind> {};

constexpr int kNumSteps = support::rounds(3, 2);  // the second one begins with old sums

TEST_P(ReducerSums, AreThoseInRankOrderForEveryBucketSizeAndOrderOfArrival) {
  for (const std::int64_t bucket_bytes : {400, 2048, 1 << 20}) {
    for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
      SCOPED_TRACE(::testing::Message() << bucket_bytes << " bytes, " << num_ranks << " ranks");
      ReduceCase test;
      test.shapes = kShapes;
      test.options.bucket_bytes = bucket_bytes;
      test.device = GetParam();
      comm::run_ranks(num_ranks, [&](comm::Group& group) { train(group, test, kNumSteps); });
    }
  }
}

TEST_P(ReducerSums, AreThoseInRankOrderForBucketsOfOneElement) {
  ReduceCase test;
  test.shapes = {kShapes.begin(), kShapes.begin() + 3};
  test.options.bucket_bytes = 1;
  test.device = GetParam();
  comm::run_ranks(3, [&](comm::Group& group) { train(group, test, 2); });
}

TEST_P(ReducerSums, AreThoseOfEveryPairOfTypes) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType wire_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int num_ranks : {1, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(param_dtype) << " as " << to_string(wire_dtype) << ", "
                     << num_ranks << " ranks");
        ReduceCase test;
        test.shapes = kShapes;
        test.param_dtype = param_dtype;
        test.options = {1500, wire_dtype};
        test.device = GetParam();
        comm::run_ranks(num_ranks, [&](comm::Group& group) { train(group, test, kNumSteps); });
      }
    }
  }
}

TEST_P(ReducerSums, StayRightWhenRanksAreLateAndOutOfStep) {
  for (std::uint64_t seed = 1; seed <= support::rounds(3U, 1U); ++seed) {
    ReduceCase test;
    test.shapes = kShapes;
    test.options.bucket_bytes = 1200;
    test.device = GetParam();
    comm::ThreadWorldOptions world;
    world.num_ranks = 4;
    world.max_delay_us = 30;
    world.seed = seed;
    comm::run_ranks(world, {}, [&](comm::Group& group) { train(group, test, 3); });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ReducerSums,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kLazy,
                                           DeviceKind::kRandom));

}  // namespace
}  // namespace tessera::grad
