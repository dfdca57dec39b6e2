// The loss in chunks against the whole one and against its formula in fp64, with bounds that follow
// from the roundings that are made; and what it is for: logits are never whole.
#include "models/gpt_chunked_loss.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/engine/training_run.h"
#include "tests/models/memory_watch.h"

namespace tessera::models {
namespace {

constexpr double kFp32HalfUnit = 0x1p-24;

struct Inputs {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor targets;
};

Inputs make_inputs(std::int64_t tokens, std::int64_t width, std::int64_t vocabulary,
                   at::TensorOptions options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const auto normal = [&](std::int64_t rows, double deviation) {
    const at::Tensor values = at::randn({rows, width}, generator, at::kFloat) * deviation;
    return values.to(options).requires_grad_();
  };
  const at::Tensor hidden = normal(tokens, 1);
  const at::Tensor weight = normal(vocabulary, 1 / std::sqrt(static_cast<double>(width)));
  return {hidden, weight,
          at::randint(0, vocabulary, {tokens}, generator, at::TensorOptions().dtype(at::kLong))
              .to(options.device())};
}

at::Tensor whole_loss(const Inputs& inputs) {
  return at::cross_entropy_loss(at::linear(inputs.hidden, inputs.weight).to(at::kFloat),
                                inputs.targets);
}

at::Tensor chunked_loss(const Inputs& inputs, std::int64_t chunk) {
  return chunked_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, chunk);
}

struct Outcome {
  at::Tensor loss;
  at::Tensor d_hidden;
  at::Tensor d_weight;
};

// Takes gradients away again, so that every run starts alike.
Outcome differentiated(const Inputs& inputs, const at::Tensor& loss, double factor = 1) {
  (loss * factor).backward();
  Outcome outcome{loss.detach(), inputs.hidden.grad(), inputs.weight.grad()};
  inputs.hidden.mutable_grad().reset();
  inputs.weight.mutable_grad().reset();
  return outcome;
}

struct Type {
  at::ScalarType dtype;
  double half_unit;     // in the last place, relative to the value
  double smallest = 0;  // half of the smallest value, where values may come near it
};
// fp32 has no rounding to a lower precision; its own is among the terms of every type.
const std::vector<Type> kTypes = {
    {at::kFloat, 0}, {at::kBFloat16, 0x1p-9}, {at::kHalf, 0x1p-12, 0x1p-25}};

// The exact result, and how far roundings can take a computation from it, element by element. With
// u half a unit of fp32 in the last place and r that of the model's type, where a sum of n products
// is off by at most n * u * (sum of sizes):
//   logits     width * u * |hidden| |weight|^T, and r of the result
//   d_logits   a softmax follows its logits: exp of twice the largest error of the row, less one,
//              and ten operations at u each; then r of the result
//   gradients  what d_logits brings along, and (terms + 1) * u of the sum of sizes: the order of
//              summation, over chunks or inside a product, does not matter to it; then r
// and a hundredth for products of errors.
struct Bounds {
  Outcome exact;
  Outcome error;
};

Bounds bounds_of(const Inputs& inputs, double factor, const Type& type) {
  const at::NoGradGuard no_grad;
  const double u = kFp32HalfUnit;
  const double r = type.half_unit;
  const auto tokens = static_cast<double>(inputs.hidden.size(0));
  const auto vocabulary = static_cast<double>(inputs.weight.size(0));
  const auto width = static_cast<double>(inputs.hidden.size(1));
  const at::Tensor hidden = inputs.hidden.to(at::kDouble);
  const at::Tensor weight = inputs.weight.to(at::kDouble);
  const at::Tensor targets = inputs.targets.unsqueeze(1);
  const double scale = factor / tokens;

  const at::Tensor logits = at::mm(hidden, weight.t());
  const at::Tensor logits_error =
      at::mm(hidden.abs(), weight.abs().t()) * (width * u) + logits.abs() * r;
  const at::Tensor row_error = std::get<0>(logits_error.max(1, /*keepdim=*/true));
  const at::Tensor probs = at::softmax(logits, 1);
  const at::Tensor terms = logits.logsumexp(1, /*keepdim=*/true) - logits.gather(1, targets);
  at::Tensor d_logits = probs * scale;
  d_logits.scatter_(1, targets, d_logits.gather(1, targets) - scale);
  const at::Tensor d_logits_error = probs * (at::expm1(row_error * 2) + 10 * u) * scale +
                                    d_logits.abs() * (r + 2 * u) + type.smallest;

  Bounds bounds;
  bounds.exact.loss = terms.mean();
  bounds.error.loss =
      (row_error * 2 + (logits.abs().amax(1, true) + terms) * 10 * u).mean() + terms.sum() * u;
  const auto product = [&](const at::Tensor& left, const at::Tensor& left_error,
                           const at::Tensor& right, double num_terms, at::Tensor& exact,
                           at::Tensor& error) {
    exact = at::mm(left, right);
    error = at::mm(left_error, right.abs()) +
            at::mm(left.abs(), right.abs()) * ((num_terms + 1) * u) + exact.abs() * r;
    error = (error + type.smallest) * 1.01;
  };
  product(d_logits, d_logits_error, weight, vocabulary, bounds.exact.d_hidden,
          bounds.error.d_hidden);
  product(d_logits.t(), d_logits_error.t(), hidden, tokens, bounds.exact.d_weight,
          bounds.error.d_weight);
  return bounds;
}

void expect_within(const Outcome& found, const Bounds& bounds, const std::string& what) {
  const auto expect = [&](const at::Tensor& value, const at::Tensor& exact, const at::Tensor& error,
                          const char* which) {
    const at::Tensor off = (value.to(at::kDouble) - exact).abs();
    EXPECT_TRUE((off <= error).all().item<bool>())
        << what << ": " << which << ", worst " << (off / error).max().item<double>()
        << " of what is allowed";
    // As a whole, far closer: roundings do not conspire.
    EXPECT_LE(off.norm().item<double>(), 0.5 * error.norm().item<double>()) << what << which;
  };
  expect(found.loss, bounds.exact.loss, bounds.error.loss, "loss");
  expect(found.d_hidden, bounds.exact.d_hidden, bounds.error.d_hidden, "gradient of hidden");
  expect(found.d_weight, bounds.exact.d_weight, bounds.error.d_weight, "gradient of weight");
}

void expect_chunks_within_bounds(at::Device device) {
  for (const Type& each : kTypes) {
    const Inputs inputs =
        make_inputs(37, 24, 51, at::TensorOptions().dtype(each.dtype).device(device));
    for (const double factor : {1.0, 3.7}) {
      const Bounds bounds = bounds_of(inputs, factor, each);
      const std::string type =
          std::string(c10::toString(each.dtype)) + ", factor " + std::to_string(factor);
      expect_within(differentiated(inputs, whole_loss(inputs), factor), bounds, type + ", whole");
      for (const std::int64_t chunk : {1, 2, 7, 12, 36, 37, 1000}) {
        const Outcome found = differentiated(inputs, chunked_loss(inputs, chunk), factor);
        EXPECT_EQ(found.loss.scalar_type(), at::kFloat);
        EXPECT_EQ(found.d_hidden.scalar_type(), each.dtype);
        EXPECT_EQ(found.d_weight.scalar_type(), each.dtype);
        expect_within(found, bounds, type + ", chunks of " + std::to_string(chunk));
      }
    }
  }
}

TEST(ChunkedLoss, IsTheFormulaUpToRoundingForEveryChunkTypeAndFactor) {
  expect_chunks_within_bounds(at::kCPU);
}

TEST(ChunkedLossOnCuda, IsTheFormulaUpToRoundingForEveryChunkTypeAndFactor) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  expect_chunks_within_bounds(at::kCUDA);
}

