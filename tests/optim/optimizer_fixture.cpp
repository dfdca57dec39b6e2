#include "tests/optim/optimizer_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include <gtest/gtest.h>

#include "tessera/device/device_cpu.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/update_loops.h"
#include "tessera/tier/file_store.h"
#include "testing/memory_store.h"
#include "tests/optim/kernel_cases.h"
#include "tests/support/no_tensor.h"

namespace tessera::optim {
namespace {

std::vector<std::byte> bytes_at(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  return {begin, begin + bytes};
}

// Counts how many copies on its read stream are under way at once.
class CopyCounter final : public device::Device {
 public:
  explicit CopyCounter(std::unique_ptr<device::Device> inner) : inner_(std::move(inner)) {}

  std::size_t most_copies_h2d() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }

  std::string name() const override { return inner_->name(); }
  device::Stream& stream(device::StreamKind kind) override { return inner_->stream(kind); }
  bool is_discrete() const override { return inner_->is_discrete(); }
  device::Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return inner_->allocate(tier, bytes, role, alignment);
  }
  device::Pending start_copy(void* to, const void* from, std::size_t bytes,
                             device::Stream& stream) override {
    device::Pending copy = inner_->start_copy(to, from, bytes, stream);
    if (stream.kind() == device::StreamKind::kRead) {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(under_way_, [](const device::Pending& each) { return each.done(); });
      under_way_.push_back(copy);
      most_ = std::max(most_, under_way_.size());
    }
    return copy;
  }
  device::Pending start_fill(void* to, std::uint8_t value, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_fill(to, value, bytes, stream);
  }
  device::MemoryInfo memory_info() const override { return inner_->memory_info(); }

 private:
  const std::unique_ptr<device::Device> inner_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<device::Pending> under_way_;
  std::size_t most_ = 0;
};

std::vector<std::byte> in_type(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * bytes_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    narrow_at(bytes.data(), dtype, i, values[i]);
  }
  return bytes;
}

std::unique_ptr<device::Device> make_device(const FixtureCase& test, Ledger& ledger) {
  if (test.device == FixtureDevice::kCpu) {
    return device::make_cpu_device({&ledger, {}});
  }
  device::MockDeviceOptions options;
  options.mode = test.mode;
  options.own_memory = test.device == FixtureDevice::kDiscrete;
  options.host.ledger = &ledger;
  return std::make_unique<CopyCounter>(device::make_mock_device(options));
}

}  // namespace

// Cheap: sanitizers are slow enough.
std::vector<float> whole_values(std::int64_t numel, DType dtype, std::uint64_t seed, float scale) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (std::size_t i = 0; i < values.size(); ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    narrow_at(&values[i], dtype, 0,
              static_cast<float>(static_cast<int>(state >> 53) - 1024) / 1024 * scale);
    values[i] = widened_at(&values[i], dtype, 0);
  }
  return values;
}

std::vector<float> whole_parameter(std::int64_t numel, DType dtype, std::uint64_t seed) {
  return whole_values(numel, dtype, seed * 1000 + 10, 1.0F / 32);
}

std::vector<float> whole_gradient(std::int64_t numel, DType dtype, int step, int backward, int id) {
  return whole_values(numel, dtype, static_cast<std::uint64_t>(100 * step + 10 * backward + id), 1);
}

OptimizerFixture::OptimizerFixture(comm::Group& group, const FixtureCase& test)
    : RankFixture(group.rank(), group.size(),
                  [&](Ledger& ledger) { return make_device(test, ledger); }),
      test_(test),
      group_(group),
      kernels_(make_cpu_kernels(2)),
      gradients_(test.shapes.size()) {
  if (test.device == FixtureDevice::kDiscrete) {
    host_ = device::make_cpu_device();
    host_kernels_ = make_cpu_kernels(2);
  }
  make_stores();
  for (std::size_t i = 0; i < test.shapes.size(); ++i) {
    shard::ParamSpec spec;
    spec.name = "p" + std::to_string(i);
    spec.numel = test.shapes[i].numel;
    spec.dtype = test.dtype;
    spec.trainable = test.shapes[i].trainable;
    spec.weight_decay_scale = i % 2 == 0 ? 1 : 0;
    spec.placement = test.shapes[i].placement;
    const shard::Param& param = params().add(spec, std::make_unique<support::NoTensor>());
    if (param.is_on_nvme()) {
      shards_->add(param);
    }
    write_shard(param.id(), i);
  }
  buffers_ = std::make_unique<tier::BufferPool>(
      device(), Tier::kHost,
      static_cast<std::size_t>(std::ceil(static_cast<double>(largest_lease()) * test_.num_buffers)),
      "optimizer buffers");
  gradient_buffers_ = std::make_unique<tier::BufferPool>(
      device(), Tier::kHost, 2 * grad::kSmallestPoolBytes, "gradient buffers");
  remake_reducer();
  optimizer_ = std::make_unique<Optimizer>(params(), test.rule, options());
  optimizer_->make_states();
}

