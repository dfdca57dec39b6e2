#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/optim/content_hash.cuh"
#include "tessera/optim/kernels.h"
#include "tessera/optim/step_rules.cuh"
#include "tessera/optim/thread_team.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {
namespace {

// What a thread takes at a time, a multiple of kNormBlock. Long enough that the CPU's
// prefetchers pay, and short enough that all threads end together.
constexpr std::int64_t kMaxChunkNumel = 16 * kNormBlock;
constexpr std::int64_t kMinChunkNumel = 2 * kNormBlock;
constexpr std::int64_t kChunksPerThread = 8;

std::int64_t ceil_div(std::int64_t numel, std::int64_t part) { return (numel + part - 1) / part; }

std::int64_t numel_of(const NormSpan& span) { return span.numel; }

const void* advanced(const void* values, DType dtype, std::int64_t numel) {
  return static_cast<const std::byte*>(values) + numel * static_cast<std::int64_t>(bytes_of(dtype));
}

// Elements [begin, begin + numel) of several tensors, at most a block; the sums stay in the first
// cache.
using BlockSums = std::array<float, kNormBlock>;
class MicroBatches {
 public:
  MicroBatches(const void* first, const void* low, std::span<const void* const> later, DType dtype)
      : dtype_(dtype), is_joined_(low != nullptr) {
    all_.reserve(later.size() + 2);
    all_.push_back(first);
    if (is_joined_) {
      all_.push_back(low);
    }
    all_.insert(all_.end(), later.begin(), later.end());
    at_.resize(all_.size());
  }
  bool is_one() const { return all_.size() == 1; }
  void add_up(BlockSums& sums, std::int64_t begin, std::int64_t numel) {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      at_[i] = advanced(all_[i], dtype_, begin);
    }
    best_loops().sum(sums.data(), at_, dtype_, is_joined_, numel);
  }
  // Into the memory of what was added up last.
  void put(const BlockSums& sums, std::int64_t numel) const {
    const auto place = [this](std::size_t i) { return const_cast<void*>(at_[i]); };
    if (dtype_ == DType::kFloat32) {
      std::memcpy(place(0), sums.data(), static_cast<std::size_t>(numel) * sizeof(float));
    } else {
      best_loops().split(place(0), place(1), sums.data(), numel);
    }
  }

 private:
  const DType dtype_;
  const bool is_joined_;
  std::vector<const void*> all_;
  std::vector<const void*> at_;
};

MicroBatches micro_batches_of(const NormSpan& span) {
  return {span.values, span.low, span.later, span.dtype};
}

double sum_of_block(const NormSpan& span, std::int64_t block) {
  const std::int64_t begin = block * kNormBlock;
  const std::int64_t numel = std::min(kNormBlock, span.numel - begin);
  if (span.low == nullptr && span.later.empty()) {
    return best_loops().any_block_sum_of_squares(advanced(span.values, span.dtype, begin),
                                                 span.dtype, numel);
  }
  BlockSums sums;
  micro_batches_of(span).add_up(sums, begin, numel);
  return best_loops().block_sum_of_squares(sums.data(), numel);
}

void update_range(ElementRule element, const ElementScalars& scalars, const UpdateSpan& span,
                  std::int64_t begin, std::int64_t end) {
  MicroBatches micro_batches(span.gradient, span.low, span.later, span.gradient_dtype);
  if (micro_batches.is_one()) {
    best_loops().update(element, scalars, span, begin, end);
    return;
  }
  BlockSums sums;
  for (; begin < end; begin += kNormBlock) {
    const std::int64_t numel = std::min(kNormBlock, end - begin);
    micro_batches.add_up(sums, begin, numel);
    UpdateSpan block = span;
    block.gradient = sums.data();
    block.gradient_dtype = DType::kFloat32;
    block.master += begin;
    for (float*& state : block.states) {
      state = state == nullptr ? nullptr : state + begin;
    }
    if (block.parameter != nullptr) {
      block.parameter = static_cast<std::byte*>(block.parameter) +
                        begin * static_cast<std::int64_t>(bytes_of(block.parameter_dtype));
    }
    best_loops().update(element, scalars, block, 0, numel);
  }
}

// Spans side by side, cut into chunks that threads take.
class ChunkMap {
 public:
  // All spans use the same size of chunk, by what they have together.
  template <typename Spans>
  ChunkMap(const Spans& spans, int num_threads) {
    std::int64_t total = 0;
    for (const auto& span : spans) {
      total += numel_of(span);
    }
    const std::int64_t even = ceil_div(total, num_threads * kChunksPerThread);
    chunk_numel_ =
        ceil_div(std::clamp(even, kMinChunkNumel, kMaxChunkNumel), kNormBlock) * kNormBlock;
    for (const auto& span : spans) {
      first_chunks_.push_back(num_chunks_);
      num_chunks_ += ceil_div(numel_of(span), chunk_numel_);
    }
  }

