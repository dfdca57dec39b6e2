#include "cli/train_trainer.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/plain_trainer.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/optim/schedule.h"

namespace tessera::cli {
namespace {

at::Device torch_device(const TrainPlan& plan) {
  return plan.cuda_device >= 0
             ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(plan.cuda_device))
             : at::Device(at::kCPU);
}

EngineOptions engine_options(const TrainPlan& plan) {
  EngineOptions options;
  options.run_steps = plan.schedule_steps;
  options.shapes = plan.shapes;
  options.planning = plan.planning;
  return options;
}

class ShardedTrainer final : public Trainer {
 public:
  ShardedTrainer(const TrainPlan& plan, Runtime& runtime)
      : engine_(runtime, engine_options(plan)),
        model_(plan.model, engine_, plan.seed, plan.weights) {}

  at::Tensor forward(const MicroBatch& micro_batch) override {
    return model_.loss(micro_batch.ids, micro_batch.targets);
  }
  void backward(const at::Tensor& loss, const MicroBatch& micro_batch) override {
    engine_.backward(loss, static_cast<double>(micro_batch.ids.numel()));
  }
  StepResult step() override { return engine_.step(); }
  double evaluate(const MicroBatch& micro_batch) override {
    const at::NoGradGuard no_grad;
    return model_.loss(micro_batch.ids, micro_batch.targets).item<double>();
  }
  void request_stop() override { engine_.request_stop(); }
  EngineStats take_stats() override { return engine_.take_stats(); }
  std::vector<ParamInfo> params() const override {
    std::vector<ParamInfo> infos;
    for (int id = 0; id < engine_.num_params(); ++id) {
      const shard::Param& param = engine_.param(id);
      infos.push_back({param.name(), param.layout().numel(), param.trainable()});
    }
    return infos;
  }
  at::Tensor value(int param) override { return engine_.full_value(param); }
  void save(const std::string& path) override { engine_.save_parameters(path); }
  Engine* engine() override { return &engine_; }

 private:
  Engine engine_;
  models::Gpt model_;
};

class UnshardedTrainer final : public Trainer {
 public:
  UnshardedTrainer(const TrainPlan& plan, Runtime& runtime)
      : model_(plan.model, torch_device(plan), plan.seed, plan.weights,
               shard::StoredRule::from(plan.config)),
        trainer_(model_.params(), plan.config, runtime.kernels(), runtime.device(),
                 engine_options(plan)) {
    const std::string notice =
        optim::ScheduleOptions::from(plan.config, plan.schedule_steps).notice;
    if (!notice.empty()) {
      runtime.logger().info(notice);
    }
  }

  at::Tensor forward(const MicroBatch& micro_batch) override {
    return model_.loss(micro_batch.ids, micro_batch.targets);
  }
  void backward(const at::Tensor& loss, const MicroBatch& micro_batch) override {
    trainer_.backward(loss, static_cast<double>(micro_batch.ids.numel()));
  }
  StepResult step() override {
    StepResult result = trainer_.step();
    result.stop = stop_;
    return result;
  }
  void request_stop() override { stop_ = true; }
  double evaluate(const MicroBatch& micro_batch) override {
    const at::NoGradGuard no_grad;
    return model_.loss(micro_batch.ids, micro_batch.targets).item<double>();
  }
  EngineStats take_stats() override { return {}; }
  std::vector<ParamInfo> params() const override {
    std::vector<ParamInfo> infos;
    for (const models::NamedParam& param : model_.params()) {
      infos.push_back({param.name, param.tensor.numel(), param.tensor.requires_grad()});
    }
    return infos;
  }
  at::Tensor value(int param) override {
    const at::Tensor& tensor = model_.params()[static_cast<std::size_t>(param)].tensor;
    return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false,
                              /*copy=*/true);
  }
  void save(const std::string& path) override {
    std::vector<checkpoint::TensorEntry> entries;
    for (const models::NamedParam& param : model_.params()) {
      entries.push_back({param.name, model_.options().dtype, param.tensor.sizes().vec()});
    }
    checkpoint::SafetensorsWriter writer(path, entries);
    for (int id = 0; id < static_cast<int>(model_.params().size()); ++id) {
      const at::Tensor host = value(id).contiguous();
      writer.append(host.const_data_ptr(), host.nbytes());
    }
    writer.finish();
  }
  Engine* engine() override { return nullptr; }

 private:
  models::Gpt model_;
  models::PlainTrainer trainer_;
  bool stop_ = false;
};

}  // namespace

Batches::Batches(models::TokenSource& data, const TrainPlan& plan)
    : data_(data),
      sequence_(plan.model.sequence),
      device_(torch_device(plan)),
      tokens_(static_cast<std::size_t>(sequence_ + 1)) {}

MicroBatch Batches::read(std::int64_t step, SequenceRange sequences) {
  const at::Tensor ids = at::empty({sequences.count, sequence_}, at::kLong);
  const at::Tensor targets = at::empty({sequences.count, sequence_}, at::kLong);
  for (std::int64_t i = 0; i < sequences.count; ++i) {
    data_.read(step, sequences.begin + i, tokens_);
    std::copy(tokens_.begin(), tokens_.end() - 1,
              ids.mutable_data_ptr<std::int64_t>() + i * sequence_);
    std::copy(tokens_.begin() + 1, tokens_.end(),
              targets.mutable_data_ptr<std::int64_t>() + i * sequence_);
  }
  return {ids.to(device_), targets.to(device_)};
}

std::unique_ptr<Trainer> make_sharded_trainer(const TrainPlan& plan, Runtime& runtime) {
  return std::make_unique<ShardedTrainer>(plan, runtime);
}

std::unique_ptr<Trainer> make_plain_trainer(const TrainPlan& plan, Runtime& runtime) {
  return std::make_unique<UnshardedTrainer>(plan, runtime);
}

}  // namespace tessera::cli
