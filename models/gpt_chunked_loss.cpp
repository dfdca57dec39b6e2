#include "models/gpt_chunked_loss.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
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

// sum (+)= left * right, `sum` in the factors' type or in that of sums. `scratch`: fp32, as large
// as `left`, and may be `left`; its values are lost.
void add_product(at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, bool is_first,
                 const at::Tensor& scratch) {
  const int keep = is_first ? 0 : 1;  // with 0 the sum's memory is not read
  if (sum.scalar_type() == left.scalar_type()) {
    sum.addmm_(left, right, keep);
  } else if (left.is_cuda()) {
    at::addmm_out(sum, sum, left, right, sum.scalar_type(), keep);
  } else {
    // Only GPUs have a product whose sums leave in another type than its factors have. The factors'
    // values are those of low precision all the same.
    scratch.copy_(left);
    sum.addmm_(scratch, right.to(sum.scalar_type()), keep);
  }
}

// Gradients of `hidden` and `weight`, made of those of the logits, a chunk at a time.
class Gradients {
 public:
  struct Wants {
    bool hidden = false;
    bool weight = false;
  };
  // `type`: of what is made; the weight's is summed over several chunks in that of sums.
  Gradients(const at::Tensor& hidden, const at::Tensor& weight, Wants wants, at::ScalarType type,
            bool one_chunk)
      : hidden_(hidden), weight_(weight) {
    if (wants.hidden) {
      d_hidden_ = at::empty(hidden.sizes(), hidden.options().dtype(type));
    }
    if (wants.weight) {
      d_weight_ =
          at::empty(weight.sizes(), weight.options().dtype(one_chunk ? type : sum_type(weight)));
    }
  }

  // `probs` of `logits`, in the type of sums. What was in either is lost.
  void add(at::Tensor logits, const at::Tensor& probs, std::int64_t begin,
           const at::Tensor& targets, const at::Tensor& scale) {
    // The gradient of a row is (softmax - 1 at the target) / tokens.
    const at::Tensor columns = targets.unsqueeze(1);
    probs.scatter_(1, columns, probs.gather(1, columns).sub_(1));
    if (logits.scalar_type() == probs.scalar_type()) {
      logits = probs.mul_(scale);
    } else {
      at::mul_out(logits, probs, scale);  // rounds it, in the place of the logits
    }
    const std::int64_t rows = logits.size(0);
    if (d_hidden_.defined()) {
      at::Tensor place = d_hidden_.narrow(0, begin, rows);
      add_product(place, logits, weight_, /*is_first=*/true, probs);
    }
    if (d_weight_.defined()) {
      add_product(d_weight_, logits.t(), hidden_.narrow(0, begin, rows), begin == 0, probs.t());
    }
  }

  const at::Tensor& hidden() const { return d_hidden_; }
  const at::Tensor& weight() const { return d_weight_; }

 private:
  const at::Tensor& hidden_;
  const at::Tensor& weight_;
  at::Tensor d_hidden_;
  at::Tensor d_weight_;
};

// See the header: what cannot be scaled later, or not summed in fp32 here, is made in backward.
bool makes_gradients_in_forward(const at::Tensor& hidden) {
  return at::GradMode::is_enabled() &&
         (hidden.scalar_type() == sum_type(hidden) ||
          (hidden.is_cuda() && hidden.scalar_type() == at::kBFloat16));
}

// What backward needs is saved as the tensors they are: in a sharded unit the weight's memory comes
// and goes, and is there again when the unit's backward begins, as for any operator of torch.
struct ChunkedCrossEntropy : torch::autograd::Function<ChunkedCrossEntropy> {
  // Places among the tensors that autograd knows, and among those that are saved.
  static constexpr std::size_t kHidden = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kTargets = 2;
  static constexpr std::size_t kNumArguments = 5;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets, std::int64_t chunk,
                            bool makes_gradients) {
    const std::int64_t num_tokens = hidden.size(0);
    at::Tensor loss = at::zeros({}, hidden.options().dtype(sum_type(hidden)));
    const at::Tensor scale = at::full_like(loss, 1.0 / static_cast<double>(num_tokens));
    Gradients gradients(
        hidden, weight,
        {makes_gradients && hidden.requires_grad(), makes_gradients && weight.requires_grad()},
        sum_type(hidden), /*one_chunk=*/false);
    for_each_chunk(num_tokens, chunk, [&](std::int64_t begin, std::int64_t rows) {
      at::Tensor logits = logits_of(hidden.narrow(0, begin, rows), weight);
      at::Tensor log_probs = at::log_softmax(logits, 1, sum_type(hidden));
      const at::Tensor chunk_targets = targets.narrow(0, begin, rows);
      loss.add_(at::nll_loss(log_probs, chunk_targets, /*weight=*/{}, at::Reduction::Sum));
      if (makes_gradients) {
        gradients.add(std::move(logits), log_probs.exp_(), begin, chunk_targets, scale);
      }
    });
    if (makes_gradients) {
      context->save_for_backward({gradients.hidden(), gradients.weight()});
    } else {
      context->save_for_backward({hidden, weight, targets});
    }
    context->saved_data["chunk"] = chunk;
    context->saved_data["makes_gradients"] = makes_gradients;
    context->saved_data["type"] = hidden.scalar_type();
    return loss.div_(num_tokens);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return context->saved_data["makes_gradients"].toBool() ? scaled(context, saved, gradients[0])
                                                           : made(context, saved, gradients[0]);
  }

 private:
  // Gradients of the mean loss, times that of the loss.
  static variable_list scaled(AutogradContext* context, const variable_list& saved,
                              const at::Tensor& factor) {
    const at::ScalarType type = context->saved_data["type"].toScalarType();
    variable_list result(kNumArguments);
    for (const std::size_t which : {kHidden, kWeight}) {
      if (saved[which].defined()) {
        result[which] = at::empty(saved[which].sizes(), saved[which].options().dtype(type));
        at::mul_out(result[which], saved[which], factor);  // rounds it
      }
    }
    return result;
  }

  static variable_list made(AutogradContext* context, const variable_list& saved,
                            const at::Tensor& factor) {
    const at::Tensor& hidden = saved[kHidden];
    const at::Tensor& weight = saved[kWeight];
    const at::Tensor& targets = saved[kTargets];
    const std::int64_t chunk = context->saved_data["chunk"].toInt();
    const std::int64_t num_tokens = hidden.size(0);
    const at::Tensor scale = factor / num_tokens;  // stays where the loss is
    Gradients gradients(hidden, weight,
                        {context->needs_input_grad(kHidden), context->needs_input_grad(kWeight)},
                        hidden.scalar_type(), num_tokens <= chunk);
    for_each_chunk(num_tokens, chunk, [&](std::int64_t begin, std::int64_t rows) {
      at::Tensor logits = logits_of(hidden.narrow(0, begin, rows), weight);
      const at::Tensor probs = at::softmax(logits, 1, sum_type(hidden));
      gradients.add(std::move(logits), probs, begin, targets.narrow(0, begin, rows), scale);
    });
    variable_list result(kNumArguments);
    result[kHidden] = gradients.hidden();
    if (gradients.weight().defined()) {
      result[kWeight] = gradients.weight().to(weight.scalar_type());
    }
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
  return ChunkedCrossEntropy::apply(hidden, weight, targets, chunk,
                                    makes_gradients_in_forward(hidden));
}

}  // namespace tessera::models