  std::int64_t num_chunks() const { return num_chunks_; }

  struct Chunk {
    std::size_t span = 0;
    std::int64_t begin = 0;  // in elements; the end may lie behind the span's
    std::int64_t end = 0;
  };
  Chunk at(std::int64_t number) const {
    // The last span that begins here or before: those without elements begin where the next does.
    const auto next = std::upper_bound(first_chunks_.begin(), first_chunks_.end(), number);
    const auto span = static_cast<std::size_t>(next - first_chunks_.begin()) - 1;
    const std::int64_t begin = (number - first_chunks_[span]) * chunk_numel_;
    return {span, begin, begin + chunk_numel_};
  }

 private:
  std::vector<std::int64_t> first_chunks_;
  std::int64_t chunk_numel_ = 0;
  std::int64_t num_chunks_ = 0;
};

struct RoundedTask {
  ElementScalars scalars;
  UpdateSpan span;
  const StepOnDevice* step = nullptr;
};
std::int64_t numel_of(const RoundedTask& task) { return task.span.numel; }

// Elements without a type of their own.
struct Range {
  std::int64_t numel = 0;
};
std::int64_t numel_of(const Range& range) { return range.numel; }

class CpuKernels final : public Kernels {
 public:
  CpuKernels(int num_threads, const std::vector<int>& cores)
      : num_threads_(num_threads), team_(num_threads, cores) {}

  using Kernels::start_add;

