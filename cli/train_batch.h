// DeepSpeed's arithmetic of batches, after all flags: the whole batch is what a rank takes at a
// time, times micro-batches per step, times ranks. Two of the three give the third.
//
// Threads: pure but for `config`.
#pragma once

#include "cli/train_ranks.h"
#include "tessera/core/config.h"

namespace tessera::cli {

// Of batch.total, batch.micro_per_rank and batch.accumulate, which are then set to what holds. What
// a file says gives way to flags that it contradicts; with none given, `default_total` or the next
// number that ranks can share. Throws ConfigError with all three and where each came from.
BatchShape resolve_batch(Config& config, int num_ranks, std::int64_t default_total);

}  // namespace tessera::cli