TEST(ChunkedLoss, InOneChunkHasTheBitsOfTheWholeLoss) {
  for (const Type& each : kTypes) {
    const Inputs inputs = make_inputs(37, 24, 51, at::TensorOptions().dtype(each.dtype));
    for (const std::int64_t chunk : {37, 38, 1000}) {
      EXPECT_TRUE(at::equal(chunked_loss(inputs, chunk), whole_loss(inputs))) << each.dtype;
    }
  }
}

TEST(ChunkedLoss, GradientsScaleWithTheLossToTheBit) {
  const Inputs inputs = make_inputs(19, 8, 11, at::kFloat);
  const Outcome plain = differentiated(inputs, chunked_loss(inputs, 5));
  const Outcome scaled = differentiated(inputs, chunked_loss(inputs, 5), 4096);
  EXPECT_TRUE(at::equal(scaled.d_hidden, plain.d_hidden * 4096));
  EXPECT_TRUE(at::equal(scaled.d_weight, plain.d_weight * 4096));
}

// A weight of zero makes all probabilities 1 / vocabulary; with powers of two and small whole
// numbers every product and sum is exact in fp32, and only the last rounding is left.
void expect_one_rounding(at::Device device) {
  constexpr std::int64_t kTokens = 32;
  constexpr std::int64_t kVocabulary = 64;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(6);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kBFloat16).device(device);
  Inputs inputs = make_inputs(kTokens, 40, kVocabulary, options);
  inputs.hidden = at::randint(-100, 101, {kTokens, 40}, generator, at::TensorOptions())
                      .to(options)
                      .requires_grad_();
  inputs.weight = at::zeros({kVocabulary, 40}, options).requires_grad_();
  at::Tensor d_logits =
      at::full({kTokens, kVocabulary}, 1.0 / kVocabulary, options.dtype(at::kDouble));
  d_logits.scatter_add_(1, inputs.targets.unsqueeze(1),
                        at::full({kTokens, 1}, -1.0, d_logits.options()));
  const at::Tensor exact = at::mm(d_logits.t() / kTokens, inputs.hidden.detach().to(at::kDouble));
  EXPECT_FALSE(at::equal(exact.to(at::kBFloat16).to(at::kDouble), exact)) << "nothing is rounded";
  for (const std::int64_t chunk : {1, 3, 8, 31, 32}) {
    const Outcome found = differentiated(inputs, chunked_loss(inputs, chunk));
    EXPECT_TRUE(at::equal(found.d_weight, exact.to(at::kBFloat16))) << "chunks of " << chunk;
  }
}

