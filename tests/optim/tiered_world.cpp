#include "tests/optim/tiered_world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <gtest/gtest.h>

#include "tessera/device/device_cpu.h"
#include "tessera/optim/update_loops.h"
#include "tessera/tier/file_store.h"
#include "testing/memory_store.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/support/no_tensor.h"

namespace tessera::optim {
namespace {

using support::NoTensor;

std::unique_ptr<device::Device> make_device(bool is_late, Ledger* ledger) {
  if (!is_late) {
    return device::make_cpu_device({ledger, {}});
  }
  device::MockDeviceOptions options;
  options.host.ledger = ledger;
  return device::make_mock_device(options);
}

std::vector<std::byte> bytes_at(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  return {begin, begin + bytes};
}

// Multiples of 2^-10 below 1: their sums over ranks are exact. Cheap: sanitizers are slow enough.
std::vector<float> exact_values(std::int64_t numel, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (float& value : values) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    value = static_cast<float>(static_cast<int>(state >> 53) - 1024) / 1024;
  }
  return values;
}

// This rank's elements in the parameter's type, then zeros up to a whole block.
std::vector<std::byte> initial_blocks(const shard::Param& param, std::uint64_t seed) {
  const std::vector<float> whole = exact_values(param.layout().numel(), seed * 1000 + 10);
  const DType dtype = param.layout().dtype();
  const std::size_t element = bytes_of(dtype);
  std::vector<std::byte> blocks(tier::whole_blocks(param.layout().shard_bytes()));
  for (std::int64_t i = 0; i < param.range().numel; ++i) {
    const float value = whole[static_cast<std::size_t>(param.range().begin + i)] / 32;
    const BFloat16 bf16 = to_bfloat16(value);
    const Float16 fp16 = to_float16(value);
    const void* from = dtype == DType::kBFloat16  ? static_cast<const void*>(&bf16)
                       : dtype == DType::kFloat16 ? static_cast<const void*>(&fp16)
                                                  : static_cast<const void*>(&value);
    std::memcpy(blocks.data() + static_cast<std::size_t>(i) * element, from, element);
  }
  return blocks;
}

}  // namespace

TieredWorld::TieredWorld(comm::Group& group, const TieredCase& test)
    : test_(test),
      group_(group),
      spans_(clock_, 0),
      device_(make_device(test.is_late, &ledger_)),
      params_(std::make_unique<shard::ParamTable>(group.rank(), group.size(), *device_)),
      kernels_(make_cpu_kernels(2)) {
  make_stores();
  for (std::size_t i = 0; i < test.shapes.size(); ++i) {
    shard::ParamSpec spec;
    spec.name = "p" + std::to_string(i);
    spec.numel = test.shapes[i].numel;
    spec.dtype = test.dtype;
    spec.trainable = test.shapes[i].trainable;
    spec.weight_decay_scale = i % 2 == 0 ? 1 : 0;
    spec.placement.parameter = test.shapes[i].stored.parameter ? Tier::kNvme : Tier::kDevice;
    const shard::Param& param = params_->add(spec, std::make_unique<NoTensor>());
    if (param.is_on_nvme()) {
      shards_->add(param);
    }
    write_shard(param.id(), i);
  }
  make_buffers();
  remake_reducer();
  if (is_reference(test)) {
    optimizer_ = std::make_unique<ShardedOptimizer>(*params_, *device_, *kernels_, test.rule);
    return;
  }
  TieredParts parts{clock_, spans_, states_.get(), shards_.get(), buffers_.get()};
  for (const TieredShape& shape : test.shapes) {
    parts.stored.push_back(shape.stored);
  }
  parts.sub_group_numel = test.sub_group_numel;
  parts.reads_ahead = test.reads_ahead;
  parts.writes_behind = test.writes_behind;
  parts.on_updated = test.on_updated;
  auto tiered = std::make_unique<TieredOptimizer>(*params_, *device_, *kernels_, test.rule, parts);
  tiered_ = tiered.get();
  optimizer_ = std::move(tiered);
}

TieredWorld::~TieredWorld() = default;

std::unique_ptr<tier::Store> TieredWorld::make_store(const std::string& role, Role charged) {
  if (test_.store == StoreKind::kMemory) {
    return std::make_unique<tier::MemoryStore>(*device_, Tier::kHost, charged);
  }
  tier::FileStoreOptions options;
  options.directories = {directory_.path().string()};
  options.name = {"test", group_.rank(), role};
  options.role = charged;
  options.engine = engine_.get();
  options.ledger = &ledger_;
  return std::make_unique<tier::FileStore>(std::move(options));
}

void TieredWorld::make_stores() {
  if (test_.store == StoreKind::kFile) {
    tier::IoOptions options;
    options.kind = tier::IoKind::kThreads;
    options.num_threads = 2;
    engine_ = std::make_unique<testing::FaultEngine>(
        tier::make_io_engine(options, [](const std::string&) {}));
  }
  parameters_ = make_store("parameters", Role::kShard);
  gradients_ = make_store("gradients", Role::kGradient);
  states_ = make_store("states", Role::kOptimizer);
  shards_ = std::make_unique<shard::ShardStore>(*parameters_);
}

std::size_t TieredWorld::largest_lease() const {
  std::vector<SubGroupParam> shapes;
  for (int id = 0; id < params_->num_params(); ++id) {
    const StoredParts stored = test_.shapes[static_cast<std::size_t>(id)].stored;
    const shard::Layout& layout = (*params_)[id].layout();
    // As if all were trainable: they may be unfrozen.
    shapes.push_back({layout.shard_numel(), layout.dtype(), true, stored.parameter, stored.gradient,
                      stored.states});
  }
  return plan_sub_groups(shapes, test_.sub_group_numel,
                         static_cast<int>(state_names(test_.rule).size()))
      .max_lease_bytes;
}

