// The optimizer of one rank's shards, against the same rule on whole tensors.
#include "tessera/optim/sharded_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/optim/update_case.h"
#include "tests/support/no_tensor.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

using support::NoTensor;

struct ShardedShape {
  std::int64_t numel;
  bool trainable = true;
  double weight_decay_scale = 1;
};
// Ragged ends, more ranks than elements, none at all, frozen ones.
const std::vector<ShardedShape> kShardedShapes = {{1000}, {3, true, 0}, {17, false}, {0}, {4099}};
constexpr double kShardedLr = 1e-3;
constexpr double kShardedScale = 0.25;

struct ShardedSetting {
  DType dtype = DType::kFloat32;
  bool is_late = false;
};

// One rank: a table whose shards hold their part of tensors made from a seed.
class RankWorld {
 public:
  RankWorld(comm::Group& group, const ShardedSetting& world, const RuleOptions& rule = {})
      : device_(make_device(world)),
        spans_(clock_, 0),
        params_(group.rank(), group.size(), *device_),
        kernels_(make_cpu_kernels(2)) {
    for (std::size_t i = 0; i < kShardedShapes.size(); ++i) {
      shard::ParamSpec spec;
      spec.name = "p" + std::to_string(i);
      spec.numel = kShardedShapes[i].numel;
      spec.dtype = world.dtype;
      spec.trainable = kShardedShapes[i].trainable;
      spec.weight_decay_scale = kShardedShapes[i].weight_decay_scale;
      write_shard(params_.add(spec, std::make_unique<NoTensor>()));
    }
    reducer_ = std::make_unique<grad::Reducer>(
        grad::ReducerParts{group, *device_, params_, clock_, spans_, {}}, grad::ReducerOptions{});
    optimizer_ = std::make_unique<ShardedOptimizer>(params_, *device_, *kernels_, rule);
  }

  // The whole tensor, with what its type keeps of it.
  static std::vector<float> initial(int id, DType dtype) {
    auto values =
        random_floats(static_cast<std::size_t>(kShardedShapes[static_cast<std::size_t>(id)].numel),
                      0.02, static_cast<std::uint64_t>(id) + 10);
    for (float& value : values) {
      value = dtype == DType::kBFloat16  ? to_float(to_bfloat16(value))
              : dtype == DType::kFloat16 ? to_float(to_float16(value))
                                         : value;
    }
    return values;
  }

  // Multiples of 2^-10 below 1: their sum over ranks is exact.
  static std::vector<float> gradient(int id, int step) {
    auto values =
        random_floats(static_cast<std::size_t>(kShardedShapes[static_cast<std::size_t>(id)].numel),
                      0.2, static_cast<std::uint64_t>(100 * step + id));
    for (float& value : values) {
      value = std::nearbyint(std::clamp(value, -1.0F, 1.0F) * 1024) / 1024;
    }
    return values;
  }

  void backward(int step) {
    for (int id = 0; id < params_.num_params(); ++id) {
      if (params_[id].trainable()) {
        auto values = std::make_shared<std::vector<float>>(gradient(id, step));
        reducer_->add(params_[id], {values->data(), DType::kFloat32, values});
      }
    }
    reducer_->finish_backward();
  }

  void write_shard(const shard::Param& param) {
    const auto values = initial(param.id(), param.layout().dtype());
    for (std::int64_t i = 0; i < param.range().numel; ++i) {
      const float value = values[static_cast<std::size_t>(param.range().begin + i)];
      const BFloat16 bf16 = to_bfloat16(value);
      const Float16 fp16 = to_float16(value);
      const std::size_t bytes = bytes_of(param.layout().dtype());
      const void* from =
          param.layout().dtype() == DType::kBFloat16  ? static_cast<const void*>(&bf16)
          : param.layout().dtype() == DType::kFloat16 ? static_cast<const void*>(&fp16)
                                                      : static_cast<const void*>(&value);
      std::memcpy(param.shard() + static_cast<std::size_t>(i) * bytes, from, bytes);
    }
  }

  shard::ParamTable& params() { return params_; }
  grad::Reducer& reducer() { return *reducer_; }
  ShardedOptimizer& optimizer() { return *optimizer_; }
  device::Device& device() { return *device_; }
  Kernels& kernels() { return *kernels_; }
  std::size_t optimizer_bytes() const {
    return ledger_.current_bytes(Tier::kDevice, Role::kOptimizer);
  }

 private:
  std::unique_ptr<device::Device> make_device(const ShardedSetting& world) {
    if (!world.is_late) {
      return device::make_cpu_device({&ledger_, {}});
    }
    device::MockDeviceOptions options;
    options.host.ledger = &ledger_;
    return device::make_mock_device(options);
  }

