// Dynamic parameters: sums over ranks that use different ones, at different meetings, to the bit.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

// Neighbours and strays, without elements, with and without padding, one frozen.
const std::vector<ParamShape> kDynamicShapes = {{5},
                                                {0, true, true},
                                                {1, true, true},
                                                {96, true, true},
                                                {3},
                                                {257},
                                                {1024, true, true},
                                                {17, true, true},
                                                {48, true, true},
                                                {12, false, true},
                                                {640},
                                                {33, true, true},
                                                {2, true, true},
                                                {0},
                                                {8, true, true}};
constexpr int kNumMeetings = 3;
constexpr int kNever = -1;

// The meeting before which the gradient comes. The same answer on every rank.
int meeting_of(const Source& source, int param) {
  unsigned mix =
      static_cast<unsigned>(source.rank * 11 + source.step * 7 + source.backward * 3 + param * 131);
  mix = (mix ^ (mix >> 3)) * 0x9e3779b1U;
  const auto draw = static_cast<int>((mix >> 16) % 5);
  return draw < kNumMeetings ? draw : kNever;
}

// In a random order that is the same on every rank: what somebody has, and now and then what nobody
// has.
std::vector<int> agreed_list(const ReducerFixture& world, const Source& at, int meeting) {
  std::vector<int> ids;
  for (int id = 0; id < world.params().num_params(); ++id) {
    const shard::Param& param = world.params()[id];
    bool is_listed = (id + meeting + at.step) % 7 == 0;
    for (int rank = 0; rank < world.num_ranks(); ++rank) {
      is_listed = is_listed || meeting_of({rank, at.step, at.backward}, id) == meeting;
    }
    if (param.dynamic() && param.trainable() && is_listed) {
      ids.push_back(id);
    }
  }
  std::mt19937 random(static_cast<unsigned>(at.step * 100 + at.backward * 10 + meeting));
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

void run_meetings(ReducerFixture& world, const Source& source, std::mt19937& random) {
  std::vector<int> order(static_cast<std::size_t>(world.params().num_params()));
  std::iota(order.begin(), order.end(), 0);
  for (int meeting = 0; meeting < kNumMeetings; ++meeting) {
    std::shuffle(order.begin(), order.end(), random);  // every rank in another order
    std::vector<int> expected;
    for (const int id : order) {
      const shard::Param& param = world.params()[id];
      if (param.trainable() && meeting_of(source, id) == meeting) {
        add(world, source, id);
        if (param.dynamic() && param.layout().numel() > 0 && world.num_ranks() > 1) {
          expected.push_back(id);
        }
      }
    }
    std::sort(expected.begin(), expected.end());
    ASSERT_EQ(world.reducer().pending_dynamic(), expected);
    world.reducer().reduce_dynamic(agreed_list(world, source, meeting));
    ASSERT_TRUE(world.reducer().pending_dynamic().empty());
  }
  world.reducer().finish_backward();
}

// What the meetings add up to: each in rank order, one after the other.
float expected_sum(const ReducerFixture& world, int step, int num_backwards, int id,
                   std::int64_t index) {
  const shard::Param& param = world.params()[id];
  const DType wire =
      world.num_ranks() == 1 ? world.test().param_dtype : world.test().options.wire_dtype;
  float total = 0;
  for (int backward = 0; backward < num_backwards; ++backward) {
    // A static parameter, or one that needs no agreement, is reduced once.
    const bool is_split = param.dynamic() && world.num_ranks() > 1;
    for (int meeting = 0; meeting < (is_split ? kNumMeetings : 1); ++meeting) {
      float sum = 0;
      for (int rank = 0; rank < world.num_ranks(); ++rank) {
        const Source source{rank, step, backward};
        const int when = meeting_of(source, id);
        if (is_split ? when == meeting : when != kNever) {
          sum +=
              rounded(rounded(gradient_value(source, id, index), world.test().param_dtype), wire);
        }
      }
      total += rounded(sum, wire);
    }
  }
  return total;
}

void train_dynamic(comm::Group& group, const ReduceCase& test) {
  ReducerFixture world(group, test);
  std::mt19937 random(static_cast<unsigned>(group.rank()) * 101 + 1);
  for (int step = 0; step < support::rounds(3, 2); ++step) {
    const int num_backwards = 1 + step % 3;
    for (int backward = 0; backward < num_backwards; ++backward) {
      run_meetings(world, {group.rank(), step, backward}, random);
    }
    for (int id = 0; id < world.params().num_params(); ++id) {
      const shard::Param& param = world.params()[id];
      if (!param.trainable()) {
        continue;
      }
      const ShardGradient gradient = world.reducer().shard_gradient(id);
      ASSERT_EQ(gradient.numel, param.range().numel);
      for (std::int64_t i = 0; i < gradient.numel; ++i) {
        ASSERT_EQ(gradient.data[i],
                  expected_sum(world, step, num_backwards, id, param.range().begin + i))
            << param.name() << "[" << param.range().begin + i << "] on rank " << group.rank()
            << " in step " << step;
      }
      for (std::int64_t i = gradient.numel; group.size() > 1 && i < param.layout().shard_numel();
           ++i) {
        ASSERT_EQ(gradient.data[i], 0) << "padding of " << param.name();
      }
    }
    world.reducer().clear();
  }
}

class ReducerDynamic : public ::testing::TestWithParam<DeviceKind> {};

TEST_P(ReducerDynamic, SumsAreThoseOfTheConsensusForEveryBucketSize) {
  for (const std::int64_t bucket_bytes : {1, 1000, 1 << 20}) {
    for (const int num_ranks : {1, 2, 4}) {
      SCOPED_TRACE(::testing::Message() << bucket_bytes << " bytes, " << num_ranks << " ranks");
      ReduceCase test;
      test.shapes = kDynamicShapes;
      if (bucket_bytes == 1) {  // one element per call
        test.shapes.resize(3);
      }
      test.options.bucket_bytes = bucket_bytes;
      test.device = GetParam();
      test.has_dynamic_group = true;
      comm::run_ranks(num_ranks, [&](comm::Group& group) { train_dynamic(group, test); });
    }
  }
}

TEST_P(ReducerDynamic, SumsAreThoseOfTheConsensusForEveryPairOfTypes) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType wire_dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int num_ranks : {1, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(param_dtype) << " as " << to_string(wire_dtype) << ", "
                     << num_ranks << " ranks");
        ReduceCase test;
        test.shapes = kDynamicShapes;
        test.param_dtype = param_dtype;
        test.options = {1500, wire_dtype};
        test.device = GetParam();
        test.has_dynamic_group = true;
        comm::run_ranks(num_ranks, [&](comm::Group& group) { train_dynamic(group, test); });
      }
    }
  }
}

