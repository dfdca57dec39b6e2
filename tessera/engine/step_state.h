// Internal to engine: the numbers of a training between two steps, besides parameters and states,
// and their text in a checkpoint, which gives back every bit of them.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "tessera/checkpoint/manifest.h"
#include "tessera/optim/loss_scale.h"

namespace tessera::engine {

// What keeps gradients in the range of fp16.
struct Fp16State {
  double weight_scale = 0;  // of loss weights; 0: not agreed on yet
  optim::LossScaleState loss_scale = {};
};

struct StepState {
  std::int64_t num_updated_steps = 0;  // that were not skipped
  std::optional<Fp16State> fp16;       // null: training was in another type
  std::string optimizer_kind;
  std::int64_t num_optimizer_updates = 0;
};

std::map<std::string, std::string> to_text(const StepState& state);
// Of the manifest's text; whether that is of fp16, the types of its values say. Throws CorruptError
// that names the number. `path` is how errors call the checkpoint.
StepState step_state_of(const checkpoint::Manifest& manifest, const std::string& path);

}  // namespace tessera::engine
