// The update of optimizer states beside a plain copy: how far it is from the speed of memory. Bytes
// per second count what is read and written. `unfused` is AdamW as operators over whole tensors,
// the way torch::optim::AdamW runs it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include "tessera/device/device_cpu.h"
#include "tessera/optim/kernels.h"

namespace tessera::optim {
namespace {

// Six times 64 MiB and more do not stay in a cache that others use, too.
constexpr std::int64_t kNumel = std::int64_t{16} << 20;

void plain_copy(benchmark::State& state) {
  const std::vector<float> from(kNumel, 1.0F);
  std::vector<float> to(kNumel, 2.0F);
  for ([[maybe_unused]] auto _ : state) {
    std::memcpy(to.data(), from.data(), kNumel * sizeof(float));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * kNumel * 8);
}
BENCHMARK(plain_copy)->UseRealTime();

struct Shape {
  RuleKind kind = RuleKind::kAdamW;
  double momentum = 0;
  DType gradient = DType::kFloat32;
  DType parameter = DType::kFloat32;  // fp32: none
};

void fused(benchmark::State& state, const Shape& shape) {
  RuleOptions rule;
  rule.kind = shape.kind;
  rule.momentum = shape.momentum;
  const bool has_parameter = shape.parameter != DType::kFloat32;
  std::vector<float> master(kNumel, 0.02F);
  const std::vector<std::byte> gradient(kNumel * bytes_of(shape.gradient), std::byte{0x11});
  std::vector<std::vector<float>> states(kMaxStates, std::vector<float>(kNumel, 1e-6F));
  std::vector<std::uint16_t> parameter(has_parameter ? kNumel : 0);
  UpdateSpan span;
  span.master = master.data();
  span.gradient = gradient.data();
  span.gradient_dtype = shape.gradient;
  span.states = {states[0].data(), states[1].data()};
  span.parameter = has_parameter ? parameter.data() : nullptr;
  span.parameter_dtype = shape.parameter;
  span.numel = kNumel;
  const auto device = device::make_cpu_device();
  const auto kernels = make_cpu_kernels(static_cast<int>(state.range(0)));
  UpdateScalars scalars;
  scalars.lr = 1e-3;
  scalars.step = 2;
  for ([[maybe_unused]] auto _ : state) {
    kernels->start_update(rule, scalars, span, device->stream(device::StreamKind::kCompute)).wait();
    benchmark::ClobberMemory();
  }
  const std::size_t bytes = 8 + bytes_of(shape.gradient) + 8 * state_names(rule).size() +
                            (has_parameter ? bytes_of(shape.parameter) : 0);
  state.SetBytesProcessed(state.iterations() * kNumel * static_cast<std::int64_t>(bytes));
}

constexpr DType kFp32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp16 = DType::kFloat16;
void threads(benchmark::internal::Benchmark* bench) {
  bench->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();
}
BENCHMARK_CAPTURE(fused, adamw_fp32, Shape{RuleKind::kAdamW, 0, kFp32, kFp32})->Apply(threads);
BENCHMARK_CAPTURE(fused, adamw_bf16, Shape{RuleKind::kAdamW, 0, kBf16, kBf16})->Apply(threads);
BENCHMARK_CAPTURE(fused, adamw_fp16, Shape{RuleKind::kAdamW, 0, kFp32, kFp16})->Apply(threads);
BENCHMARK_CAPTURE(fused, adam, Shape{RuleKind::kAdam, 0, kFp32, kFp32})->Apply(threads);
BENCHMARK_CAPTURE(fused, momentum, Shape{RuleKind::kSgd, 0.9, kFp32, kFp32})->Apply(threads);
BENCHMARK_CAPTURE(fused, lion, Shape{RuleKind::kLion, 0, kFp32, kFp32})->Apply(threads);

// Bytes per second as if it were fused: 28 B per element, so that the numbers compare.
void unfused(benchmark::State& state) {
  std::vector<float> weight(kNumel, 0.02F), exp_avg(kNumel), exp_avg_sq(kNumel), root(kNumel);
  const std::vector<float> gradient(kNumel, 1e-3F);
  const auto over = [](std::vector<float>& out, const auto& body) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = body(i);
    }
    benchmark::ClobberMemory();
  };
  for ([[maybe_unused]] auto _ : state) {
    over(weight, [&](std::size_t i) { return weight[i] * 0.99999F; });
    over(exp_avg, [&](std::size_t i) { return exp_avg[i] * 0.9F; });
    over(exp_avg, [&](std::size_t i) { return exp_avg[i] + 0.1F * gradient[i]; });
    over(exp_avg_sq, [&](std::size_t i) { return exp_avg_sq[i] * 0.999F; });
    over(exp_avg_sq,
         [&](std::size_t i) { return exp_avg_sq[i] + 0.001F * gradient[i] * gradient[i]; });
    std::vector<float> denominator(kNumel);  // a fresh tensor each time, as an operator makes it
    over(root, [&](std::size_t i) { return std::sqrt(exp_avg_sq[i]); });
    over(denominator, [&](std::size_t i) { return root[i] / 0.0316F; });
    over(denominator, [&](std::size_t i) { return denominator[i] + 1e-8F; });
    over(weight, [&](std::size_t i) { return weight[i] - 1e-3F * exp_avg[i] / denominator[i]; });
  }
  state.SetBytesProcessed(state.iterations() * kNumel * 28);
}
BENCHMARK(unfused)->UseRealTime();

void squares(benchmark::State& state) {
  const std::vector<float> values(kNumel, 1e-3F);
  for ([[maybe_unused]] auto _ : state) {
    benchmark::DoNotOptimize(sum_of_squares(values.data(), kNumel));
  }
  state.SetBytesProcessed(state.iterations() * kNumel * 4);
}
BENCHMARK(squares)->UseRealTime();

}  // namespace
}  // namespace tessera::optim
