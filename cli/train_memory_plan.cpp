#include "cli/train_memory_plan.h"

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::cli {

std::string activations_text(const MemoryPlan& memory) {
  const auto bytes = [](std::int64_t count) {
    return approximate_bytes(static_cast<std::uint64_t>(count));
  };
  const models::GptActivations& activations = memory.activations;
  std::string text =
      detail::concat("activations of a micro-batch: ", bytes(activations.peak), " at most, ",
                     bytes(activations.head), " of them inside the head (logits and loss)\n");
  if (memory.placement.on_cuda) {
    text += detail::concat("device memory with activations: ",
                           bytes(memory.placement.device_memory_bytes() + activations.peak),
                           " at most\n");
  }
  return text;
}

}  // namespace tessera::cli
