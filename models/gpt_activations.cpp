#include "models/gpt_activations.h"

#include <algorithm>

#include "models/gpt.h"
#include "tessera/core/dtype.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kFp32Bytes = 4;
constexpr std::int64_t kIdBytes = 8;

// Sums below stay well within 64 bits as long as every line does.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 58;

// One micro-batch: its tensors by size. "Row" is one value for each of `width` columns and each
// token, the type being the model's.
struct Sizes {
  Sizes(const GptOptions& options, std::int64_t batch)
      : tokens(batch * options.sequence),
        row(tokens * options.width * static_cast<std::int64_t>(bytes_of(options.dtype))),
        low_rank(tokens * options.adapter_rank *
                 static_cast<std::int64_t>(bytes_of(options.dtype))),
        statistic(tokens * kFp32Bytes),
        logits(tokens * options.vocabulary) {}

  std::int64_t tokens;
  std::int64_t row;
  std::int64_t low_rank;   // between the two matrices of an adapter
  std::int64_t statistic;  // one fp32 value per token
  std::int64_t logits;     // elements, not bytes
};

// What a block keeps, by the operator whose backward needs it, in the order of BlockImpl::forward.
// Additions keep nothing. A linear layer needs its input for the gradient of its weight, or of its
// adapter's, alone: where none is trained it keeps none. An adapter that is trained keeps what is
// between its matrices, too.
//   norm1                       its input is the output of the one before, counted there; the mean
//                               and the inverse deviation
//   attention.qkv               its input: 1 row
//   attention                   queries, keys and values, views of one tensor: 3 rows; its output:
//                               1 row; the log-sum-exp of the scores: a statistic per head
//   attention.out               its input is attention's output
//   norm2                       its input: 1 row; two statistics
//   up                          its input: 1 row
//   gelu                        its input: 4 rows
//   down                        its input: 4 rows
//   the block's output          1 row, kept by the norm that follows
std::int64_t block_bytes(const GptOptions& options, const Sizes& sizes, bool trained) {
  const std::int64_t of_operators = 3 + 1 + 1 + 4 + 1;
  const std::int64_t of_weights = trained ? 1 + 1 + 4 : 0;
  const std::int64_t statistics = 2 + 2 + options.heads;
  return (of_operators + of_weights) * sizes.row + (trained ? 4 : 0) * sizes.low_rank +
         statistics * sizes.statistic;
}

// The most that backward of a block holds beyond what was kept, where the gradient of its output
// stands in the place of the output.
//   down                        makes the gradient of its input: 4 rows. Its own input then goes
//   gelu                        needs that, and makes another: 4 + 4 rows, less the 4 of down's
//                               input, which a frozen block did not keep
// Everything else is smaller: when attention's gradients are made the block's second half is gone.
// With an adapter there are two gradients of down's input until they are summed: the second comes
// when the input is gone, unless down needs it for its own weight, too.
std::int64_t block_backward_bytes(const Sizes& sizes, bool keeps_inputs, bool needs_them_twice) {
  return (keeps_inputs && !needs_them_twice ? 4 : 8) * sizes.row;
}

struct HeadBytes {
  std::int64_t kept = 0;
  std::int64_t peak = 0;
};

//   norm                        two statistics; its input is the last block's output
//   head                        the norm's output: 1 row, unless its weight is frozen
//   loss                        targets; all at once: the logarithms of probabilities, fp32
// In forward, all at once: fp32 logits and the logarithms. In backward: the logarithms, their
// gradient and that of the logits, all fp32; then the latter in the model's type beside the
// gradient of the norm's output. In chunks: see chunked_head_bytes().
HeadBytes head_bytes(const GptOptions& options, const Sizes& sizes) {
  const auto element_bytes = static_cast<std::int64_t>(bytes_of(options.dtype));
  const std::int64_t kept =
      2 * sizes.statistic + (options.trains_base() ? sizes.row : 0) + kIdBytes * sizes.tokens;
  return {kept + kFp32Bytes * sizes.logits,
          kept + std::max(3 * kFp32Bytes * sizes.logits, element_bytes * sizes.logits + sizes.row)};
}

// See gpt_chunked_loss.h. Where gradients are made in forward, that of the norm's output is kept in
// its place, and that of the weight, which in fp32 is a parameter's gradient as any other. Else the
// norm's output is kept, and the gradients come in backward.
HeadBytes chunked_head_bytes(const GptOptions& options, const Sizes& sizes) {
  const auto element_bytes = static_cast<std::int64_t>(bytes_of(options.dtype));
  const bool low_precision = element_bytes < kFp32Bytes;
  const std::int64_t chunk = std::min(options.loss_chunk, sizes.tokens);
  const std::int64_t per_logit = element_bytes + kFp32Bytes + (low_precision ? kFp32Bytes : 0);
  const std::int64_t of_chunk = per_logit * chunk * options.vocabulary;
  const std::int64_t others = 2 * sizes.statistic + kIdBytes * sizes.tokens;
  const std::int64_t weight_sum =
      low_precision && options.trains_base() ? kFp32Bytes * options.vocabulary * options.width : 0;
  if (options.dtype != DType::kFloat16) {
    const std::int64_t kept = others + kFp32Bytes * sizes.tokens * options.width + weight_sum;
    return {kept, kept + sizes.row + of_chunk};
  }
  const std::int64_t kept = others + sizes.row;
  return {kept, kept + sizes.row + of_chunk + (chunk < sizes.tokens ? weight_sum : 0)};
}