  Ledger ledger_;
  std::unique_ptr<device::Device> device_;
  SteadyClock clock_;
  Spans spans_;
  shard::ParamTable params_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
};

// What `steps` updates make of the whole tensor.
Weights whole_after(const RuleOptions& rule, int id, int num_ranks, DType dtype, int steps) {
  Weights whole(static_cast<std::size_t>(kShardedShapes[static_cast<std::size_t>(id)].numel));
  whole.master = RankWorld::initial(id, dtype);
  for (int step = 1; step <= steps; ++step) {
    auto gradient = RankWorld::gradient(id, step);
    for (float& value : gradient) {
      value *= static_cast<float>(num_ranks);
    }
    UpdateSpan span = whole.span(gradient.data());
    if (dtype != DType::kFloat32) {
      span.parameter = whole.parameter.data();
      span.parameter_dtype = dtype;
    }
    UpdateScalars scalars;
    scalars.step = step;
    scalars.lr = kShardedLr;
    scalars.gradient_scale = kShardedScale;
    scalars.weight_decay_scale = kShardedShapes[static_cast<std::size_t>(id)].weight_decay_scale;
    update(rule, scalars, span);
  }
  return whole;
}

// Elements of this rank equal those of the whole; what is behind them is zero.
template <typename Value>
void expect_piece(const shard::Param& param, const Value* piece, const std::vector<Value>& whole,
                  const std::string& what) {
  std::vector<Value> expected(static_cast<std::size_t>(param.layout().shard_numel()));
  const auto begin = whole.begin() + param.range().begin;
  std::copy(begin, begin + param.range().numel, expected.begin());
  const std::vector<Value> found(piece, piece + expected.size());
  EXPECT_TRUE(same_bits(found, expected)) << what << " of " << param.name();
}

TEST(ShardedOptimizer, UpdatesShardsAsIfTheyWereWhole) {
  constexpr int kSteps = 3;
  for (const int num_ranks : {1, 2, 3}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (support::kIsSanitized && dtype == DType::kFloat16) {
        continue;  // to memory the same as bf16
      }
      for (const bool is_late : {false, true}) {
        for (const auto& [name, rule_case] : all_rules()) {
          const RuleOptions rule = rule_case;
          comm::run_ranks(num_ranks, [&](comm::Group& group) {
            RankWorld world(group, {dtype, is_late}, rule);
            for (int step = 1; step <= kSteps; ++step) {
              world.backward(step);
              world.optimizer().start_update(world.reducer(), kShardedLr, kShardedScale);
              world.reducer().clear();
            }
            world.optimizer().wait();
            EXPECT_EQ(world.optimizer().num_updates(), kSteps);
            for (int id = 0; id < world.params().num_params(); ++id) {
              const shard::Param& param = world.params()[id];
              if (!param.trainable()) {
                EXPECT_EQ(param.version(), 0U);
                EXPECT_TRUE(world.optimizer().state(id, "master").empty());
                continue;
              }
              EXPECT_EQ(param.version(), static_cast<std::uint64_t>(kSteps));
              const Weights whole = whole_after(rule, id, num_ranks, dtype, kSteps);
              expect_piece(param, world.optimizer().state(id, "master").data(), whole.master,
                           "master");
              const auto names = state_names(rule);
              for (std::size_t i = 0; i < names.size(); ++i) {
                expect_piece(param, world.optimizer().state(id, names[i]).data(),
                             i == 0 ? whole.first : whole.second, std::string(names[i]));
              }
              if (dtype == DType::kFloat32) {
                expect_piece(param, reinterpret_cast<const float*>(param.shard()), whole.master,
                             "shard");
              } else {
                expect_piece(param, reinterpret_cast<const std::uint16_t*>(param.shard()),
                             whole.parameter, "shard");
              }
            }
          });
        }
      }
    }
  }
}

TEST(ShardedOptimizer, HoldsTheBytesOfTheClosedForm) {
  for (const int num_ranks : {1, 3}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const auto& [name, rule_case] : all_rules()) {
        const RuleOptions rule = rule_case;
        comm::run_ranks(num_ranks, [&](comm::Group& group) {
          RankWorld world(group, {dtype, false}, rule);
          const std::size_t tensors = state_names(rule).size() + (dtype == DType::kFloat32 ? 0 : 1);
          std::size_t expected = 0;
          for (int id = 0; id < world.params().num_params(); ++id) {
            const shard::Param& param = world.params()[id];
            expected += param.trainable()
                            ? 4 * tensors * static_cast<std::size_t>(param.layout().shard_numel())
                            : 0;
          }
          EXPECT_EQ(world.optimizer_bytes(), expected) << to_string(rule.kind);
        });
      }
    }
  }
}