OptimizerFixture::~OptimizerFixture() = default;

std::size_t OptimizerFixture::most_copies_h2d() {
  return static_cast<const CopyCounter&>(device()).most_copies_h2d();
}

OptimizerOptions OptimizerFixture::options() {
  OptimizerOptions options{device(), *kernels_, clock(), spans()};
  options.host = host_.get();
  options.host_kernels = host_kernels_.get();
  options.num_slots = test_.num_slots;
  options.slot_gradient_bytes =
      test_.has_host_gradients ? sizeof(float) + 2 * bytes_of(test_.gradient_dtype) : 0;
  options.slot_bytes = test_.slot_numel * (16 + options.slot_gradient_bytes);
  options.states = states_.get();
  options.parameters = shards_.get();
  options.buffers = buffers_.get();
  options.sub_group_numel = test_.sub_group_numel;
  options.reads_ahead = test_.reads_ahead;
  options.writes_behind = test_.writes_behind;
  params().set_receiver(test_.on_updated);
  return options;
}

std::unique_ptr<tier::Store> OptimizerFixture::make_store(const std::string& role, Role charged) {
  if (test_.store == StoreKind::kMemory) {
    return std::make_unique<tier::MemoryStore>(device(), Tier::kHost, charged);
  }
  tier::FileStoreOptions options;
  options.directories = {directory_.path().string()};
  options.name = {"test", group_.rank(), role};
  options.role = charged;
  options.engine = engine_.get();
  options.ledger = &ledger();
  return std::make_unique<tier::FileStore>(std::move(options));
}

void OptimizerFixture::make_stores() {
  if (test_.store == StoreKind::kFile) {
    tier::IoOptions options;
    options.kind = tier::IoKind::kThreads;
    options.num_threads = 2;
    engine_ = std::make_unique<testing::FaultEngine>(
        tier::make_io_engine(options, [](const std::string&) {}));
  }
  parameter_store_ = make_store("parameters", Role::kShard);
  gradient_store_ = make_store("gradients", Role::kGradient);
  states_ = make_store("states", Role::kOptimizer);
  shards_ = std::make_unique<shard::ShardStore>(*parameter_store_);
}

std::size_t OptimizerFixture::largest_lease() const {
  std::vector<SubGroupParam> shapes;
  for (int id = 0; id < params().num_params(); ++id) {
    const shard::Param& param = params()[id];
    // As if all were trainable: they may be unfrozen.
    shapes.push_back(
        {param.layout().shard_numel(), param.layout().dtype(), true, param.placement()});
  }
  return plan_sub_groups(shapes, test_.sub_group_numel,
                         static_cast<int>(state_names(test_.rule).size()))
      .max_lease_bytes;
}

void OptimizerFixture::hand_over(const std::vector<Placement>& placements) {
  CarriedStates states = optimizer_->take_states();
  optimizer_.reset();
  for (int id = 0; id < params().num_params(); ++id) {
    params()[id].forget_device_copy();
    params()[id].move_to(placements[static_cast<std::size_t>(id)].parameter);
    params()[id].set_placement(placements[static_cast<std::size_t>(id)]);
  }
  optimizer_ = std::make_unique<Optimizer>(params(), test_.rule, options(), std::move(states));
  optimizer_->make_states();
  remake_reducer();
}

void OptimizerFixture::remake_reducer() {
  reducer_.reset();
  grad::ReducerParts parts{group_, device(), params(), clock(), spans()};
  if (device().is_discrete()) {
    set_reducer_kernels(parts, *kernels_);
    set_host_kernels(parts, *host_kernels_, host_->stream(device::StreamKind::kGather));
    parts.num_micro_batches = test_.num_micro_batches;
    parts.num_host_buffers = test_.num_host_buffers;
    if (!test_.sums_squares) {
      parts.sum_of_squares = nullptr;
    }
  }
  parts.nvme = {gradient_store_.get(), gradient_buffers_.get()};
  parts.block_sum_of_squares = best_loops().block_sum_of_squares;
  reducer_ = std::make_unique<grad::Reducer>(
      parts, grad::ReducerOptions{std::int64_t{1} << 20, test_.gradient_dtype});
}

void OptimizerFixture::write_shard(int id, std::uint64_t seed) {
  const shard::Param& param = params()[id];
  const DType dtype = param.layout().dtype();
  const std::vector<float> whole = whole_parameter(param.layout().numel(), dtype, seed);
  const auto begin = whole.begin() + param.range().begin;
  std::vector<std::byte> values = in_type({begin, begin + param.range().numel}, dtype);
  values.resize(param.layout().shard_bytes());
  write_shard(id, std::move(values));
}

