// The sum in rank order, per type and number of ranks: what the exact reduction costs beside the
// network. Bytes per second count what is read.
#include <vector>

#include <benchmark/benchmark.h>

#include "tessera/comm/exact_sum.h"

namespace tessera::comm {
namespace {

void sum_in_rank_order(benchmark::State& state, DType dtype, DType out_dtype) {
  const int num_parts = static_cast<int>(state.range(0));
  const auto numel = static_cast<std::size_t>(state.range(1));
  // Zeros are numbers of every type.
  const std::vector<std::byte> parts(numel * num_parts * bytes_of(dtype));
  std::vector<std::byte> out(numel * bytes_of(out_dtype));
  const RankParts rank_parts{parts.data(), dtype, num_parts, numel};
  for ([[maybe_unused]] auto _ : state) {
    reduce_in_rank_order(rank_parts, out.data(), out_dtype, Reduction::kSum);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(parts.size()) * state.iterations());
}

// From caches to memory; 2 ranks and many.
void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"ranks", "numel"})
      ->Args({2, 4096})
      ->Args({2, 4 << 20})
      ->Args({8, 4096})
      ->Args({8, 1 << 20});
}

BENCHMARK_CAPTURE(sum_in_rank_order, fp32, DType::kFloat32, DType::kFloat32)->Apply(sizes);
BENCHMARK_CAPTURE(sum_in_rank_order, bf16_to_fp32, DType::kBFloat16, DType::kFloat32)->Apply(sizes);
BENCHMARK_CAPTURE(sum_in_rank_order, bf16, DType::kBFloat16, DType::kBFloat16)->Apply(sizes);
BENCHMARK_CAPTURE(sum_in_rank_order, fp16, DType::kFloat16, DType::kFloat16)->Apply(sizes);

}  // namespace
}  // namespace tessera::comm