TEST(ShardedOptimizer, SumsTheSquaresOfItsPieces) {
  for (const int num_ranks : {1, 3}) {
    for (const bool is_late : {false, true}) {
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        RankWorld world(group, {DType::kFloat32, is_late});
        world.backward(1);
        double expected = 0;
        for (int id = 0; id < world.params().num_params(); ++id) {
          const shard::Param& param = world.params()[id];
          if (param.trainable()) {
            auto values = RankWorld::gradient(id, 1);
            for (float& value : values) {
              value *= static_cast<float>(num_ranks);
            }
            expected +=
                optim::sum_of_squares(values.data() + param.range().begin, param.range().numel);
          }
        }
        EXPECT_EQ(world.optimizer().sum_of_squares(world.reducer()), expected);
      });
    }
  }
}

TEST(ShardedOptimizer, ReturnsBeforeTheUpdateIsDone) {
  comm::run_ranks(1, [&](comm::Group& group) {
    RankWorld world(group, {DType::kFloat32, /*is_late=*/true});
    world.backward(1);
    world.optimizer().start_update(world.reducer(), kShardedLr, kShardedScale);
    const shard::Param& last = world.params()[4];
    EXPECT_FALSE(last.updated().done());
    const Weights whole = whole_after({}, 4, 1, DType::kFloat32, 1);
    last.updated().wait();
    expect_piece(last, reinterpret_cast<const float*>(last.shard()), whole.master, "shard");
  });
}

TEST(ShardedOptimizer, FollowsAShardThatWasWrittenFromOutside) {
  comm::run_ranks(2, [&](comm::Group& group) {
    RankWorld world(group, {DType::kBFloat16, false});
    world.backward(1);
    world.optimizer().start_update(world.reducer(), kShardedLr, kShardedScale);
    world.optimizer().wait();
    const shard::Param& param = world.params()[0];
    const auto initial = RankWorld::initial(0, DType::kBFloat16);
    world.write_shard(param);
    EXPECT_NE(world.optimizer().state(0, "master")[0],
              initial[static_cast<std::size_t>(param.range().begin)]);
    world.optimizer().reset_master(0);
    expect_piece(param, world.optimizer().state(0, "master").data(), initial, "master");
  });
}

TEST(ShardedOptimizer, RefusesAStateThatTheRuleDoesNotHave) {
  comm::run_ranks(1, [&](comm::Group& group) {
    RankWorld world(group, {});
    try {
      world.optimizer().state(0, "momentum");
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("p0 has no state \"momentum\""), std::string::npos)
          << error.what();
    }
  });
}

// Fails the n-th piece of work that updates.
class FailingKernels final : public Kernels {
 public:
  FailingKernels(Kernels& real, int failing_call) : real_(real), calls_left_(failing_call) {}

  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    return real_.start_sum_of_squares(values, numel, result, stream);
  }
  device::Pending start_updates(const RuleOptions& rule, std::span<const UpdateTask> tasks,
                                device::Stream& stream) override {
    if (--calls_left_ == 0) {
      return device::Pending::failed(std::make_exception_ptr(DeviceError("out of order")));
    }
    return real_.start_updates(rule, tasks, stream);
  }
  device::Pending start_sums_of_squares(std::span<const NormSpan> spans, double* results,
                                        device::Stream& stream) override {
    return real_.start_sums_of_squares(spans, results, stream);
  }
  device::Pending start_step_factors(std::span<const double* const> sums_of_squares,
                                     const StepInputs& inputs, StepOnDevice* step,
                                     StepOnDevice* for_host, device::Stream& stream) override {
    return real_.start_step_factors(sums_of_squares, inputs, step, for_host, stream);
  }
  device::Pending start_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                            device::Stream& stream) override {
    return real_.start_add(values, addend, dtype, numel, stream);
  }
  device::Pending start_convert(void* to, DType to_dtype, const void* from, DType from_dtype,
                                float scale, std::int64_t numel, device::Stream& stream) override {
    return real_.start_convert(to, to_dtype, from, from_dtype, scale, numel, stream);
  }

 private:
  Kernels& real_;
  int calls_left_;
};

TEST(ShardedOptimizer, PassesTheFailureOfAnUpdateOnToWhoeverWaits) {
  comm::run_ranks(1, [&](comm::Group& group) {
    RankWorld world(group, {});
    FailingKernels kernels(world.kernels(), 1);
    ShardedOptimizer optimizer(world.params(), world.device(), kernels, RuleOptions{});
    world.backward(1);
    optimizer.start_update(world.reducer(), kShardedLr, kShardedScale);
    EXPECT_THROW(optimizer.wait(), DeviceError);
    EXPECT_THROW(world.params()[1].updated().wait(), DeviceError);
    EXPECT_THROW(world.params()[4].updated().wait(), DeviceError) << "one piece of work";
  });
}

}  // namespace
}  // namespace tessera::optim