void TieredWorld::make_buffers() {
  const auto bytes =
      static_cast<std::size_t>(std::ceil(static_cast<double>(largest_lease()) * test_.num_buffers));
  const auto kind = Tier::kHost;
  buffers_ = std::make_unique<tier::BufferPool>(*device_, kind, bytes, "optimizer buffers");
  gradient_buffers_ = std::make_unique<tier::BufferPool>(
      *device_, kind, 2 * grad::kSmallestPoolBytes, "gradient buffers");
  gradient_tier_.store = gradients_.get();
  gradient_tier_.buffers = gradient_buffers_.get();
  for (int id = 0; id < params_->num_params(); ++id) {
    const shard::Param& param = (*params_)[id];
    const auto numel = static_cast<std::size_t>(param.layout().shard_numel());
    gradient_tier_.offset.push_back(
        test_.shapes[static_cast<std::size_t>(id)].stored.gradient
            ? static_cast<std::int64_t>(gradients_->allocate(
                  numel * sizeof(float), "gradient of parameter '" + param.name() + "'"))
            : -1);
  }
}

void TieredWorld::remake_reducer() {
  reducer_.reset();
  grad::ReducerParts parts{group_, *device_, *params_, clock_, spans_};
  if (!is_reference(test_)) {
    parts.tier = &gradient_tier_;
    parts.block_sum_of_squares = best_loops().block_sum_of_squares;
  }
  reducer_ = std::make_unique<grad::Reducer>(parts, grad::ReducerOptions{});
}

void TieredWorld::write_shard(int id, std::uint64_t seed) {
  const shard::Param& param = (*params_)[id];
  const std::vector<std::byte> blocks = initial_blocks(param, seed);
  if (param.shard() != nullptr) {
    std::memcpy(param.shard(), blocks.data(), param.layout().shard_bytes());
  } else if (!blocks.empty()) {
    const device::Memory memory =
        device_->allocate(Tier::kHost, blocks.size(), Role::kOther, tier::kBlockBytes);
    std::memcpy(memory.data(), blocks.data(), blocks.size());
    shards_->start_write(param, 0, param.layout().shard_numel(), memory.data()).wait();
    shards_->wait_written(id);
  }
}

void TieredWorld::backward(int step) {
  for (int id = params_->num_params() - 1; id >= 0; --id) {
    const shard::Param& param = (*params_)[id];
    if (param.trainable()) {
      add_gradient(step, id);
    }
  }
  reducer_->finish_backward();
}

std::weak_ptr<void> TieredWorld::add_gradient(int step, int id) {
  const shard::Param& param = (*params_)[id];
  auto values = std::make_shared<std::vector<float>>(
      exact_values(param.layout().numel(), static_cast<std::uint64_t>(100 * step + id)));
  std::weak_ptr<void> memory = values;
  reducer_->add(param, {values->data(), DType::kFloat32, std::move(values)});
  return memory;
}

void TieredWorld::step(int number) {
  optimizer_->prepare();
  backward(number);
  optimizer_->start_update(*reducer_, kTieredLr, kTieredScale);
  optimizer_->wait();
  reducer_->clear();
}

std::vector<std::byte> TieredWorld::stored_shard(int id) {
  const shard::Param& param = (*params_)[id];
  param.updated().wait();
  const std::size_t bytes = tier::whole_blocks(param.layout().shard_bytes());
  const device::Memory memory =
      device_->allocate(Tier::kHost, bytes, Role::kOther, tier::kBlockBytes);
  shards_->start_read(param, 0, param.layout().shard_numel(), memory.data()).wait();
  return bytes_at(memory.data(), bytes);
}

Trained TieredWorld::trained() {
  Trained all;
  std::vector<std::string_view> names = {"master"};
  const auto states = state_names(test_.rule);
  names.insert(names.end(), states.begin(), states.end());
  for (int id = 0; id < params_->num_params(); ++id) {
    const shard::Param& param = (*params_)[id];
    const std::size_t shard_bytes = param.layout().shard_bytes();
    param.updated().wait();
    std::vector<std::byte> shard;
    if (param.is_on_nvme() && shard_bytes > 0) {
      shard = stored_shard(id);
      EXPECT_TRUE(std::all_of(shard.begin() + static_cast<std::ptrdiff_t>(shard_bytes), shard.end(),
                              [](std::byte byte) { return byte == std::byte{0}; }))
          << "behind the end of " << param.name();
      shard.resize(shard_bytes);
    } else {
      shard = bytes_at(param.shard(), shard_bytes);
    }
    all.push_back(std::move(shard));
    for (const std::string_view name : names) {
      const std::span<float> values = optimizer_->state(id, name);
      all.push_back(bytes_at(values.data(), values.size_bytes()));
    }
  }
  return all;
}

std::vector<Trained> train(int num_ranks, const TieredCase& test, int num_steps) {
  std::vector<Trained> all(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(num_ranks, [&](comm::Group& group) {
    TieredWorld world(group, test);
    for (int step = 1; step <= num_steps; ++step) {
      world.step(step);
    }
    all[static_cast<std::size_t>(group.rank())] = world.trained();
  });
  return all;
}

TieredCase in_memory(TieredCase test) {
  test.num_buffers = 0;
  for (TieredShape& shape : test.shapes) {
    shape.stored = {};
  }
  return test;
}

}  // namespace tessera::optim
