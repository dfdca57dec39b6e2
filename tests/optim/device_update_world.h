// One rank beside a device with memory of its own, the late double, and the same in one memory:
// what tests of the update on a device compare.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/device/device_cpu.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/sharded_optimizer.h"
#include "tessera/optim/tiered_optimizer.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/optim/copy_counter.h"
#include "tests/optim/state_bytes.h"
#include "tests/support/no_tensor.h"

namespace tessera::optim {

constexpr double kLr = 1e-2;
constexpr double kScale = 0.5;
constexpr int kSteps = 4;

using support::NoTensor;

struct Shape {
  std::int64_t numel = 0;
  Tier tier = Tier::kDevice;
  StoredParts parts;
  bool trainable = true;
};

inline StoredParts by_processor() { return {}; }
inline StoredParts by_device(bool resident) { return {false, false, false, true, resident}; }

struct Case {
  std::vector<Shape> shapes;
  DType dtype = DType::kBFloat16;
  device::LateMode mode = device::LateMode::kRandom;
  bool leaves = true;  // gradients of the processor's share go to the host as they come
  int num_backwards = 1;
  int num_slots = 2;
  std::size_t slot_numel = 4096;
  int num_lent = 0;               // slots besides, at most
  bool takes_back_early = false;  // before the update starts
  RuleOptions rule;
};

inline float value_of(std::int64_t i, std::uint64_t seed) {
  const auto hash = static_cast<std::uint64_t>(i) * 2654435761U + seed * 40503U;
  return static_cast<float>(static_cast<int>(hash >> 7 & 1023) - 512) / 1024;
}

inline std::vector<std::byte> elements(std::int64_t numel, DType dtype, std::uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel) * bytes_of(dtype));
  for (std::int64_t i = 0; i < numel; ++i) {
    const float value = value_of(i, seed);
    const BFloat16 half = to_bfloat16(value);
    const void* const from = dtype == DType::kFloat32 ? static_cast<const void*>(&value)
                                                      : static_cast<const void*>(&half);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * bytes_of(dtype), from,
                bytes_of(dtype));
  }
  return bytes;
}

// One rank. `own`: beside a device with memory of its own, as the case says; else in one memory.
class World {
 public:
  World(comm::Group& group, const Case& test, bool own)
      : test_(test),
        own_(own),
        spans_(clock_, 0),
        device_(make_device()),
        host_(device::make_cpu_device()),
        params_(group.rank(), group.size(), *device_),
        kernels_(make_cpu_kernels(1)),
        host_kernels_(make_cpu_kernels(2)) {
    for (std::size_t i = 0; i < test.shapes.size(); ++i) {
      shard::ParamSpec spec;
      spec.name = "p" + std::to_string(i);
      spec.numel = test.shapes[i].numel;
      spec.dtype = test.dtype;
      spec.trainable = test.shapes[i].trainable;
      spec.placement.parameter = own ? test.shapes[i].tier : Tier::kDevice;
      const shard::Param& param = params_.add(spec, std::make_unique<NoTensor>());
      leaving_.push_back(!test.shapes[i].parts.device_update);
      gradients_.emplace_back();
      write(param, elements(spec.numel, spec.dtype, i + 1));
    }
    grad::ReducerParts parts{group, *device_, params_, clock_, spans_};
    if (own) {
      set_reducer_kernels(parts, *kernels_);
      parts.leaves_to_host = test.leaves ? &leaving_ : nullptr;
    }
    reducer_ = std::make_unique<grad::Reducer>(
        parts, grad::ReducerOptions{std::int64_t{1} << 20, test.dtype});
    if (own) {
      TieredParts tiers{clock_, spans_};
      for (const Shape& shape : test.shapes) {
        tiers.stored.push_back(shape.parts);
      }
      tiers.sub_group_numel = 2048;
      tiers.own = {device_.get(), kernels_.get(), test.num_slots, test.slot_numel * 16};
      auto optimizer = std::make_unique<TieredOptimizer>(params_, *host_, *host_kernels_, test.rule,
                                                         std::move(tiers));
      update_ = optimizer->device_update();
      optimizer_ = std::move(optimizer);
    } else {
      optimizer_ = std::make_unique<ShardedOptimizer>(params_, *device_, *kernels_, test.rule);
    }
  }