TEST(ChunkedLoss, SumsTheWeightsGradientInFp32AndRoundsItOnce) { expect_one_rounding(at::kCPU); }

TEST(ChunkedLossOnCuda, SumsTheWeightsGradientInFp32AndRoundsItOnce) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  expect_one_rounding(at::kCUDA);
}

TEST(ChunkedLoss, MakesOnlyTheGradientsThatAreNeeded) {
  const Inputs inputs = make_inputs(64, 40, 100, at::kFloat);
  constexpr std::int64_t kChunk = 8;
  const Outcome both = differentiated(inputs, chunked_loss(inputs, kChunk));
  for (const bool frozen_weight : {true, false}) {
    inputs.weight.requires_grad_(!frozen_weight);
    inputs.hidden.requires_grad_(frozen_weight);
    const testing::MemoryWatch watch(c10::kCPU);
    const Outcome found = differentiated(inputs, chunked_loss(inputs, kChunk));
    EXPECT_EQ(found.d_weight.defined(), !frozen_weight);
    EXPECT_EQ(found.d_hidden.defined(), frozen_weight);
    if (frozen_weight) {
      EXPECT_TRUE(at::equal(found.d_hidden, both.d_hidden));
      EXPECT_LT(watch.largest(), inputs.weight.numel() * 4) << "memory for the weight's gradient";
    } else {
      EXPECT_TRUE(at::equal(found.d_weight, both.d_weight));
      // Two chunks of logits and one gradient: no room for that of hidden.
      EXPECT_LT(watch.peak(), 2 * kChunk * 100 * 4 + inputs.weight.numel() * 4 + 64 * 40 * 4);
    }
  }
}

TEST(ChunkedLoss, MakesNoGradientsWithoutAskingForThem) {
  const Inputs inputs = make_inputs(64, 40, 100, at::kFloat);
  const at::Tensor expected = chunked_loss(inputs, 8).detach();
  const at::NoGradGuard no_grad;
  const testing::MemoryWatch watch(c10::kCPU);
  const at::Tensor loss = chunked_loss(inputs, 8);
  EXPECT_TRUE(at::equal(loss, expected));
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_LT(watch.peak(), 3 * 8 * 100 * 4) << "more than two chunks of logits";
}

