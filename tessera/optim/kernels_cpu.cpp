#include <algorithm>
#include <cstddef>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/thread_team.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {
namespace {

// What a thread takes at a time: a few microseconds of work, and a multiple of kNormBlock.
constexpr std::int64_t kChunkNumel = 16 * kNormBlock;

std::int64_t ceil_div(std::int64_t numel, std::int64_t part) { return (numel + part - 1) / part; }

// Adds `sum` of every block, in order.
template <typename Sum>
double sum_blocks(std::int64_t num_blocks, const Sum& sum) {
  double total = 0;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    total += sum(block);
  }
  return total;
}

double sum_of_block(const float* values, std::int64_t numel, std::int64_t block) {
  const std::int64_t begin = block * kNormBlock;
  return best_loops().block_sum_of_squares(values + begin, std::min(kNormBlock, numel - begin));
}

class CpuKernels final : public Kernels {
 public:
  explicit CpuKernels(int num_threads) : team_(num_threads) {}

  device::Pending start_update(const RuleOptions& rule, const UpdateScalars& scalars,
                               const UpdateSpan& span, device::Stream& stream) override {
    check_update(rule, scalars, span);
    const ElementRule element = element_rule(rule);
    const ElementScalars rounded = element_scalars(rule, scalars);
    return stream.enqueue([this, element, rounded, span] {
      for_chunks(span.numel, [&](std::int64_t begin, std::int64_t end) {
        best_loops().update(element, rounded, span, begin, end);
      });
    });
  }

  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of squares of ", numel, " elements");
    return stream.enqueue([this, values, numel, result] {
      const std::int64_t num_blocks = ceil_div(numel, kNormBlock);
      std::vector<double> sums(static_cast<std::size_t>(num_blocks));
      for_chunks(numel, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t block = begin / kNormBlock; block * kNormBlock < end; ++block) {
          sums[static_cast<std::size_t>(block)] = sum_of_block(values, numel, block);
        }
      });
      *result = sum_blocks(
          num_blocks, [&](std::int64_t block) { return sums[static_cast<std::size_t>(block)]; });
    });
  }

  device::Pending start_add(float* values, const float* addend, std::int64_t numel,
                            device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of ", numel, " elements");
    return stream.enqueue([this, values, addend, numel] {
      for_chunks(numel, [&](std::int64_t begin, std::int64_t end) {
        best_loops().add(values + begin, addend + begin, end - begin);
      });
    });
  }

  device::Pending start_widen(float* to, const void* from, DType dtype, std::int64_t numel,
                              device::Stream& stream) override {
    TESSERA_INVARIANT(dtype == DType::kBFloat16 || dtype == DType::kFloat16, "widening of ",
                      to_string(dtype), "; bf16 and fp16 are known");
    const auto* halves = static_cast<const std::byte*>(from);
    return stream.enqueue([this, to, halves, dtype, numel] {
      for_chunks(numel, [&](std::int64_t begin, std::int64_t end) {
        best_loops().widen(to + begin, halves + begin * static_cast<std::int64_t>(bytes_of(dtype)),
                           dtype, end - begin);
      });
    });
  }

 private:
  template <typename Body>
  void for_chunks(std::int64_t numel, const Body& body) {
    team_.run(ceil_div(numel, kChunkNumel), [&](std::int64_t chunk) {
      const std::int64_t begin = chunk * kChunkNumel;
      body(begin, std::min(begin + kChunkNumel, numel));
    });
  }

  ThreadTeam team_;
};

}  // namespace

double sum_of_squares(const float* values, std::int64_t numel) {
  return sum_blocks(ceil_div(numel, kNormBlock),
                    [&](std::int64_t block) { return sum_of_block(values, numel, block); });
}

std::unique_ptr<Kernels> make_cpu_kernels(int num_threads) {
  return std::make_unique<CpuKernels>(num_threads);
}

}  // namespace tessera::optim