  void step(int number) {
    optimizer_->prepare();
    for (int backward = 0; backward < test_.num_backwards; ++backward) {
      for (int id = params_.num_params() - 1; id >= 0; --id) {
        const shard::Param& param = params_[id];
        const auto seed = static_cast<std::uint64_t>(100 * number + 10 * backward + id);
        auto values = std::make_shared<std::vector<std::byte>>(
            elements(param.layout().numel(), test_.dtype, seed));
        gradients_[static_cast<std::size_t>(id)] = values;
        reducer_->add(param, {values->data(), test_.dtype, std::move(values)});
      }
      reducer_->finish_backward();
    }
    lend();
    if (test_.takes_back_early) {
      take_back();
    }
    norms.push_back(optimizer_->sum_of_squares(*reducer_));
    optimizer_->start_update(*reducer_, kLr, kScale);
    check_copies();
    take_back();
    if (number % 2 == 0) {
      let_go_of_copies();
    }
    optimizer_->wait();
    for (int id = 0; id < params_.num_params(); ++id) {
      EXPECT_TRUE(!test_.shapes[static_cast<std::size_t>(id)].parts.device_update ||
                  params_[id].updated().done())
          << "gradients go now, and " << params_[id].name() << " may be read where its was";
    }
    let_go_of_copies();
    reducer_->clear();
  }

  std::vector<std::vector<std::byte>> trained() {
    std::vector<std::vector<std::byte>> all;
    for (int id = 0; id < params_.num_params(); ++id) {
      const shard::Param& param = params_[id];
      param.updated().wait();
      std::vector<std::byte> shard(param.layout().shard_bytes());
      device_
          ->start_copy(shard.data(), param.shard(), shard.size(),
                       device_->stream(device::StreamKind::kWrite))
          .wait();
      all.push_back(std::move(shard));
      append_states(*optimizer_, test_.rule, id, all);
    }
    return all;
  }

  Optimizer& optimizer() { return *optimizer_; }
  // REQUIRES: own.
  std::size_t most_copies_up() const {
    return static_cast<const CopyCounter&>(*device_).most_copies_up();
  }
  shard::Param& param(int id) { return params_[id]; }
  std::vector<double> norms;
  int num_lent = 0;
  int num_copies = 0;  // on the device, of parameters that live on the host

 private:
  std::unique_ptr<device::Device> make_device() const {
    if (!own_) {
      return device::make_cpu_device();
    }
    device::MockDeviceOptions options;
    options.mode = test_.mode;
    options.own_memory = true;
    return std::make_unique<CopyCounter>(device::make_mock_device(options));
  }

  // As a backward frees memory.
  void lend() {
    while (update_ != nullptr && lent_.size() < static_cast<std::size_t>(test_.num_lent) &&
           update_->wants_slot()) {
      auto memory = std::make_shared<device::Memory>(
          device_->allocate(Tier::kDevice, update_->slot_bytes(), Role::kOther));
      lent_.push_back(memory);
      update_->lend(memory->data(), device_->stream(device::StreamKind::kCompute).record(), memory);
      ++num_lent;
    }
  }

  // Half of it, then the rest. Whoever gets it back writes to it at once.
  void take_back() {
    if (update_ == nullptr) {
      return;
    }
    for (const std::size_t num_kept : {lent_.size() / 2, std::size_t{0}}) {
      update_->keep_lent(num_kept);
      const std::size_t num_due = lent_.size() - num_kept;
      const std::size_t num_back =
          std::erase_if(lent_, [](const std::shared_ptr<device::Memory>& memory) {
            const bool is_back = memory.use_count() == 1;
            if (is_back) {
              std::memset(memory->data(), 0xff, memory->bytes());
            }
            return is_back;
          });
      EXPECT_EQ(num_back, num_due);
    }
  }

