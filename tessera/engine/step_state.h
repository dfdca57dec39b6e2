// Internal to engine: the numbers of a training between two steps, besides parameters and states,
// and their text in a checkpoint, which gives back every bit of them.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/optim/loss_scale.h"

namespace tessera::engine {

struct StepState {
  std::int64_t num_updated_steps = 0;  // that were not skipped
  double weight_scale = 0;             // of loss weights, in fp16; 0: not agreed on yet
  optim::LossScaleState loss_scale;
  std::string optimizer_kind;
  std::int64_t num_optimizer_updates = 0;
};

std::map<std::string, std::string> to_text(const StepState& state);
// Throws CorruptError that names the number. `path` is how errors call the checkpoint.
StepState step_state_of(const std::map<std::string, std::string>& text, const std::string& path);

}  // namespace tessera::engine
