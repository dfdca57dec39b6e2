#include "cli/train_verify.h"

#include <cmath>

#include <ATen/ATen.h>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

double norm_of(const at::Tensor& tensor) { return tensor.norm().item<double>(); }

CompareBounds bounds_of(const TrainPlan& plan) {
  return plan.batch.num_ranks == 1 && plan.cuda_device < 0
             ? kBitForBit
             : rounding_bounds(plan.model.dtype, plan.model.layers);
}

BatchShape twin_batch(const TrainPlan& plan) {
  BatchShape batch = plan.batch;
  if (plan.verify_against == Against::kPlain) {
    batch.num_ranks = 1;
  }
  return batch;
}

}  // namespace

Twin::Twin(const TrainPlan& plan, Runtime& runtime)
    : batch_(twin_batch(plan)),
      model_(plan.model),
      trainer_(make_plain_trainer(plan, runtime)),
      infos_(trainer_->params()),
      comparison_(bounds_of(plan)) {
  for (int id = 0; id < static_cast<int>(infos_.size()); ++id) {
    initial_.push_back(trainer_->value(id));
  }
}

void Twin::step(Batches& batches, std::int64_t step, const StepResult& sharded) {
  for (std::int64_t i = 0; i < batch_.accumulate; ++i) {
    for (int rank = 0; rank < batch_.num_ranks; ++rank) {
      const MicroBatch micro_batch = batches.read(step, micro_batch_of(batch_, rank, i));
      trainer_->backward(trainer_->forward(micro_batch), micro_batch);
    }
  }
  const StepResult unsharded = trainer_->step();
  sum_lr_ += unsharded.skipped ? 0 : unsharded.lr;
  comparison_.add_loss(step + 1, sharded.loss, unsharded.loss);
  comparison_.add_grad_norm(step + 1, sharded.grad_norm, unsharded.grad_norm);
}

void Twin::compare_param(int id, const Trainer::ParamInfo& info, const at::Tensor& sharded) {
  const auto index = static_cast<std::size_t>(id);
  TESSERA_INVARIANT(index < infos_.size() && infos_[index].name == info.name &&
                        infos_[index].numel == sharded.numel(),
                    "parameter ", id, " is ", info.name, " with ", sharded.numel(),
                    " elements; the unsharded model has another one there");
  const at::Tensor unsharded = trainer_->value(id).to(at::kDouble);
  const at::Tensor apart = sharded.to(at::kDouble) - unsharded;
  const at::Tensor moved = unsharded - initial_[index].to(at::kDouble);
  const shard::ElementRange noise = models::gpt_noise_elements(model_, info.name);
  if (noise.numel > 0 && !comparison_.bit_for_bit()) {
    const auto part = [&noise](const at::Tensor& tensor) {
      return tensor.flatten().slice(0, noise.begin, noise.begin + noise.numel);
    };
    const double allowed = 2 * sum_lr_ * std::sqrt(static_cast<double>(noise.numel));
    comparison_.add_noise({info.name + " (moved by noise)", norm_of(part(apart)),
                           norm_of(part(unsharded)), norm_of(part(moved))},
                          allowed);
    part(apart).zero_();
  }
  comparison_.add_param({info.name, norm_of(apart), norm_of(unsharded), norm_of(moved)});
}

}  // namespace tessera::cli
