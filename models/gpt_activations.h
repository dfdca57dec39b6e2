// Memory of a GPT's activations in numbers: what autograd keeps of one micro-batch between forward
// and backward, and the most that is held at once. For those who plan a training that they have not
// tried.
//
// Counted are inputs, activations, gradients of activations, and what the loss needs besides. Not
// counted are parameters and their gradients, which have owners and accounts of their own, and what
// belongs to an operator alone: the workspace of a matrix product or of attention, an allocator's
// rounding, and with recomputation the saved state of the random generators (5 KiB of host memory
// per block).
//
// The lines are those of a GPU: attention keeps its output and a log-sum-exp per head and token and
// no table of scores, and statistics of norms are fp32. On the CPU the same holds, except that
// there statistics have the type of their input.
//
// No torch header here: whoever only counts need not load one.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::models {

struct GptOptions;

// Bytes.
struct GptActivations {
  std::int64_t per_block = 0;  // that a trained block keeps, its output included, its input not;
                               // with recomputation all but the output exist in its backward only
  std::int64_t embedding = 0;  // that the embedding keeps: its output, ids and positions
  std::int64_t head = 0;       // that the head, with logits and loss, holds at its worst moment
  std::int64_t kept = 0;       // of the whole model, after forward and before backward
  std::int64_t peak = 0;       // of the whole model, in forward and backward
};

// For micro-batches of `batch` full sequences. Throws ConfigError as options.check() does, for a
// batch below one, and for sizes beyond all memory.
GptActivations gpt_activations(const GptOptions& options, std::int64_t batch);

// Of parameters' gradients, on the device.
struct GptGradients {
  // Kept from a unit's backward on until its next forward; by unit: embedding, blocks, head.
  std::vector<std::int64_t> kept_of_unit;
  std::int64_t passing = 0;  // that a backward holds besides
};

// The most that activations and gradients hold together, in one micro-batch: a unit's gradients
// come when activations of those after it are gone, and go before those of their next forward come.
std::int64_t gpt_peak_with(const GptGradients& gradients, const GptOptions& options,
                           std::int64_t batch);

}  // namespace tessera::models