  // Copies on the device are the new values, before and beside those that go to the host.
  void check_copies() {
    for (int id = 0; id < params_.num_params(); ++id) {
      const shard::Param& param = params_[id];
      const shard::DeviceCopy& copy = param.device_copy();
      if (copy.values == nullptr) {
        continue;
      }
      EXPECT_TRUE(param.is_on_host());
      ++num_copies;
      const std::size_t bytes =
          static_cast<std::size_t>(param.range().numel) * bytes_of(test_.dtype);
      std::vector<std::byte> copied(bytes);
      device::Stream& stream = device_->stream(device::StreamKind::kGather);
      stream.wait(copy.made);
      device_->start_copy(copied.data(), copy.values, bytes, stream).wait();
      param.updated().wait();
      EXPECT_EQ(std::memcmp(copied.data(), param.shard(), bytes), 0) << param.name();
    }
  }

  // As a forward that has gathered them does.
  void let_go_of_copies() {
    std::vector<int> ids;
    for (int id = 0; id < params_.num_params(); ++id) {
      if (params_[id].device_copy().values != nullptr) {
        params_[id].set_device_copy({});
        params_[id].updated().wait();
        reducer_->let_go(id);
        ids.push_back(id);
      }
    }
    // Memory goes in the order in which it was let go of, which need not be that of updates.
    for (int id = 0; id < params_.num_params(); ++id) {
      params_[id].updated().wait();
    }
    device_->stream(device::StreamKind::kReduce).synchronize();
    for (const int id : ids) {
      reducer_->let_go(id);  // of what is done by now
      EXPECT_TRUE(gradients_[static_cast<std::size_t>(id)].expired()) << params_[id].name();
    }
  }

  void write(const shard::Param& param, const std::vector<std::byte>& values) {
    device_
        ->start_copy(param.shard(), values.data(), values.size(),
                     device_->stream(device::StreamKind::kWrite))
        .wait();
  }

  const Case test_;
  const bool own_;
  SteadyClock clock_;
  Spans spans_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Device> host_;
  shard::ParamTable params_;
  std::vector<bool> leaving_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<Kernels> host_kernels_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  DeviceUpdate* update_ = nullptr;
  std::vector<std::weak_ptr<void>> gradients_;  // by id
  std::vector<std::shared_ptr<device::Memory>> lent_;
};

struct Counts {
  int num_lent = 0;
  int num_copies = 0;
  std::size_t most_copies_up = 0;
};

inline Counts expect_same_bits(const Case& test) {
  Counts counts;
  comm::run_ranks(1, [&](comm::Group& group) {
    World reference(group, test, /*own=*/false);
    World world(group, test, /*own=*/true);
    for (int step = 1; step <= kSteps; ++step) {
      reference.step(step);
      world.step(step);
    }
    EXPECT_EQ(world.norms, reference.norms);
    const auto found = world.trained();
    const auto expected = reference.trained();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i], expected[i]) << "tensor " << i;
    }
    counts = {world.num_lent, world.num_copies, world.most_copies_up()};
  });
  return counts;
}

// Sizes that do not divide, some larger than a slot.
inline std::vector<Shape> mixed_shapes() {
  return {{5, Tier::kDevice, by_device(true)},   {9001, Tier::kHost, by_device(false)},
          {4096, Tier::kHost, by_processor()},   {12289, Tier::kDevice, by_device(false)},
          {5000, Tier::kDevice, by_processor()}, {3001, Tier::kHost, by_device(false)},
          {7, Tier::kDevice, by_device(true)}};
}

}  // namespace tessera::optim
