// What the tests of the reducer share: a table of parameters without tensors, gradients whose every
// element says where it comes from, the plain sum that the reducer must equal to the bit, and a
// training whose uses differ from backward to backward, to be repeated in memory and on NVMe.
//
// Threads: one ReducerFixture per rank's thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "tessera/grad/element_loops.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/update_loops.h"
#include "testing/lazy_store.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/no_tensor.h"
#include "tests/support/rank_fixture.h"

namespace tessera::grad {

using support::NoTensor;

using DeviceKind = support::DeviceChoice;

struct ParamShape {
  std::int64_t numel = 0;
  bool trainable = true;
  bool dynamic = false;
  Tier tier = Tier::kDevice;  // of the gradient
};

struct ReduceCase {
  std::vector<ParamShape> shapes;
  DType param_dtype = DType::kFloat32;  // of gradients, too
  ReducerOptions options;
  DeviceKind device = DeviceKind::kCpu;
  bool is_discrete = false;  // as a GPU, with kernels; of mock devices
  int num_micro_batches = 0;
  bool is_planned = false;  // as ReducerParts'
  int num_host_buffers = 0;
  std::int64_t most_kept_bytes = kMostKeptBytes;
  std::string name = "p";          // of parameters, with a number behind it
  bool has_dynamic_group = false;  // else dynamic parameters share the group of the others
  // So many ranks share a copy of the model, those of neighbouring numbers; 0: all.
  int ranks_per_copy = 0;
  std::vector<int> shard_of_rank = {};  // as ReducerParts'
  // Above 0: so many neighbours of a copy are on a host, and reductions take two hops, if
  // options.num_hosts is above 1; the order of shards is then as it must be.
  int ranks_per_host = 0;
  const comm::Codec* codec = nullptr;  // of options.blocks
  // Puts a double in front of the device; empty: none.
  std::function<std::unique_ptr<device::Device>(std::unique_ptr<device::Device>)> wrap_device = {};
  // For what is on NVMe. With a store, memory is planned.
  std::function<std::unique_ptr<tier::Store>(int rank)> make_store = {};
  std::size_t pool_bytes = 0;
};

inline int copy_size(const comm::Group& all, const ReduceCase& test) {
  return test.ranks_per_copy > 0 ? test.ranks_per_copy : all.size();
}

inline int shard_of(const comm::Group& all, const ReduceCase& test) {
  const int rank = all.rank() % copy_size(all, test);
  return test.shard_of_rank.empty() ? rank : test.shard_of_rank[static_cast<std::size_t>(rank)];
}

class ReducerFixture : public support::RankFixture {
 public:
  ReducerFixture(comm::Group& all, const ReduceCase& test)
      : RankFixture(
            shard_of(all, test), copy_size(all, test),
            [&](Ledger& ledger) {
              auto device = support::make_device(test.device, ledger, all.rank(), test.is_discrete);
              return test.wrap_device ? test.wrap_device(std::move(device)) : std::move(device);
            }),
        test_(test),
        all_(all),
        own_group_(test.ranks_per_copy > 0 ? all.split(all.rank() / num_ranks(), "copy") : nullptr),
        replicas_(test.ranks_per_copy > 0 ? all.split(all.rank() % num_ranks(), "replicas")
                                          : nullptr),
        group_(own_group_ ? *own_group_ : all),
        dynamic_group_(test.has_dynamic_group ? group_.split(0, "dynamic") : nullptr),
        hops_(split_hops("reduce")),
        dynamic_hops_(test.has_dynamic_group ? split_hops("dynamic") : Hops()) {
    for (std::size_t i = 0; i < test.shapes.size(); ++i) {
      shard::ParamSpec spec;
      spec.name = test.name + std::to_string(i);
      spec.numel = test.shapes[i].numel;
      spec.dtype = test.param_dtype;
      spec.trainable = test.shapes[i].trainable;
      spec.dynamic = test.shapes[i].dynamic;
      spec.placement.gradient = test.shapes[i].tier;
      params().add(spec, std::make_unique<NoTensor>());
    }
    if (test.make_store) {
      store_ = test_.make_store(all.rank());
      pool_ = std::make_unique<tier::BufferPool>(device(), Tier::kHost, test_.pool_bytes,
                                                 "gradient buffers");
    }
    make_reducer();
  }

