#include "cli/train_verify.h"

#include <ATen/ATen.h>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

double norm_of(const at::Tensor& tensor) { return tensor.to(at::kDouble).norm().item<double>(); }

double distance(const at::Tensor& one, const at::Tensor& other) {
  return norm_of(one.to(at::kDouble) - other.to(at::kDouble));
}

BatchShape on_one_rank(BatchShape shape) {
  shape.num_ranks = 1;
  return shape;
}

}  // namespace

Twin::Twin(const TrainPlan& plan, Runtime& runtime)
    : batch_(on_one_rank(plan.batch)),
      trainer_(make_plain_trainer(plan, runtime)),
      infos_(trainer_->params()),
      comparison_(compare_bounds(plan.model.dtype, plan.batch.num_ranks, plan.model.layers)) {
  for (int id = 0; id < static_cast<int>(infos_.size()); ++id) {
    initial_.push_back(trainer_->value(id));
  }
}

void Twin::step(Batches& batches, std::int64_t step, const StepResult& sharded) {
  for (std::int64_t i = 0; i < batch_.accumulate; ++i) {
    trainer_->run(batches.read(step, micro_batch_of(batch_, 0, i)));
  }
  const StepResult unsharded = trainer_->step();
  comparison_.add_loss(step, sharded.loss, unsharded.loss);
  comparison_.add_grad_norm(step, sharded.grad_norm, unsharded.grad_norm);
}

void Twin::compare_param(int id, const Trainer::ParamInfo& info, const at::Tensor& sharded) {
  const auto index = static_cast<std::size_t>(id);
  TESSERA_INVARIANT(index < infos_.size() && infos_[index].name == info.name &&
                        infos_[index].numel == sharded.numel(),
                    "parameter ", id, " is ", info.name, " with ", sharded.numel(),
                    " elements; the unsharded model has another one there");
  const at::Tensor unsharded = trainer_->value(id);
  comparison_.add_param({info.name, distance(sharded, unsharded), norm_of(unsharded),
                         distance(unsharded, initial_[index])});
}

}  // namespace tessera::cli
