// What the tests of reductions in hops share: the worlds, and the plain sum that [Note: quantised
// reductions] in reducer.h describes, shard by shard, without buckets: every value is encoded and
// decoded once per hop.
//
// Threads: as reducer_fixture.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/quant/block_codec.h"
#include "tests/grad/replica_fixture.h"

namespace tessera::grad {

struct HopWorld {
  int num_ranks = 0;
  int ranks_per_copy = 0;
  int ranks_per_host = 0;

  int inside_size() const { return std::min(ranks_per_host, ranks_per_copy); }
  bool takes_two_hops() const { return inside_size() > 1 && inside_size() < ranks_per_copy; }
  int num_hosts() const { return takes_two_hops() ? ranks_per_copy / inside_size() : 1; }
  Copies copies() const { return {num_ranks, ranks_per_copy}; }
};

inline std::string name_of(const HopWorld& world) {
  return name_of(world.copies()) + "On" + std::to_string(world.ranks_per_host);
}

inline const comm::Codec* codec_of(int bits) {
  static const std::unique_ptr<comm::Codec> int4 = quant::make_cpu_block_codec({4, 128});
  static const std::unique_ptr<comm::Codec> int8 = quant::make_cpu_block_codec({8, 128});
  return bits == 0 ? nullptr : bits == 4 ? int4.get() : int8.get();
}

// Some are cut, some share a bucket, some end within a block, some are padding on the last rank,
// and some are reduced from where they lie. `bits`: 0: exact.
inline ReduceCase hop_case(const HopWorld& world, int bits, DType param_dtype, DType wire_dtype) {
  ReduceCase test;
  const std::int64_t whole = std::int64_t{128} * world.ranks_per_copy;
  test.shapes = {
      {40},   {support::rounds(9001, 4500)}, {7}, {64, false}, {9000}, {3}, {9600}, {130}, {0}, {1},
      {whole}};
  test.param_dtype = param_dtype;
  test.options = {40000, wire_dtype};
  test.options.num_hosts = world.num_hosts();
  if (bits > 0) {
    test.options.blocks = quant::BlockFormat{bits, 128};
    test.codec = codec_of(bits);
  }
  test.ranks_per_copy = world.ranks_per_copy;
  test.ranks_per_host = world.inside_size();
  const int hosts = world.num_hosts();
  for (int rank = 0; hosts > 1 && rank < world.ranks_per_copy; ++rank) {
    test.shard_of_rank.push_back(rank % test.ranks_per_host * hosts + rank / test.ranks_per_host);
  }
  return test;
}

// What arrives of these values.
inline std::vector<float> passed_on(const comm::Codec* codec, std::vector<float> values,
                                    DType dtype) {
  if (codec == nullptr) {
    return values;
  }
  const auto numel = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> typed(values.size() * bytes_of(dtype));
  convert_elements(typed.data(), dtype, values.data(), DType::kFloat32, values.size());
  testing::AlignedBytes wire(codec->wire_bytes(numel));
  codec->encode(typed.data(), dtype, numel, wire.data(), nullptr).wait();
  codec->decode(wire.data(), numel, values.data(), DType::kFloat32, nullptr).wait();
  return values;
}

// Once for each shard: shards are asked for element by element.
class HopSums {
 public:
  HopSums(const ReduceCase& test, int num_copies, IsUsed is_used)
      : test_(test), num_copies_(num_copies), is_used_(std::move(is_used)) {}

  // This rank's shard behind so many backwards of a step.
  std::vector<float> expected(const shard::Param& param, int step, int num_backwards) {
    const int shard = param.layout().shard_numel() == 0
                          ? 0
                          : static_cast<int>(param.range().begin / param.layout().shard_numel());
    std::vector<float> values(static_cast<std::size_t>(param.range().numel));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = expected_total(test_, num_copies_, num_backwards, [&](int copy, int backward) {
        return sum_of_copy(param, shard, copy, step, backward)[i];
      });
    }
    return values;
  }

 private:
  const std::vector<float>& sum_of_copy(const shard::Param& param, int shard, int copy, int step,
                                        int backward) {
    std::vector<float>& sum = sums_[{param.id(), shard, copy, step, backward}];
    if (!sum.empty()) {
      return sum;
    }
    const bool two = test_.options.num_hosts > 1;
    const int per_host = two ? test_.ranks_per_host : test_.ranks_per_copy;
    const DType wire = test_.options.wire_dtype;
    for (int host = 0; host < test_.ranks_per_copy / per_host; ++host) {
      std::vector<float> inside;
      for (int local = 0; local < per_host; ++local) {
        const int rank = copy * test_.ranks_per_copy + host * per_host + local;
        add_to(inside, passed_on(codec(), given(param, shard, {rank, step, backward}), wire));
      }
      add_to(sum, two ? passed_on(codec(), inside, DType::kFloat32) : inside);
    }
    for (float& value : sum) {
      value = rounded(value, wire);
    }
    return sum;
  }

  const comm::Codec* codec() const { return test_.ranks_per_copy > 1 ? test_.codec : nullptr; }

  std::vector<float> given(const shard::Param& param, int shard, const Source& source) const {
    const std::int64_t begin = shard * param.layout().shard_numel();
    std::vector<float> values(static_cast<std::size_t>(
        std::min(param.layout().shard_numel(), param.layout().numel() - begin)));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto index = begin + static_cast<std::int64_t>(i);
      values[i] =
          is_used_(source, param.id())
              ? rounded(rounded(gradient_value(source, param.id(), index), test_.param_dtype),
                        test_.options.wire_dtype)
              : 0.0F;
    }
    return values;
  }

  static void add_to(std::vector<float>& sum, const std::vector<float>& values) {
    if (sum.empty()) {
      sum = values;
      return;
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] += values[i];
    }
  }

  const ReduceCase test_;
  const int num_copies_;
  const IsUsed is_used_;
  std::map<std::tuple<int, int, int, int, int>, std::vector<float>> sums_;
};

// Elements of this rank's shards that are not what they should be; the first is named.
inline int count_wrong(ReducerFixture& world, HopSums& sums, int step, int num_backwards,
                       std::string* first = nullptr) {
  int num_wrong = 0;
  for (int id = 0; id < world.params().num_params(); ++id) {
    const shard::Param& param = world.params()[id];
    if (!param.trainable()) {
      continue;
    }
    const std::vector<float> values = read_shard(world, id);
    const std::vector<float> expected = sums.expected(param, step, num_backwards);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float right = i < expected.size() ? expected[i] : 0.0F;
      if (!is_same(values[i], right) && num_wrong++ == 0 && first != nullptr) {
        *first = detail::concat(param.name(), ", element ", i, " of the shard of rank ",
                                world.all().rank(), " is ", values[i], ", not ", right);
      }
    }
  }
  return num_wrong;
}

}  // namespace tessera::grad