void check_sizes(const GptOptions& options, std::int64_t batch) {
  options.check();
  TESSERA_CHECK(batch >= 1, ConfigError, "activations of ", batch,
                " sequences; a micro-batch has at least one");
  // The largest lines, without products that could leave 64 bits.
  const std::int64_t widest = std::max(options.vocabulary, 32 * options.width);
  const std::int64_t per_token = 3 * kFp32Bytes * widest + kFp32Bytes * options.heads;
  TESSERA_CHECK(batch <= kMaxBytes / options.layers / options.sequence / per_token, ConfigError,
                "activations of ", batch, " sequences of ", options.sequence, " tokens in ",
                options.layers, " blocks are beyond any memory; give a smaller --batch or --seq");
}

// What a training holds when.
class Training {
 public:
  Training(const GptOptions& options, std::int64_t batch)
      : options_(options),
        sizes_(options, batch),
        head_(options.loss_chunk > 0 ? chunked_head_bytes(options, sizes_)
                                     : head_bytes(options, sizes_)),
        embedding_((keeps_embedding(options) ? sizes_.row : 0) +
                   kIdBytes * (sizes_.tokens + options.sequence)) {}

  const HeadBytes& head() const { return head_; }
  std::int64_t embedding() const { return embedding_; }
  std::int64_t per_block() const { return block_bytes(options_, sizes_, /*trained=*/true); }

  // What is kept by the embedding and the first n blocks.
  std::int64_t kept_up_to(std::int64_t num_blocks) const {
    const std::int64_t passive = std::min(num_blocks, options_.num_without_backward());
    const std::int64_t frozen = std::min(num_blocks, options_.freeze) - passive;
    const std::int64_t trained = num_blocks - frozen - passive;
    const std::int64_t blocks =
        options_.recompute
            ? (num_blocks - passive) * sizes_.row
            : frozen * block_bytes(options_, sizes_, /*trained=*/false) + trained * per_block();
    return embedding_ + blocks;
  }

  std::int64_t in_head() const { return kept_up_to(options_.layers) + head_.peak; }

  // In the backward of block n, where what came after it is gone. One that is recomputed has all
  // that it would have kept, and the gradient of its output beside the output.
  std::int64_t in_backward_of(std::int64_t block) const {
    if (block < options_.num_without_backward()) {
      return embedding_;
    }
    const bool trained = block >= options_.freeze;
    const std::int64_t own = block_backward_bytes(
        sizes_, trained, trained && options_.trains_base(block) && options_.trains_adapters(block));
    return options_.recompute
               ? kept_up_to(block) + block_bytes(options_, sizes_, trained) + sizes_.row + own
               : kept_up_to(block + 1) + own;
  }

 private:
  // A frozen embedding's output needs no gradient: no norm keeps it, but a unit that runs its
  // forward again does.
  static bool keeps_embedding(const GptOptions& options) {
    return options.trains_base() || options.recompute;
  }

  const GptOptions& options_;
  const Sizes sizes_;
  const HeadBytes head_;
  const std::int64_t embedding_;
};

}  // namespace

GptActivations gpt_activations(const GptOptions& options, std::int64_t batch) {
  check_sizes(options, batch);
  const Training training(options, batch);
  GptActivations bytes;
  bytes.per_block = training.per_block();
  bytes.embedding = training.embedding();
  bytes.head = training.head().peak;
  bytes.kept = training.kept_up_to(options.layers) + training.head().kept;
  bytes.peak = training.in_head();
  // Where the most is held: among blocks that are alike, the last one.
  for (const std::int64_t block : {options.layers - 1, options.freeze - 1}) {
    if (block >= 0) {
      bytes.peak = std::max(bytes.peak, training.in_backward_of(block));
    }
  }
  return bytes;
}

std::int64_t gpt_peak_with(const GptGradients& gradients, const GptOptions& options,
                           std::int64_t batch) {
  check_sizes(options, batch);
  const std::vector<std::int64_t>& of_unit = gradients.kept_of_unit;
  TESSERA_INVARIANT(static_cast<std::int64_t>(of_unit.size()) == options.layers + 2,
                    "gradients of ", of_unit.size(), " units were given for ", options.layers,
                    " blocks, embedding and head");
  const Training training(options, batch);
  // Logits are gone when the head's gradients are made, but for those of a loss in chunks, which
  // counts its own.
  std::int64_t peak = training.in_head();
  std::int64_t kept = of_unit.back();
  for (std::int64_t block = options.layers - 1; block >= 0; --block) {
    kept += of_unit[static_cast<std::size_t>(block) + 1];
    peak = std::max(peak, training.in_backward_of(block) + kept + gradients.passing);
  }
  return std::max(peak, training.embedding() + kept + of_unit.front() + gradients.passing);
}

}  // namespace tessera::models
