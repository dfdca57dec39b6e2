// The update of optimizer states beside a plain copy: how far it is from the speed of memory. Bytes
// per second count what is read and written: 28 an element for AdamW with a bf16 gradient and
// parameter. `unfused` is AdamW as operators over whole tensors, the way torch::optim::AdamW runs
// it.
//
// `--update_threads=N` and `--update_elements=N` take the place of the numbers of threads and
// elements below; all else goes to the benchmark library.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "tessera/device/device_cpu.h"
#include "tessera/optim/core_binding.h"
#include "tessera/optim/kernels.h"

namespace tessera::optim {
namespace {

// 448 MiB for AdamW: more than a cache holds that others use, too.
std::int64_t g_numel = std::int64_t{16} << 20;

void set_bytes(benchmark::State& state, std::int64_t bytes_per_element) {
  const std::int64_t bytes = state.iterations() * g_numel * bytes_per_element;
  state.SetBytesProcessed(bytes);
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(bytes) * 1e-9, benchmark::Counter::kIsRate);
}

void plain_copy(benchmark::State& state) {
  const std::vector<float> from(g_numel, 1.0F);
  std::vector<float> to(g_numel, 2.0F);
  for ([[maybe_unused]] auto _ : state) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(g_numel) * sizeof(float));
    benchmark::ClobberMemory();
  }
  set_bytes(state, 8);
}

struct Shape {
  RuleKind kind = RuleKind::kAdamW;
  double momentum = 0;
  DType gradient = DType::kFloat32;
  DType parameter = DType::kFloat32;  // fp32: none
  bool is_bound = false;              // threads to cores
};

void fused(benchmark::State& state, const Shape& shape) {
  RuleOptions rule;
  rule.kind = shape.kind;
  rule.momentum = shape.momentum;
  const bool has_parameter = shape.parameter != DType::kFloat32;
  std::vector<float> master(g_numel, 0.02F);
  const std::vector<std::byte> gradient(
      static_cast<std::size_t>(g_numel) * bytes_of(shape.gradient), std::byte{0x11});
  std::vector<std::vector<float>> states(kMaxStates, std::vector<float>(g_numel, 1e-6F));
  std::vector<std::uint16_t> parameter(has_parameter ? static_cast<std::size_t>(g_numel) : 0);
  UpdateSpan span;
  span.master = master.data();
  span.gradient = gradient.data();
  span.gradient_dtype = shape.gradient;
  span.states = {states[0].data(), states[1].data()};
  span.parameter = has_parameter ? parameter.data() : nullptr;
  span.parameter_dtype = shape.parameter;
  span.numel = g_numel;
  const auto device = device::make_cpu_device();
  const int num_threads = static_cast<int>(state.range(0));
  const std::vector<int> cores =
      shape.is_bound ? cores_for_threads(num_threads) : std::vector<int>{};
  if (shape.is_bound && cores.empty()) {
    state.SkipWithError("fewer cores than threads");
    return;
  }
  const auto kernels = make_cpu_kernels(num_threads, cores);
  UpdateScalars scalars;
  scalars.lr = 1e-3;
  scalars.step = 2;
  for ([[maybe_unused]] auto _ : state) {
    kernels->start_update(rule, scalars, span, device->stream(device::StreamKind::kCompute)).wait();
    benchmark::ClobberMemory();
  }
  const std::size_t bytes = 8 + bytes_of(shape.gradient) + 8 * state_names(rule).size() +
                            (has_parameter ? bytes_of(shape.parameter) : 0);
  set_bytes(state, static_cast<std::int64_t>(bytes));
}

constexpr DType kFp32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp16 = DType::kFloat16;
// Bytes per second as if it were fused: 28 B per element, so that the numbers compare.
void unfused(benchmark::State& state) {
  std::vector<float> weight(g_numel, 0.02F), exp_avg(g_numel), exp_avg_sq(g_numel), root(g_numel);
  const std::vector<float> gradient(g_numel, 1e-3F);
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
    std::vector<float> denominator(g_numel);  // a fresh tensor each time, as an operator makes it
    over(root, [&](std::size_t i) { return std::sqrt(exp_avg_sq[i]); });
    over(denominator, [&](std::size_t i) { return root[i] / 0.0316F; });
    over(denominator, [&](std::size_t i) { return denominator[i] + 1e-8F; });
    over(weight, [&](std::size_t i) { return weight[i] - 1e-3F * exp_avg[i] / denominator[i]; });
  }
  set_bytes(state, 28);
}

void squares(benchmark::State& state) {
  const std::vector<float> values(g_numel, 1e-3F);
  for ([[maybe_unused]] auto _ : state) {
    benchmark::DoNotOptimize(sum_of_squares(values.data(), g_numel));
  }
  set_bytes(state, 4);
}

void register_all(const std::vector<int>& threads) {
  benchmark::RegisterBenchmark("plain_copy", plain_copy)->UseRealTime();
  constexpr struct {
    const char* name;
    Shape shape;
  } kFused[] = {{"adamw_fp32", {RuleKind::kAdamW, 0, kFp32, kFp32}},
                {"adamw_bf16", {RuleKind::kAdamW, 0, kBf16, kBf16}},
                {"adamw_bf16_bound", {RuleKind::kAdamW, 0, kBf16, kBf16, true}},
                {"adamw_fp16", {RuleKind::kAdamW, 0, kFp32, kFp16}},
                {"adam", {RuleKind::kAdam, 0, kFp32, kFp32}},
                {"momentum", {RuleKind::kSgd, 0.9, kFp32, kFp32}},
                {"lion", {RuleKind::kLion, 0, kFp32, kFp32}}};
  for (const auto& fused_case : kFused) {
    auto* bench = benchmark::RegisterBenchmark(fused_case.name, fused, fused_case.shape);
    bench->ArgName("threads")->UseRealTime();
    for (const int num_threads : threads) {
      bench->Arg(num_threads);
    }
  }
  benchmark::RegisterBenchmark("unfused", unfused)->UseRealTime();
  benchmark::RegisterBenchmark("squares", squares)->UseRealTime();
}

// The number behind `flag`, if `argument` is that flag.
std::optional<std::int64_t> number_of(std::string_view argument, std::string_view flag) {
  if (!argument.starts_with(flag)) {
    return std::nullopt;
  }
  const std::string_view text = argument.substr(flag.size());
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : 0;
}

int run(int argc, char** argv) {
  std::vector<int> threads = {1, 2};
  const auto num_cpus = static_cast<int>(std::thread::hardware_concurrency());
  if (num_cpus > 2) {
    threads.push_back(num_cpus);
  }
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    const auto num_threads = number_of(argv[i], "--update_threads=");
    const auto numel = number_of(argv[i], "--update_elements=");
    if (num_threads.value_or(1) < 1 || numel.value_or(1) < 1) {
      std::fprintf(stderr, "%s: a number of at least 1 is needed\n", argv[i]);
      return 2;
    }
    if (num_threads) {
      threads = {static_cast<int>(*num_threads)};
    } else if (numel) {
      g_numel = *numel;
    } else {
      rest.push_back(argv[i]);
    }
  }
  int num_rest = static_cast<int>(rest.size());
  rest.push_back(nullptr);
  benchmark::Initialize(&num_rest, rest.data());
  if (benchmark::ReportUnrecognizedArguments(num_rest, rest.data())) {
    return 2;
  }
  register_all(threads);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace tessera::optim

int main(int argc, char** argv) { return tessera::optim::run(argc, argv); }