void OptimizerFixture::write_shard(int id, std::vector<std::byte> values) {
  const shard::Param& param = params()[id];
  values.resize(tier::whole_blocks(param.layout().shard_bytes()));
  if (param.is_on_nvme()) {
    if (!values.empty()) {
      const device::Memory memory =
          device().allocate(Tier::kHost, values.size(), Role::kOther, tier::kBlockBytes);
      std::memcpy(memory.data(), values.data(), values.size());
      shards_->start_write(param, 0, param.layout().shard_numel(), memory.data()).wait();
      shards_->wait_written(id);
    }
  } else if (param.layout().shard_bytes() > 0) {
    device()
        .start_copy(param.shard(), values.data(), param.layout().shard_bytes(),
                    device().stream(device::StreamKind::kWrite))
        .wait();
  }
}

void OptimizerFixture::backward(int step) {
  for (int backward = 0; backward < test_.num_backwards; ++backward) {
    for (int id = params().num_params() - 1; id >= 0; --id) {
      const shard::Param& param = params()[id];
      const auto index = static_cast<std::size_t>(id);
      const FixtureShape& shape = test_.shapes[index];
      const bool is_used =
          shape.used_by < 0 || shape.used_by >= group_.size() || shape.used_by == group_.rank();
      if (!param.trainable() || !is_used || (step + backward) % shape.used_every != 0) {
        continue;
      }
      std::vector<float> whole =
          whole_gradient(param.layout().numel(), test_.gradient_dtype, step, backward, id);
      if (step == test_.bad_step && id == 4 &&
          (test_.bad_rank < 0 || test_.bad_rank == group_.rank())) {
        whole.at(7) = std::numeric_limits<float>::infinity();
      }
      auto values = std::make_shared<std::vector<std::byte>>(in_type(whole, test_.gradient_dtype));
      gradients_[index] = values;
      reducer_->add(param, {values->data(), test_.gradient_dtype, std::move(values)});
    }
    reducer_->finish_backward();
  }
}

void OptimizerFixture::step(int number) {
  optimizer_->prepare();
  backward(number);
  start_update();
  optimizer_->wait();
  reducer_->clear();
}

std::vector<std::byte> OptimizerFixture::nvme_shard(int id) {
  const shard::Param& param = params()[id];
  param.updated().wait();
  const std::size_t bytes = tier::whole_blocks(param.layout().shard_bytes());
  const device::Memory memory =
      device().allocate(Tier::kHost, bytes, Role::kOther, tier::kBlockBytes);
  shards_->start_read(param, 0, param.layout().shard_numel(), memory.data()).wait();
  return bytes_at(memory.data(), bytes);
}

Trained OptimizerFixture::trained() {
  Trained all;
  std::vector<std::string_view> names = {"master"};
  const auto states = state_names(test_.rule);
  names.insert(names.end(), states.begin(), states.end());
  for (int id = 0; id < params().num_params(); ++id) {
    const shard::Param& param = params()[id];
    const std::size_t shard_bytes = param.layout().shard_bytes();
    param.updated().wait();
    std::vector<std::byte> shard(shard_bytes);
    if (param.is_on_nvme() && shard_bytes > 0) {
      shard = nvme_shard(id);
      EXPECT_TRUE(std::all_of(shard.begin() + static_cast<std::ptrdiff_t>(shard_bytes), shard.end(),
                              [](std::byte byte) { return byte == std::byte{0}; }))
          << "behind the end of " << param.name();
      shard.resize(shard_bytes);
    } else if (shard_bytes > 0) {
      device()
          .start_copy(shard.data(), param.shard(), shard_bytes,
                      device().stream(device::StreamKind::kWrite))
          .wait();
    }
    all.push_back(std::move(shard));
    for (const std::string_view name : names) {
      const std::span<float> values = optimizer_->state(id, name);
      all.push_back(bytes_at(values.data(), values.size_bytes()));
    }
  }
  return all;
}

FixtureCase in_memory(FixtureCase test) {
  test.device = FixtureDevice::kCpu;
  for (FixtureShape& shape : test.shapes) {
    shape.placement = {};
  }
  return test;
}

std::vector<Trained> train(int num_ranks, const FixtureCase& test, int num_steps) {
  std::vector<Trained> all(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(num_ranks, [&](comm::Group& group) {
    OptimizerFixture fixture(group, test);
    for (int step = 1; step <= num_steps; ++step) {
      fixture.step(step);
    }
    all[static_cast<std::size_t>(group.rank())] = fixture.trained();
  });
  return all;
}

}  // namespace tessera::optim