  const ReduceCase& test() const { return test_; }
  Reducer& reducer() { return *reducer_; }
  comm::Group& all() { return all_; }
  comm::Group& group() { return group_; }  // that gradients are reduced in
  comm::Group& replicas() { return *replicas_; }
  grad::ReductionHops hops() { return {hops_.inside.get(), hops_.across.get()}; }
  int num_copies() const { return replicas_ ? replicas_->size() : 1; }
  std::size_t gradient_bytes() const {
    return ledger().current_bytes(Tier::kDevice, Role::kGradient);
  }
  tier::Store& store() { return *store_; }
  tier::BufferPool& pool() { return *pool_; }
  void destroy_reducer() { reducer_.reset(); }
  void make_reducer() {
    ReducerParts parts{group_, device(), params(), clock(), spans()};
    parts.most_kept_bytes = test_.most_kept_bytes;
    parts.dynamic_group = dynamic_group_.get();
    parts.codec = test_.codec;
    parts.hops = hops();
    parts.dynamic_hops = {dynamic_hops_.inside.get(), dynamic_hops_.across.get()};
    parts.num_micro_batches = test_.num_micro_batches;
    parts.num_host_buffers = test_.num_host_buffers;
    parts.is_planned = test_.is_planned;
    parts.shard_of_rank = test_.shard_of_rank;
    if (replicas_) {
      parts.replicas = replicas_.get();
      parts.all_ranks = &all_;
    }
    if (test_.is_discrete) {
      optim::set_reducer_kernels(parts, *kernels_);
    }
    optim::set_host_kernels(parts, *host_kernels_, host_->stream(device::StreamKind::kGather));
    if (store_) {
      parts.is_planned = true;
      parts.nvme = {store_.get(), pool_.get()};
      parts.block_sum_of_squares = optim::best_loops().block_sum_of_squares;
      parts.ledger = &ledger();
    }
    reducer_ = std::make_unique<Reducer>(parts, test_.options);
  }

 private:
  struct Hops {
    std::unique_ptr<comm::Group> inside;
    std::unique_ptr<comm::Group> across;
  };
  Hops split_hops(const std::string& name) {
    if (test_.options.num_hosts == 1) {
      return {};
    }
    const int host = group_.rank() / test_.ranks_per_host;
    const int local_rank = group_.rank() % test_.ranks_per_host;
    Hops hops;
    hops.inside = group_.split(host, name + ".inside");
    hops.across = group_.split(local_rank, name + ".across");
    return hops;
  }

