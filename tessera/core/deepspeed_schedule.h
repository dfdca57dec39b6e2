// DeepSpeed's schedulers as options schedule.*; internal to core, used by deepspeed_rules.cpp.
//
// The learning rates are those that its engine would train with, step by step (optim/schedule.h).
//
// Threads: stateless.
#pragma once

#include "tessera/core/deepspeed_rules.h"

namespace tessera {

// The optimizer's, or the largest one of a scheduler that has its own, as in DeepSpeed.
void apply_learning_rate(const DeepSpeedView& view, DeepSpeedTranslation& out);

// Throws ConfigError for a type that there is not, a parameter that is not of the type, and
// momentum that should be cycled.
void apply_schedule(const DeepSpeedView& view, DeepSpeedTranslation& out);

}  // namespace tessera
