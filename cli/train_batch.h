// What one rank does of a whole training run: which sequences, which files, how many threads.
//
// A batch is cut into one contiguous slice per rank, and the slice into micro-batches: however many
// ranks there are, a step trains on the same sequences. As in DeepSpeed the whole batch is what a
// rank takes at a time, times micro-batches per step, times ranks: two of the three give the third.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/config.h"

namespace tessera::cli {

struct BatchShape {
  std::int64_t total = 0;  // sequences per step of all ranks together
  int num_ranks = 1;
  std::int64_t accumulate = 1;  // micro-batches per step and rank

  std::int64_t per_micro_batch() const { return total / (num_ranks * accumulate); }
  // Throws ConfigError with the nearest total that can be shared; `subject` is how it calls the
  // total: "--batch 7".
  void check(const std::string& subject) const;
};

struct SequenceRange {
  std::int64_t begin = 0;  // index in the batch
  std::int64_t count = 0;
};

// REQUIRES: a shape that check() lets pass.
SequenceRange micro_batch_of(const BatchShape& shape, int rank, std::int64_t micro_batch);

// The smallest total of at least `wanted` that can be shared.
std::int64_t shareable_total(std::int64_t wanted, int num_ranks, std::int64_t accumulate);

// Threads per rank: the cores divided evenly, at least one.
int threads_per_rank(int num_cores, int num_local_ranks);

// Of batch.total, batch.micro_per_rank and batch.accumulate, which are then set to what holds. What
// a file says gives way to flags that it contradicts; with none given, `default_total` or the next
// number that ranks can share. Throws ConfigError with all three and where each came from.
BatchShape resolve_batch(Config& config, int num_ranks, std::int64_t default_total);

}  // namespace tessera::cli