  const ReduceCase test_;
  comm::Group& all_;
  // Null: `all` has one copy.
  const std::unique_ptr<comm::Group> own_group_;
  const std::unique_ptr<comm::Group> replicas_;
  comm::Group& group_;
  std::unique_ptr<comm::Group> dynamic_group_;
  const Hops hops_;
  const Hops dynamic_hops_;
  const std::unique_ptr<optim::Kernels> kernels_ = optim::make_cpu_kernels(1);
  const std::unique_ptr<device::Device> host_ = device::make_cpu_device();
  const std::unique_ptr<optim::Kernels> host_kernels_ = optim::make_cpu_kernels(1);
  std::unique_ptr<tier::Store> store_;
  std::unique_ptr<tier::BufferPool> pool_;
  std::unique_ptr<Reducer> reducer_;
};

// Which backward of which rank.
struct Source {
  int rank = 0;
  int step = 0;
  int backward = 0;
};

// Of many magnitudes, so that another order of summation is another sum.
inline float gradient_value(const Source& source, int param, std::int64_t index) {
  std::uint64_t bits = static_cast<std::uint64_t>(source.rank) * 1000003 +
                       static_cast<std::uint64_t>(source.step) * 7919 +
                       static_cast<std::uint64_t>(source.backward) * 104729 +
                       static_cast<std::uint64_t>(param) * 1299709 +
                       static_cast<std::uint64_t>(index) * 15485863;
  bits ^= bits >> 29;
  bits *= 0xbf58476d1ce4e5b9ULL;
  bits ^= bits >> 32;
  const float mantissa = static_cast<float>(bits & 0xffff) / 32768 - 1;
  return std::ldexp(mantissa, static_cast<int>((bits >> 16) % 12) - 6);
}

inline float rounded(float value, DType dtype) {
  std::uint32_t narrow = 0;
  float result = 0;
  convert_elements(&narrow, dtype, &value, DType::kFloat32, 1);
  convert_elements(&result, DType::kFloat32, &narrow, dtype, 1);
  return result;
}

// Overwritten before it is freed, so that a late reader meets NaN.
inline FullGradient make_gradient(const Source& source, const shard::Param& param, DType dtype) {
  const auto numel = static_cast<std::size_t>(param.layout().numel());
  const std::size_t bytes = numel * bytes_of(dtype);
  std::shared_ptr<std::byte> memory(new std::byte[bytes + 1], [bytes](std::byte* data) {
    std::memset(data, device::kPoisonByte, bytes);
    delete[] data;
  });
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    values[i] = gradient_value(source, param.id(), static_cast<std::int64_t>(i));
  }
  convert_elements(memory.get(), dtype, values.data(), DType::kFloat32, numel);
  return {memory.get(), dtype, memory};
}

// The shard's gradient with its padding, in fp32; of one on the host, micro-batches added in order.
inline std::vector<float> values_of(ReducerFixture& world, const ShardGradient& gradient,
                                    std::int64_t numel) {
  gradient.ready.wait();
  std::vector<float> values(static_cast<std::size_t>(numel));
  if (gradient.low == nullptr) {
    convert_elements(values.data(), DType::kFloat32, gradient.values, gradient.dtype,
                     values.size());
  }
  for (std::size_t i = 0; gradient.low != nullptr && i < values.size(); ++i) {
    const auto half = [i](const void* halves) {
      return static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(halves)[i]);
    };
    values[i] = std::bit_cast<float>(half(gradient.values) << 16 | half(gradient.low));
  }
  for (const void* const later : gradient.later) {
    add_elements(values.data(), later, gradient.dtype, values.size());
  }
  EXPECT_TRUE(gradient.is_on_host || gradient.later.empty()) << "on rank " << world.rank();
  return values;
}

// What `is_used(source, param)` says was used, summed in rank order and rounded to the wire's type,
// then over backwards.
template <typename IsUsed>
void expect_sums(ReducerFixture& world, int step, int num_backwards, const IsUsed& is_used) {
  const DType wire =
      world.num_ranks() == 1 ? world.test().param_dtype : world.test().options.wire_dtype;
  for (int id = 0; id < world.params().num_params(); ++id) {
    const shard::Param& param = world.params()[id];
    if (!param.trainable()) {
      continue;
    }
    const ShardGradient gradient = world.reducer().shard_gradient(id);
    ASSERT_EQ(gradient.numel, param.range().numel);
    const bool is_padded = world.num_ranks() > 1;
    const std::vector<float> values =
        values_of(world, gradient, is_padded ? param.layout().shard_numel() : gradient.numel);
    for (std::size_t i = static_cast<std::size_t>(gradient.numel); i < values.size(); ++i) {
      ASSERT_EQ(values[i], 0) << "padding of " << param.name();
    }
    for (std::int64_t i = 0; i < gradient.numel; ++i) {
      const std::int64_t index = param.range().begin + i;
      float total = 0;
      for (int backward = 0; backward < num_backwards; ++backward) {
        float sum = 0;
        for (int rank = 0; rank < world.num_ranks(); ++rank) {
          const Source source{rank, step, backward};
          const float value =
              is_used(source, id)
                  ? rounded(rounded(gradient_value(source, id, index), world.test().param_dtype),
                            wire)
                  : 0.0F;
          sum = rank == 0 ? value : sum + value;
        }
        sum = rounded(sum, wire);
        total = backward == 0 ? sum : total + sum;
      }
      const float value = values[static_cast<std::size_t>(i)];
      // A sum of nothing but zeros may have either sign.
      ASSERT_TRUE(std::memcmp(&value, &total, sizeof(float)) == 0 || (total == 0 && value == 0))
          << param.name() << "[" << index << "] is " << value << ", not " << total << ", on rank "
          << world.rank() << " in step " << step;
    }
  }
}