TEST_P(ReducerDynamic, SumsStayRightWhenRanksAreLateAndOutOfStep) {
  for (std::uint64_t seed = 1; seed <= support::rounds(2U, 1U); ++seed) {
    ReduceCase test;
    test.shapes = kDynamicShapes;
    test.options.bucket_bytes = 1200;
    test.device = GetParam();
    test.has_dynamic_group = true;
    comm::ThreadWorldOptions world;
    world.num_ranks = 4;
    world.max_delay_us = 30;
    world.seed = seed;
    comm::run_ranks(world, {}, [&](comm::Group& group) { train_dynamic(group, test); });
  }
}

// Every third element is a negative zero; where all ranks have one, so is the sum.
FullGradient with_negative_zeros(const Source& source, const shard::Param& param) {
  FullGradient gradient = make_gradient(source, param, DType::kFloat32);
  for (std::int64_t i = 0; i < param.layout().numel(); i += 3) {
    static_cast<float*>(gradient.data)[i] = -0.0F;
  }
  return gradient;
}

// Three backwards, each with one list of all dynamic parameters; the shard gradients by id.
std::vector<std::vector<float>> sums_with_one_list(comm::Group& group, const ReduceCase& test) {
  ReducerFixture world(group, test);
  std::vector<int> every_dynamic;
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (world.params()[id].dynamic() && world.params()[id].trainable()) {
      every_dynamic.push_back(id);
    }
  }
  for (int backward = 0; backward < 3; ++backward) {
    for (int id = 0; id < world.params().num_params(); ++id) {
      const shard::Param& param = world.params()[id];
      if (param.trainable() && (id % 2 == 0 || (id + group.rank() + backward) % 4 != 0)) {
        world.reducer().add(param, with_negative_zeros({group.rank(), 0, backward}, param));
      }
    }
    world.reducer().reduce_dynamic(every_dynamic);
    world.reducer().finish_backward();
  }
  std::vector<std::vector<float>> sums;
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (world.params()[id].trainable()) {
      const ShardGradient sum = world.reducer().shard_gradient(id);
      sums.emplace_back(sum.data, sum.data + sum.numel);
    } else {
      sums.emplace_back();
    }
  }
  return sums;
}

TEST_P(ReducerDynamic, AParameterThatIsListedOnceInEveryBackwardHasTheBitsOfAStaticOne) {
  for (const DType wire : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t bucket_bytes : {400, 1 << 20}) {
      ReduceCase test;
      test.shapes = kDynamicShapes;
      test.options = {bucket_bytes, wire};
      test.device = GetParam();
      comm::run_ranks(3, [&](comm::Group& group) {
        ReduceCase dynamic = test;
        dynamic.has_dynamic_group = true;
        ReduceCase fixed = test;
        for (ParamShape& shape : fixed.shapes) {
          shape.dynamic = false;
        }
        const auto got = sums_with_one_list(group, dynamic);
        const auto expected = sums_with_one_list(group, fixed);
        for (std::size_t id = 0; id < expected.size(); ++id) {
          ASSERT_EQ(got[id].size(), expected[id].size());
          ASSERT_TRUE(expected[id].empty() || std::memcmp(got[id].data(), expected[id].data(),
                                                          got[id].size() * sizeof(float)) == 0)
              << "p" << id << " on rank " << group.rank();
        }
      });
    }
  }
}

TEST_P(ReducerDynamic, AGradientThatComesOnlyInTheSecondMicroBatchIsTheSum) {
  ReduceCase test;
  test.shapes = {{40}, {64, true, true}, {7, true, true}};
  test.device = GetParam();
  comm::run_ranks(2, [&](comm::Group& group) {
    ReducerFixture world(group, test);
    for (int step = 0; step < 2; ++step) {
      for (int backward = 0; backward < 2; ++backward) {
        const Source source{group.rank(), step, backward};
        add(world, source, 0);
        if (backward == 1 && group.rank() == 1) {
          add(world, source, 1);
        }
        world.reducer().reduce_dynamic(backward == 1 ? std::vector<int>{1} : std::vector<int>{});
        world.reducer().finish_backward();
      }
      expect_sums(world, step, 2, [](const Source& source, int id) {
        return id == 0 || (id == 1 && source.backward == 1 && source.rank == 1);
      });
      world.reducer().clear();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, ReducerDynamic,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kLazy,
                                           DeviceKind::kRandom));

}  // namespace
}  // namespace tessera::grad
