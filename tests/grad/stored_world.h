// A training of gradients with uses that differ from backward to backward, to be repeated with
// shards in memory and in a store.
//
// Threads: as RankWorld.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tessera/optim/kernels.h"
#include "testing/lazy_store.h"
#include "tests/grad/reducer_world.h"
#include "tests/support/aligned_bytes.h"

namespace tessera::grad {

// What the reducer left, step by step: every shard with its padding, and its sum of squares.
struct ShardSums {
  std::vector<std::vector<float>> shards;
  std::vector<double> squares;
};

inline std::vector<float> read_shard(RankWorld& world, int id) {
  const shard::Param& param = world.params()[id];
  const bool padded = world.num_ranks() > 1;
  const std::int64_t numel = padded ? param.layout().shard_numel() : param.range().numel;
  std::vector<float> values(static_cast<std::size_t>(numel));
  if (numel == 0) {
    return values;
  }
  const ShardGradient gradient = world.reducer().shard_gradient(id);
  EXPECT_EQ(gradient.numel, param.range().numel);
  EXPECT_EQ(gradient.data == nullptr, world.reducer().is_stored(id));
  if (!world.reducer().is_stored(id)) {
    std::copy_n(gradient.data, numel, values.data());
    return values;
  }
  // In ranges that no tile has.
  constexpr std::int64_t kRange = 3 * 1024;
  for (std::int64_t begin = 0; begin < numel; begin += kRange) {
    const std::int64_t count = std::min(kRange, numel - begin);
    testing::AlignedBytes memory(static_cast<std::size_t>(kRange) * sizeof(float));
    auto* to = reinterpret_cast<float*>(memory.data());
    world.reducer().start_read(id, begin, count, to).wait();
    std::copy_n(to, count, values.data() + begin);
    const std::int64_t in_blocks = (count + 1023) / 1024 * 1024;
    EXPECT_TRUE(std::all_of(to + count, to + in_blocks, [](float value) { return value == 0; }))
        << "behind the end of " << param.name();
  }
  return values;
}

inline void append_sums(RankWorld& world, ShardSums& sums) {
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (!world.params()[id].trainable()) {
      continue;
    }
    sums.shards.push_back(read_shard(world, id));
    const std::int64_t numel = world.params()[id].range().numel;
    sums.squares.push_back(world.reducer().is_stored(id)
                               ? world.reducer().sum_of_squares(id).value()
                               : optim::sum_of_squares(sums.shards.back().data(), numel));
  }
}

// Some with zeros of either sign, of which a sum keeps the sign that its order gives.
inline void add_signed(RankWorld& world, const Source& source, int id) {
  const shard::Param& param = world.params()[id];
  const DType dtype = world.test().param_dtype;
  FullGradient gradient = make_gradient(source, param, dtype);
  const float minus_zero = -0.0F;
  for (std::int64_t i = 0; i < param.layout().numel(); i += 5) {
    convert_elements(
        static_cast<std::byte*>(gradient.data) + static_cast<std::size_t>(i) * bytes_of(dtype),
        dtype, &minus_zero, DType::kFloat32, 1);
  }
  world.reducer().add(param, std::move(gradient));
}

inline bool is_used(const Source& source, int id) {
  return (source.rank * 31 + source.step * 17 + source.backward * 7 + id * 13) % 4 != 0;
}

// Dynamic parameters are reduced in lists of which the first backward has only a part.
inline void run_backward(RankWorld& world, const Source& source) {
  std::vector<int> list;
  for (int id = world.params().num_params() - 1; id >= 0; --id) {
    const shard::Param& param = world.params()[id];
    if (!param.trainable()) {
      continue;
    }
    const bool is_listed = param.dynamic() && (id + source.backward) % 2 == 0;
    if (is_listed) {
      list.push_back(id);
    }
    if (is_used(source, id) && (is_listed || !param.dynamic())) {
      add_signed(world, source, id);
    }
  }
  world.reducer().reduce_dynamic(list);
  world.reducer().finish_backward();
}

inline ShardSums train(RankWorld& world, int num_steps, int num_backwards) {
  ShardSums sums;
  for (int step = 0; step < num_steps; ++step) {
    for (int backward = 0; backward < num_backwards; ++backward) {
      run_backward(world, {world.rank(), step, backward});
    }
    append_sums(world, sums);
    world.reducer().clear();
  }
  return sums;
}

inline ReduceCase in_memory(ReduceCase test) {
  for (ParamShape& shape : test.shapes) {
    shape.stored = false;
  }
  test.make_store = {};
  return test;
}

inline void expect_same_bits(const ShardSums& sums, const ShardSums& expected) {
  ASSERT_EQ(sums.shards.size(), expected.shards.size());
  for (std::size_t i = 0; i < sums.shards.size(); ++i) {
    ASSERT_EQ(sums.shards[i].size(), expected.shards[i].size());
    for (std::size_t k = 0; k < sums.shards[i].size(); ++k) {
      ASSERT_EQ(std::memcmp(&sums.shards[i][k], &expected.shards[i][k], sizeof(float)), 0)
          << "shard " << i << ", element " << k << ": " << sums.shards[i][k] << ", not "
          << expected.shards[i][k];
    }
    ASSERT_EQ(std::memcmp(&sums.squares[i], &expected.squares[i], sizeof(double)), 0)
        << "shard " << i << ": " << sums.squares[i] << ", not " << expected.squares[i];
  }
}

}  // namespace tessera::grad