// Hands over the gradient that `source` has of a parameter; what comes back tells when its memory
// is gone.
inline std::weak_ptr<void> add(ReducerFixture& world, const Source& source, int id) {
  const shard::Param& param = world.params()[id];
  FullGradient gradient = make_gradient(source, param, world.test().param_dtype);
  const std::weak_ptr<void> watch = gradient.owner;
  world.reducer().add(param, std::move(gradient));
  return watch;
}

// Of all trainable parameters, in the order of backward.
inline void add_all(ReducerFixture& world, const Source& source) {
  for (int id = world.params().num_params() - 1; id >= 0; --id) {
    if (world.params()[id].trainable()) {
      add(world, source, id);
    }
  }
}

template <typename Exception>
void expect_error(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "expected an error with: " << part;
  } catch (const Exception& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

inline bool always(const Source& /*source*/, int /*param*/) { return true; }
inline bool never(const Source& /*source*/, int /*param*/) { return false; }

// What the reducer left, step by step: every shard with its padding, and its sum of squares.
struct ShardSums {
  std::vector<std::vector<float>> shards;
  std::vector<double> squares;
  int num_on_the_way = 0;  // of those, known without another look at the values
};

inline std::vector<float> read_shard(ReducerFixture& world, int id) {
  const shard::Param& param = world.params()[id];
  const bool padded = world.num_ranks() > 1 || world.num_copies() > 1;
  const std::int64_t numel = padded ? param.layout().shard_numel() : param.range().numel;
  std::vector<float> values(static_cast<std::size_t>(numel));
  if (numel == 0) {
    return values;
  }
  const ShardGradient gradient = world.reducer().shard_gradient(id);
  EXPECT_EQ(gradient.numel, param.range().numel);
  EXPECT_EQ(gradient.values == nullptr, world.reducer().is_on_nvme(id));
  if (!world.reducer().is_on_nvme(id)) {
    return values_of(world, gradient, numel);
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

inline void append_sums(ReducerFixture& world, ShardSums& sums) {
  for (int id = 0; id < world.params().num_params(); ++id) {
    if (!world.params()[id].trainable()) {
      continue;
    }
    sums.shards.push_back(read_shard(world, id));
    const std::int64_t numel = world.params()[id].range().numel;
    sums.squares.push_back(world.reducer().is_on_nvme(id)
                               ? world.reducer().sum_of_squares(id).value()
                               : optim::sum_of_squares(sums.shards.back().data(), numel));
    if (const auto on_the_way = world.reducer().sum_of_squares(id)) {
      EXPECT_EQ(*on_the_way, sums.squares.back()) << world.params()[id].name();
      ++sums.num_on_the_way;
    }
  }
}

// Some with zeros of either sign, of which a sum keeps the sign that its order gives.
inline void add_signed(ReducerFixture& world, const Source& source, int id) {
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
inline void run_backward(ReducerFixture& world, const Source& source) {
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

inline ShardSums train(ReducerFixture& world, int num_steps, int num_backwards) {
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
    shape.tier = Tier::kDevice;
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
