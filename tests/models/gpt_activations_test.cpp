// The memory of activations in closed form against what training takes from torch's allocator.
//
// Parameters' gradients are left out by their sizes: the shapes are such that no activation is as
// large as a parameter. What is left over is what gpt_activations.h says that it does not count.
#include "models/gpt_activations.h"

#include <functional>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "models/gpt.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/models/memory_watch.h"

namespace tessera::models {
namespace {

struct Measured {
  std::int64_t kept = 0;
  std::int64_t peak = 0;
};

// `granule`: to which the allocator rounds sizes up.
Measured measure(const GptOptions& options, std::int64_t batch, at::Device device,
                 std::int64_t granule) {
  Gpt gpt(options, device, /*seed=*/7);
  const auto step = [&](const std::function<void()>& after_forward) {
    const at::TensorOptions ids = at::TensorOptions().dtype(at::kLong).device(device);
    const at::Tensor inputs = at::randint(0, options.vocabulary, {batch, options.sequence}, ids);
    const at::Tensor targets = at::randint(0, options.vocabulary, {batch, options.sequence}, ids);
    const at::Tensor loss = gpt.loss(inputs, targets);
    after_forward();
    loss.backward();
    for (const NamedParam& param : gpt.params()) {
      param.tensor.mutable_grad().reset();
    }
  };
  if (!device.is_cpu()) {
    step([] {});  // libraries take their workspace at the first use
  }
  std::set<std::int64_t> ignored;
  for (const NamedParam& param : gpt.params()) {
    const auto bytes = static_cast<std::int64_t>(param.tensor.nbytes());
    ignored.insert((bytes + granule - 1) / granule * granule);
  }
  // Of the random generator, for recomputation.
  ignored.insert(
      static_cast<std::int64_t>(at::detail::getDefaultCPUGenerator().get_state().nbytes()));
  const testing::MemoryWatch watch(device.type(), ignored);
  Measured measured;
  step([&] { measured.kept = watch.live(); });
  measured.peak = watch.peak();
  return measured;
}

void expect_near(std::int64_t found, std::int64_t expected, double tolerance, const char* what) {
  EXPECT_NEAR(static_cast<double>(found) / static_cast<double>(expected), 1, tolerance)
      << what << ": measured " << found << ", predicted " << expected;
}

GptOptions odd_options() {
  GptOptions options;
  options.width = 48;
  options.layers = 3;
  options.heads = 3;
  options.vocabulary = 517;
  options.sequence = 40;
  return options;
}

void add_adapters(GptOptions& options) {
  options.adapter_rank = 10;
  options.adapter_alpha = 20;
  options.freeze_base = true;
}

struct Case {
  const char* name;
  void (*change)(GptOptions&);
};

const std::vector<Case> kCases = {
    {"plain", [](GptOptions&) {}},
    {"narrow head", [](GptOptions& options) { options.vocabulary = 23; }},
    {"recomputed", [](GptOptions& options) { options.recompute = true; }},
    {"recomputed, narrow head",
     [](GptOptions& options) {
       options.recompute = true;
       options.vocabulary = 23;
     }},
    {"in chunks", [](GptOptions& options) { options.loss_chunk = 32; }},
    {"in one chunk", [](GptOptions& options) { options.loss_chunk = 1000; }},
    {"recomputed, in chunks",
     [](GptOptions& options) {
       options.recompute = true;
       options.loss_chunk = 7;
     }},
    {"frozen",
     [](GptOptions& options) {
       options.freeze = 2;
       options.vocabulary = 23;
     }},
    {"all frozen",
     [](GptOptions& options) {
       options.freeze = 3;
       options.vocabulary = 23;
     }},
    {"frozen, recomputed",
     [](GptOptions& options) {
       options.freeze = 3;
       options.recompute = true;
       options.vocabulary = 23;
     }},
    {"tied", [](GptOptions& options) { options.tie_head = true; }},
    {"adapters", [](GptOptions& options) { add_adapters(options); }},
    {"adapters, narrow head",
     [](GptOptions& options) {
       add_adapters(options);
       options.vocabulary = 23;
     }},
    {"adapters, trained base",
     [](GptOptions& options) {
       add_adapters(options);
       options.freeze_base = false;
       options.vocabulary = 23;
     }},
    {"adapters of the last blocks",
     [](GptOptions& options) {
       add_adapters(options);
       options.freeze = 1;
       options.vocabulary = 23;
     }},
    {"adapters, recomputed",
     [](GptOptions& options) {
       add_adapters(options);
       options.recompute = true;
       options.freeze = 1;
       options.vocabulary = 23;
     }},
    {"adapters, in chunks",
     [](GptOptions& options) {
       add_adapters(options);
       options.loss_chunk = 32;
     }},
};

void expect_as_predicted(const Case& each, double tolerance) {
  GptOptions options = odd_options();
  each.change(options);
  const GptActivations predicted = gpt_activations(options, 3);
  const Measured measured = measure(options, 3, at::kCPU, 1);
  expect_near(measured.kept, predicted.kept, tolerance, each.name);
  expect_near(measured.peak, predicted.peak, tolerance, each.name);
}

TEST(GptActivations, AreWhatTrainingTakes) {
  // In fp32: processors compute other types in copies of their own. CUDA's test has bf16.
  // What is over: the loss and its gradient, and a few numbers per token inside operators.
  for (const Case& each : kCases) {
    expect_as_predicted(each, 0.02);
  }
}

TEST(GptActivationsOnCuda, AreWhatTrainingTakes) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  constexpr double kTolerance = 0.05;
  constexpr std::int64_t kGranule = 512;
  constexpr std::int64_t kBatch = 5;  // with 3, a row of activations would be as large as a weight
  for (const bool recompute : {false, true}) {
    for (const std::int64_t chunk : {0, 512}) {
      GptOptions options = gpt_preset("gpt2-124m");
      options.layers = 4;
      options.dtype = DType::kBFloat16;
      options.recompute = recompute;
      options.loss_chunk = chunk;
      const GptActivations predicted = gpt_activations(options, kBatch);
      const Measured measured = measure(options, kBatch, at::kCUDA, kGranule);
      expect_near(measured.kept, predicted.kept, kTolerance, "kept");
      expect_near(measured.peak, predicted.peak, kTolerance, "peak");
    }
  }
}

TEST(GptActivations, HaveTheClosedForm) {
  GptOptions options = gpt_preset("gpt-1b4");
  options.dtype = DType::kBFloat16;
  const std::int64_t tokens = 8 * 1024;
  const std::int64_t row = tokens * 2048 * 2;
  const GptActivations whole = gpt_activations(options, 8);
  EXPECT_EQ(whole.per_block, 16 * row + (4 + 16) * 4 * tokens);
  EXPECT_EQ(whole.embedding, row + 8 * tokens + 8 * 1024);
  EXPECT_EQ(whole.head, row + 2 * 4 * tokens + 8 * tokens + 12 * tokens * 50304);
  EXPECT_EQ(whole.kept,
            whole.embedding + 24 * whole.per_block + row + 16 * tokens + 4 * tokens * 50304);
  EXPECT_EQ(whole.peak, whole.embedding + 24 * whole.per_block + whole.head);

  options.loss_chunk = 1024;
  const GptActivations chunked = gpt_activations(options, 8);
  EXPECT_EQ(chunked.per_block, whole.per_block);
  const std::int64_t weight_sum = 4 * std::int64_t{50304} * 2048;
  EXPECT_EQ(chunked.head, 3 * row + 16 * tokens + 10 * 1024 * std::int64_t{50304} + weight_sum);
  EXPECT_EQ(chunked.kept, whole.kept - 4 * tokens * 50304 + row + weight_sum);

  // Made in backward.
  options.dtype = DType::kFloat16;
  const GptActivations late = gpt_activations(options, 8);
  EXPECT_EQ(late.head, chunked.head - row);
  EXPECT_EQ(late.kept, whole.kept - 4 * tokens * 50304);
  options.dtype = DType::kBFloat16;

  options.recompute = true;
  const GptActivations least = gpt_activations(options, 8);
  EXPECT_EQ(least.kept, least.embedding + 24 * row + 2 * row + 16 * tokens + weight_sum);
  EXPECT_EQ(least.peak, std::max(least.embedding + 24 * row + least.head,
                                 least.embedding + (23 + 5) * row + least.per_block));
}

TEST(GptActivations, HaveRoomForGradientsThatComeAsTheyGo) {
  const GptOptions options = gpt_preset("gpt-1b4");
  const GptActivations alone = gpt_activations(options, 8);
  const std::int64_t row = std::int64_t{8} * 1024 * 2048 * 4;
  const auto peak_with = [&](std::int64_t of_block, std::int64_t of_others, std::int64_t passing) {
    GptGradients gradients;
    gradients.kept_of_unit.assign(26, of_block);
    gradients.kept_of_unit.front() = gradients.kept_of_unit.back() = of_others;
    gradients.passing = passing;
    return gpt_peak_with(gradients, options, 8);
  };
  EXPECT_EQ(peak_with(0, 0, 0), alone.peak);
  // Less than what a block's backward frees, and than the logits: there is room for them.
  EXPECT_EQ(peak_with(alone.per_block / 2, 0, row), alone.peak);
  // More: in the first block's backward, four rows of its own, those of all but the embedding.
  EXPECT_EQ(peak_with(2 * alone.per_block, row, 5 * row),
            alone.embedding + alone.per_block + 4 * row + 48 * alone.per_block + row + 5 * row);
  // The head's are there from the last block's on; the embedding's come last.
  EXPECT_EQ(peak_with(0, row, 0),
            std::max(alone.peak, alone.embedding + 24 * alone.per_block + 4 * row + row));
  const std::int64_t much = 100 * alone.per_block;
  EXPECT_EQ(peak_with(0, much, 0), alone.embedding + 2 * much);
}

TEST(GptActivations, RefuseWhatHasNoSize) {
  const auto message = [](std::int64_t batch, std::int64_t sequence) {
    GptOptions options = gpt_preset("micro");
    options.sequence = sequence;
    try {
      gpt_activations(options, batch);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("no ConfigError");
  };
  EXPECT_EQ(message(0, 16), "activations of 0 sequences; a micro-batch has at least one");
  EXPECT_EQ(message(1, 0), "--seq 0 is not from 1 to 2147483648");
  EXPECT_EQ(message(std::int64_t{1} << 40, std::int64_t{1} << 24),
            "activations of 1099511627776 sequences of 16777216 tokens in 2 blocks are beyond any "
            "memory; give a smaller --batch or --seq");
  EXPECT_EQ(message(1, std::int64_t{1} << 31), "no ConfigError");
}

}  // namespace
}  // namespace tessera::models