  device::Pending start_updates(const RuleOptions& rule, std::span<const UpdateTask> tasks,
                                device::Stream& stream) override {
    std::vector<RoundedTask> rounded;
    rounded.reserve(tasks.size());
    for (const UpdateTask& task : tasks) {
      check_update(rule, task.scalars, task.span);
      rounded.push_back({element_scalars(rule, task.scalars), task.span, task.scalars.on_device});
    }
    return stream.enqueue(
        [this, element = element_rule(rule), rounded = std::move(rounded)]() mutable {
          for (RoundedTask& task : rounded) {
            if (!take_factor(task.step, task.scalars)) {
              task.span.numel = 0;
            }
          }
          for_chunks(rounded, [&](const RoundedTask& task, std::int64_t begin, std::int64_t end) {
            update_range(element, task.scalars, task.span, begin, end);
          });
        });
  }

  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    const NormSpan span{values, DType::kFloat32, numel};
    return start_sums_of_squares({&span, 1}, result, stream);
  }

  device::Pending start_sums_of_squares(std::span<const NormSpan> spans, double* results,
                                        device::Stream& stream) override {
    for (const NormSpan& span : spans) {
      TESSERA_INVARIANT(span.numel >= 0, "sum of squares of ", span.numel, " elements");
      check_element_type("sum of squares", span.dtype);
    }
    return stream.enqueue([this, list = std::vector(spans.begin(), spans.end()), results] {
      std::vector<std::vector<double>> sums;
      sums.reserve(list.size());
      for (const NormSpan& span : list) {
        sums.emplace_back(static_cast<std::size_t>(ceil_div(span.numel, kNormBlock)));
      }
      for_chunks(list, [&](const NormSpan& span, std::int64_t begin, std::int64_t end) {
        std::vector<double>& of_span = sums[static_cast<std::size_t>(&span - list.data())];
        for (std::int64_t block = begin / kNormBlock; block * kNormBlock < end; ++block) {
          of_span[static_cast<std::size_t>(block)] = sum_of_block(span, block);
        }
      });
      for (std::size_t i = 0; i < list.size(); ++i) {
        double total = list[i].continues ? results[i] : 0;
        for (const double sum : sums[i]) {
          total += sum;
        }
        results[i] = total;
      }
    });
  }

  device::Pending start_total(std::span<const double* const> numbers, double* total,
                              device::Stream& stream) override {
    return stream.enqueue([addends = std::vector(numbers.begin(), numbers.end()), total] {
      double sum = 0;
      for (const double* const addend : addends) {
        sum += *addend;
      }
      *total = sum;
    });
  }

  device::Pending start_step_factors(const StepSums* sums, const StepInputs& inputs,
                                     StepOnDevice* step, FoundStep* for_host,
                                     device::Stream& stream) override {
    check_step_inputs(inputs);
    return stream.enqueue([sums, inputs, step, for_host] {
      *step = step_rule(*sums, inputs);
      *for_host = {*step, *sums};
    });
  }

  device::Pending start_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                            device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "sum of ", numel, " elements");
    check_element_type("sum with an addend", dtype);
    const auto* added = static_cast<const std::byte*>(addend);
    return stream.enqueue([this, values, added, dtype, numel] {
      const auto bytes = static_cast<std::int64_t>(bytes_of(dtype));
      for_chunks(std::vector<Range>{{numel}},
                 [&](const Range&, std::int64_t begin, std::int64_t end) {
                   best_loops().add(values + begin, added + begin * bytes, dtype, end - begin);
                 });
    });
  }

  device::Pending start_fold(const NormSpan& span, device::Stream& stream) override {
    TESSERA_INVARIANT(span.numel >= 0 && !span.later.empty(), "a sum of ", span.numel,
                      " elements in the place of its addends, and ", span.later.size(), " more");
    check_element_type("sum in the place of its addends", span.dtype);
    // The list need not outlive the call.
    return stream.enqueue([this, span, later = std::vector(span.later.begin(), span.later.end())] {
      NormSpan all = span;
      all.later = later;
      for_chunks(std::vector<NormSpan>{all},
                 [](const NormSpan& part, std::int64_t begin, std::int64_t end) {
                   MicroBatches micro_batches = micro_batches_of(part);
                   BlockSums sums;
                   for (; begin < end; begin += kNormBlock) {
                     const std::int64_t numel = std::min(kNormBlock, end - begin);
                     micro_batches.add_up(sums, begin, numel);
                     micro_batches.put(sums, numel);
                   }
                 });
    });
  }

  device::Pending start_join(float* to, const void* high, const void* low, std::int64_t numel,
                             device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "halves of ", numel, " elements");
    return stream.enqueue([this, to, high, low, numel] {
      for_chunks(std::vector<Range>{{numel}},
                 [&](const Range&, std::int64_t begin, std::int64_t end) {
                   const std::array halves = {advanced(high, DType::kBFloat16, begin),
                                              advanced(low, DType::kBFloat16, begin)};
                   best_loops().sum(to + begin, halves, DType::kBFloat16, true, end - begin);
                 });
    });
  }

  device::Pending start_convert(void* to, DType to_dtype, const void* from, DType from_dtype,
                                float scale, std::int64_t numel, device::Stream& stream) override {
    TESSERA_INVARIANT(numel >= 0, "conversion of ", numel, " elements");
    check_element_type("conversion to values", to_dtype);
    check_element_type("conversion from values", from_dtype);
    auto* out = static_cast<std::byte*>(to);
    const auto* in = static_cast<const std::byte*>(from);
    return stream.enqueue([this, out, to_dtype, in, from_dtype, scale, numel] {
      const auto out_bytes = static_cast<std::int64_t>(bytes_of(to_dtype));
      const auto in_bytes = static_cast<std::int64_t>(bytes_of(from_dtype));
      for_chunks(std::vector<Range>{{numel}},
                 [&](const Range&, std::int64_t begin, std::int64_t end) {
                   best_loops().convert(out + begin * out_bytes, to_dtype, in + begin * in_bytes,
                                        from_dtype, scale, end - begin);
                 });
    });
  }

  device::Pending start_hash(const void* data, std::size_t bytes, std::uint64_t* sum,
                             device::Stream& stream) override {
    check_hashed(data);
    const auto* from = static_cast<const std::byte*>(data);
    return stream.enqueue([this, from, numel = static_cast<std::int64_t>(bytes), sum] {
      const std::vector<Range> words{{ceil_div(numel, kHashWordBytes)}};
      for_chunks(words, [&](const Range&, std::int64_t begin, std::int64_t end) {
        std::uint64_t terms = 0;
        const auto add = [&](std::int64_t i, std::int64_t word_bytes) {
          std::uint64_t word = 0;
          std::memcpy(&word, from + i * kHashWordBytes, static_cast<std::size_t>(word_bytes));
          terms += hash_term(word, static_cast<std::uint64_t>(i));
        };
        const std::int64_t whole = std::min(end, numel / kHashWordBytes);
        for (std::int64_t i = begin; i < whole; ++i) {
          add(i, kHashWordBytes);
        }
        if (whole < end) {
          add(whole, numel - whole * kHashWordBytes);
        }
        std::atomic_ref(*sum).fetch_add(terms, std::memory_order_relaxed);
      });
    });
  }

 private:
  // body(span, begin, end) for all chunks of all spans.
  template <typename Span, typename Body>
  void for_chunks(const std::vector<Span>& spans, const Body& body) {
    const ChunkMap map(spans, num_threads_);
    team_.run(map.num_chunks(), [&](std::int64_t number) {
      const ChunkMap::Chunk chunk = map.at(number);
      const Span& span = spans[chunk.span];
      body(span, chunk.begin, std::min(chunk.end, numel_of(span)));
    });
  }

  const int num_threads_;
  ThreadTeam team_;
};

}  // namespace

double sum_of_squares(const NormSpan& span) {
  double total = 0;
  for (std::int64_t block = 0; block < ceil_div(span.numel, kNormBlock); ++block) {
    total += sum_of_block(span, block);
  }
  return total;
}

std::unique_ptr<Kernels> make_cpu_kernels(int num_threads, const std::vector<int>& cores) {
  return std::make_unique<CpuKernels>(num_threads, cores);
}

}  // namespace tessera::optim
