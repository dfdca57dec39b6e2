// What the tests of sums over replicas share: the homes of gradients, and the plain sum in the
// order that [Note: sums over replicas] in reducer.h gives.
//
// Threads: as reducer_fixture.h.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {

struct Copies {
  int num_ranks = 0;
  int ranks_per_copy = 0;

  int num_copies() const { return num_ranks / ranks_per_copy; }
};

inline std::string name_of(const Copies& copies) {
  return std::to_string(copies.num_copies()) + "CopiesOf" + std::to_string(copies.ranks_per_copy);
}

enum class Home : std::uint8_t { kCpu, kLateCpu, kDiscrete, kHost, kMixed, kNvme, kDiscreteNvme };
inline std::vector<Home> all_homes() {
  if (support::kIsSanitized) {
    return {Home::kLateCpu, Home::kMixed, Home::kNvme, Home::kDiscreteNvme};
  }
  return {Home::kCpu,   Home::kLateCpu, Home::kDiscrete,    Home::kHost,
          Home::kMixed, Home::kNvme,    Home::kDiscreteNvme};
}

inline std::string name_of(Home home) {
  constexpr std::array kNames = {
      "cpu", "late cpu", "discrete", "host", "mixed", "nvme", "nvme beside discrete"};
  return kNames.at(static_cast<std::size_t>(home));
}

inline ReduceCase at_home(ReduceCase test, Home home) {
  const bool on_nvme = home == Home::kNvme || home == Home::kDiscreteNvme;
  test.is_discrete = home == Home::kDiscrete || home == Home::kHost || home == Home::kMixed ||
                     home == Home::kDiscreteNvme;
  test.device = home == Home::kCpu                               ? DeviceKind::kCpu
                : home == Home::kDiscrete || home == Home::kHost ? DeviceKind::kRandom
                                                                 : DeviceKind::kLazy;
  for (std::size_t i = 0; i < test.shapes.size(); ++i) {
    const bool leaves = home == Home::kHost || (i % 3 != 2 && (on_nvme || home == Home::kMixed));
    test.shapes[i].tier = !leaves ? Tier::kDevice : on_nvme ? Tier::kNvme : Tier::kHost;
  }
  if (on_nvme) {
    test.make_store = [](int /*rank*/) { return std::make_unique<LazyStore>(); };
    test.pool_bytes = std::size_t{4} * 4096 * sizeof(float);
  }
  return test;
}

using IsUsed = std::function<bool(const Source&, int)>;

inline bool mostly(const Source& source, int id) {
  return (source.rank * 31 + source.step * 17 + source.backward * 7 + id * 13) % 4 != 0;
}

// Of one micro-batch, over the ranks of a copy, as it is on the wire.
inline float sum_of_copy(const ReduceCase& test, int copy, Source source, int id,
                         std::int64_t index, const IsUsed& is_used) {
  float sum = 0;
  for (int rank = 0; rank < test.ranks_per_copy; ++rank) {
    source.rank = copy * test.ranks_per_copy + rank;
    const float value = is_used(source, id)
                            ? rounded(rounded(gradient_value(source, id, index), test.param_dtype),
                                      test.options.wire_dtype)
                            : 0.0F;
    sum = rank == 0 ? value : sum + value;
  }
  return rounded(sum, test.options.wire_dtype);
}

// A static parameter's element behind so many backwards of a step; `sum_of(copy, backward)` is as
// sum_of_copy().
template <typename SumOf>
float expected_total(const ReduceCase& test, int num_copies, int num_backwards,
                     const SumOf& sum_of) {
  const int k = test.num_micro_batches;
  const int num_added_before = k == 1                        ? 0
                               : k == 0 || num_backwards < k ? num_backwards
                                                             : k;  // at home, then over replicas
  float total = 0;
  for (int copy = 0; copy < num_copies; ++copy) {
    float at_home = 0;
    for (int backward = 0; backward < num_added_before; ++backward) {
      const float sum = sum_of(copy, backward);
      at_home = backward == 0 ? sum : at_home + sum;
    }
    total = copy == 0 ? at_home : total + at_home;
  }
  for (int backward = num_added_before; backward < num_backwards; ++backward) {
    float over_copies = 0;
    for (int copy = 0; copy < num_copies; ++copy) {
      const float sum = sum_of(copy, backward);
      over_copies = copy == 0 ? sum : over_copies + sum;
    }
    over_copies = rounded(over_copies, test.options.wire_dtype);
    total = backward == 0 ? over_copies : total + over_copies;
  }
  return total;
}

inline float expected_element(const ReduceCase& test, int num_copies, int step, int num_backwards,
                              int id, std::int64_t index, const IsUsed& is_used) {
  return expected_total(test, num_copies, num_backwards, [&](int copy, int backward) {
    return sum_of_copy(test, copy, {0, step, backward}, id, index, is_used);
  });
}

// A sum of nothing but zeros may have either sign.
inline bool is_same(float value, float expected) {
  return std::memcmp(&value, &expected, sizeof(float)) == 0 || (value == 0 && expected == 0);
}

// Elements of this rank's shards that are not what they should be; the first is named.
inline int count_wrong(ReducerFixture& world, int step, int num_backwards, const IsUsed& is_used,
                       std::string* first = nullptr) {
  int num_wrong = 0;
  for (int id = 0; id < world.params().num_params(); ++id) {
    const shard::Param& param = world.params()[id];
    if (!param.trainable() || param.dynamic()) {
      continue;
    }
    const std::vector<float> values = read_shard(world, id);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto offset = static_cast<std::int64_t>(i);
      const std::int64_t index = param.range().begin + offset;
      const float expected = offset < param.range().numel
                                 ? expected_element(world.test(), world.num_copies(), step,
                                                    num_backwards, id, index, is_used)
                                 : 0.0F;
      if (!is_same(values[i], expected) && num_wrong++ == 0 && first != nullptr) {
        *first = detail::concat(param.name(), "[", index, "] is ", values[i], ", not ", expected,
                                ", on rank ", world.all().rank(), " in step ", step);
      }
    }
  }
  return num_wrong;
}

inline void expect_replica_sums(ReducerFixture& world, int step, int num_backwards,
                                const IsUsed& is_used) {
  std::string first;
  EXPECT_EQ(count_wrong(world, step, num_backwards, is_used, &first), 0) << first;
}

// One micro-batch of static parameters.
inline void run_static(ReducerFixture& world, int step, int backward, const IsUsed& is_used) {
  const Source source{world.all().rank(), step, backward};
  for (int id = world.params().num_params() - 1; id >= 0; --id) {
    const shard::Param& param = world.params()[id];
    if (param.trainable() && !param.dynamic() && is_used(source, id)) {
      add(world, source, id);
    }
  }
  world.reducer().finish_backward();
}

}  // namespace tessera::grad
