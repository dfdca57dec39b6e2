#include "cli/train_memory_plan.h"

#include "cli/progress.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::cli {

std::int64_t device_peak_bytes(const planner::ModelShapes& shapes, const planner::MemoryPlan& plan,
                               const models::GptOptions& model, std::int64_t batch) {
  if (!plan.adopts_gradients) {  // they have memory of their own
    return plan.device_memory_bytes() + plan.full_gradient_bytes +
           models::gpt_activations(model, batch).peak;
  }
  models::GptGradients gradients;
  gradients.passing = plan.full_gradient_bytes;
  // The next forward of a unit frees those of parameters on the device, and takes what was made in
  // the place of others. A master that streams is written nowhere else: its gradient stays until
  // the next backward begins.
  std::int64_t staying = 0;
  // A parameter of two units gets its gradient with the later one's.
  std::vector<std::size_t> unit_of(shapes.params.size());
  for (std::size_t unit = 0; unit < shapes.units.size(); ++unit) {
    for (const int id : shapes.units[unit]) {
      unit_of[static_cast<std::size_t>(id)] = unit;
    }
  }
  gradients.kept_of_unit.resize(shapes.units.size());
  const auto element_bytes = static_cast<std::int64_t>(bytes_of(shapes.dtype));
  for (std::size_t id = 0; id < shapes.params.size(); ++id) {
    const Placement& each = plan.params[id];
    if (shapes.params[id].trainable && each.updater == Updater::kDevice) {
      const bool goes = each.parameter == Tier::kDevice || shapes.dtype != DType::kFloat32;
      (goes ? gradients.kept_of_unit[unit_of[id]] : staying) +=
          element_bytes * shapes.params[id].numel;
    }
  }
  return plan.device_memory_bytes() - plan.bytes(Tier::kDevice, Role::kGradient) + staying +
         models::gpt_peak_with(gradients, model, batch);
}

std::string trained_text(const planner::ModelShapes& shapes) {
  std::int64_t num_trained = 0;
  std::int64_t num_frozen = 0;
  for (const planner::ParamShape& param : shapes.params) {
    (param.trainable ? num_trained : num_frozen) += param.numel;
  }
  return num_frozen == 0 ? ""
                         : detail::concat("trained: ", grouped(num_trained),
                                          " elements; frozen: ", grouped(num_frozen),
                                          ", without gradients and optimizer states\n");
}

std::string activations_text(const TrainMemory& memory) {
  const models::GptActivations& activations = memory.activations;
  std::string text = detail::concat(
      "activations of a micro-batch: ", approximate_bytes(activations.peak), " at most, ",
      approximate_bytes(activations.head), " of them inside the head (logits and loss)\n");
  if (memory.plan.is_discrete) {
    text += detail::concat("device memory with activations: ",
                           approximate_bytes(memory.device_peak_bytes), " at most\n");
  }
  return text;
}

}  // namespace tessera::cli
