#include "models/gpt_chunked_loss.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// In which losses, sums and gradients of logits are made.
at::ScalarType sum_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& weight) {
  return at::mm(hidden, weight.t());
}

// Calls body(first row, rows) for each chunk. Temporaries of one call are gone before the next, so
// that there is room for one chunk only.
template <typename Body>
void for_each_chunk(std::int64_t num_rows, std::int64_t chunk, const Body& body) {
  for (std::int64_t begin = 0; begin < num_rows; begin += chunk) {
    body(begin, std::min(chunk, num_rows - begin));
  }
}

// The sum over chunks of d_logits^T * hidden.
class WeightGradient {
 public:
  WeightGradient(const at::Tensor& weight, bool one_chunk) : weight_(weight) {
    if (!one_chunk) {
      sum_ = at::empty(weight.sizes(), weight.options().dtype(sum_type(weight)));
    }
  }

  // `scratch`: fp32, as large as d_logits, and may be d_logits; its values are lost.
  void add(const at::Tensor& d_logits, const at::Tensor& hidden, at::Tensor& scratch) {
    if (!sum_.defined()) {
      sum_ = at::mm(d_logits.t(), hidden);
      return;
    }
    const int keep = is_empty_ ? 0 : 1;  // with 0 the sum's memory is not read
    is_empty_ = false;
    if (sum_.scalar_type() == d_logits.scalar_type()) {
      sum_.addmm_(d_logits.t(), hidden, keep);
    } else if (d_logits.is_cuda()) {
      at::addmm_out(sum_, sum_, d_logits.t(), hidden, sum_.scalar_type(), keep);
    } else {
      // Only GPUs have a product whose sums leave in another type than its factors have. The
      // factors' values are those of low precision all the same.
      scratch.copy_(d_logits);
      sum_.addmm_(scratch.t(), hidden.to(sum_.scalar_type()), keep);
    }
  }

  at::Tensor take() { return sum_.to(weight_.scalar_type()); }

 private:
  const at::Tensor& weight_;
  at::Tensor sum_;
  bool is_empty_ = true;
};

// The weight is saved as the tensor it is: in a sharded unit its memory comes and goes, and is
// there again when the unit's backward begins, as for any operator of torch.
struct ChunkedCrossEntropy : torch::autograd::Function<ChunkedCrossEntropy> {
  // Places among the tensors that autograd knows.
  static constexpr std::size_t kHidden = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kTargets = 2;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            std::int64_t chunk) {
    context->save_for_backward({hidden, weight, targets});
    context->saved_data["chunk"] = chunk;
    const std::int64_t num_tokens = hidden.size(0);
    at::Tensor loss = at::zeros({}, hidden.options().dtype(sum_type(hidden)));
    for_each_chunk(num_tokens, chunk, [&](std::int64_t begin, std::int64_t rows) {
      at::Tensor logits = logits_of(hidden.narrow(0, begin, rows), weight);
      const at::Tensor log_probs = at::log_softmax(logits, 1, sum_type(hidden));
      loss.add_(at::nll_loss(log_probs, targets.narrow(0, begin, rows), /*weight=*/{},
                             at::Reduction::Sum));
    });
    return loss.div_(num_tokens);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[kHidden];
    const at::Tensor& weight = saved[kWeight];
    const at::Tensor& targets = saved[kTargets];
    const std::int64_t chunk = context->saved_data["chunk"].toInt();
    const std::int64_t num_tokens = hidden.size(0);
    const bool wants_hidden = context->needs_input_grad(kHidden);
    const bool wants_weight = context->needs_input_grad(kWeight);

    const at::Tensor scale = gradients[0] / num_tokens;  // stays where the loss is
    at::Tensor d_hidden = wants_hidden ? at::empty_like(hidden) : at::Tensor();
    WeightGradient d_weight(weight, num_tokens <= chunk || !wants_weight);
    for_each_chunk(num_tokens, chunk, [&](std::int64_t begin, std::int64_t rows) {
      const at::Tensor chunk_hidden = hidden.narrow(0, begin, rows);
      const at::Tensor chunk_targets = targets.narrow(0, begin, rows).unsqueeze(1);
      at::Tensor d_logits = logits_of(chunk_hidden, weight);
      // The gradient of a row is (softmax - 1 at the target) / tokens.
      at::Tensor exact = at::softmax(d_logits, 1, sum_type(hidden));
      exact.scatter_(1, chunk_targets, exact.gather(1, chunk_targets).sub_(1));
      if (d_logits.scalar_type() == exact.scalar_type()) {
        d_logits = exact.mul_(scale);
      } else {
        at::mul_out(d_logits, exact, scale);  // rounds it, in the place of the logits
      }
      if (wants_hidden) {
        at::Tensor place = d_hidden.narrow(0, begin, rows);
        at::mm_out(place, d_logits, weight);
      }
      if (wants_weight) {
        d_weight.add(d_logits, chunk_hidden, exact);
      }
    });
    variable_list result(4);  // the last one is the chunk's
    result[kHidden] = d_hidden;
    result[kWeight] = wants_weight ? d_weight.take() : at::Tensor();
    return result;
  }
};

}  // namespace

at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                 const at::Tensor& targets, std::int64_t chunk) {
  TESSERA_INVARIANT(chunk >= 1, "a loss in chunks of ", chunk, " tokens");
  TESSERA_INVARIANT(hidden.dim() == 2 && weight.dim() == 2 && targets.dim() == 1 &&
                        hidden.size(0) >= 1 && hidden.size(0) == targets.size(0) &&
                        hidden.size(1) == weight.size(1),
                    "a loss of hidden ", hidden.sizes(), ", weight ", weight.sizes(),
                    " and targets ", targets.sizes());
  return ChunkedCrossEntropy::apply(hidden, weight, targets, chunk);
}

}  // namespace tessera::models