TEST(ChunkedLoss, CanBeDifferentiatedTwiceOver) {
  const Inputs inputs = make_inputs(19, 8, 11, at::kFloat);
  const at::Tensor loss = chunked_loss(inputs, 5);
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = inputs.weight.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(inputs.weight.grad(), once * 2));
}

TEST(ChunkedLoss, NeverHoldsLogitsOfAllTokensAndKeepsNone) {
  constexpr std::int64_t kTokens = 200;
  constexpr std::int64_t kVocabulary = 300;
  constexpr std::int64_t kChunk = 20;
  // Not bf16: some processors multiply it in packed copies of their own. CUDA's test has it.
  for (const at::ScalarType dtype : {at::kFloat}) {
    const Inputs inputs = make_inputs(kTokens, 16, kVocabulary, dtype);
    {
      const testing::MemoryWatch watch(c10::kCPU);
      differentiated(inputs, whole_loss(inputs));
      EXPECT_GE(watch.largest(), kTokens * kVocabulary * 4) << "the watch sees nothing";
    }
    const testing::MemoryWatch watch(c10::kCPU);
    const at::Tensor loss = chunked_loss(inputs, kChunk);
    EXPECT_LT(watch.live(), 4 * (kTokens + kVocabulary) * 16 + 100)
        << "more than the loss and two gradients is kept";
    const Outcome found = differentiated(inputs, loss);
    EXPECT_LE(watch.largest(), std::max(kChunk, std::int64_t{16}) * kVocabulary * 4);
    // The header's sums for fp32, or for low precision, and a tenth for what is small.
    const std::int64_t element = dtype == at::kFloat ? 4 : 2;
    const std::int64_t of_chunk = (element + 4 + (element < 4 ? 4 : 0)) * kChunk * kVocabulary;
    const std::int64_t of_gradients = 4 * (kVocabulary + kTokens) * 16;
    const std::int64_t of_results = element * (kVocabulary + kTokens) * 16;
    EXPECT_LE(watch.peak(), (of_gradients + std::max(of_chunk, of_results)) * 11 / 10) << dtype;
    EXPECT_LT(watch.peak(), kTokens * kVocabulary * element) << dtype;
    EXPECT_TRUE(found.d_weight.defined());
  }
}

TEST(ChunkedLoss, RefusesShapesThatDoNotFit) {
  const Inputs inputs = make_inputs(5, 4, 3, at::kFloat);
  EXPECT_THROW(chunked_loss(inputs, 0), InternalError);
  EXPECT_THROW(chunked_cross_entropy(inputs.hidden, inputs.weight.t(), inputs.targets, 2),
               InternalError);
  EXPECT_THROW(
      chunked_cross_entropy(inputs.hidden, inputs.weight, inputs.targets.narrow(0, 0, 4), 2),
      InternalError);
}

// In training, sharded: the weight's memory is gone between forward and backward.
TEST(ChunkedLossOfAGpt, TrainsShardedAsUnshardedAndInChunksAsWhole) {
  for (const bool with_all : {false, true}) {
    testing::RunSettings settings;
    settings.steps = 4;
    settings.model = gpt_preset("micro");
    settings.model.tie_head = with_all;
    settings.model.recompute = with_all;
    settings.model.freeze = with_all ? 1 : 0;
    settings.ranks = 0;
    const testing::RunOutcome whole = testing::train(settings);
    settings.model.loss_chunk = 50;  // of 192 tokens, or of 96 in each of two ranks
    const testing::RunOutcome unsharded = testing::train(settings);
    const testing::Difference off = testing::difference(unsharded, whole);
    EXPECT_LE(off.largest(), 2e-6) << off.describe();
    EXPECT_FALSE(off.largest() == 0) << "the chunks were not used";
    settings.ranks = 1;
    EXPECT_TRUE(testing::same_bits(testing::train(settings), unsharded)) << with_all;
    settings.ranks = 2;
    const testing::Difference of_two = testing::difference(testing::train(settings), unsharded);
    EXPECT_LE(of_two.largest(), 2e-6) << of_two.describe();
  }
}

}  // namespace
}  // namespace tessera::models
