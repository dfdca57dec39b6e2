// Host kernels: the bits are those of one element after the other, for all types, any number of
// threads and every instruction set; and the order is the stream's.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <latch>
#include <limits>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/thread_team.h"
#include "tessera/optim/update_loops.h"
#include "testing/mock_device.h"
#include "tests/optim/kernel_cases.h"
#include "tests/optim/update_case.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

using device::StreamKind;

// More than one chunk per thread, and a ragged end.
constexpr std::size_t kNumel = 300007;

double defined_sum_of(const std::vector<float>& values) {
  return defined_sum_of_squares(values.data(), DType::kFloat32, values.size());
}

TEST(ThreadTeam, RunsEveryChunkOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadTeam team(num_threads);
    for (const std::int64_t num_chunks : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> counts(static_cast<std::size_t>(num_chunks));
      team.run(num_chunks, [&](std::int64_t chunk) { ++counts[static_cast<std::size_t>(chunk)]; });
      for (const auto& count : counts) {
        EXPECT_EQ(count, 1);
      }
    }
  }
}

TEST(ThreadTeam, ServesCallersOneAfterTheOther) {
  constexpr int kRounds = 200;
  constexpr std::int64_t kChunks = 16;
  ThreadTeam team(3);
  std::array<std::atomic<int>, 2> inside{};
  std::array<std::atomic<int>, 2> num_run{};
  std::atomic<int> num_met{0};
  std::latch both(2);
  const auto call = [&](std::size_t caller) {
    both.arrive_and_wait();
    for (int round = 0; round < kRounds; ++round) {
      team.run(kChunks, [&](std::int64_t /*chunk*/) {
        ++inside[caller];
        std::this_thread::yield();  // so that the other caller has its chance to break in
        num_met += inside[1 - caller] > 0 ? 1 : 0;
        --inside[caller];
        ++num_run[caller];
      });
    }
  };
  std::thread other(call, 1);
  call(0);
  other.join();
  EXPECT_EQ(num_met, 0);
  EXPECT_EQ(num_run[0], kRounds * kChunks);
  EXPECT_EQ(num_run[1], kRounds * kChunks);
}

TEST(ThreadTeam, NeedsAThread) { EXPECT_THROW(ThreadTeam(0), ConfigError); }

TEST(CpuKernels, SumSquaresAsDefinedWithAnyNumberOfThreads) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  for (const std::size_t numel :
       {std::size_t{0}, std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{17},
        std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, std::size_t{65537}, kNumel}) {
    const auto values = random_floats(numel, 3, 11);
    const double expected = defined_sum_of(values);
    const auto count = static_cast<std::int64_t>(numel);
    EXPECT_EQ(sum_of_squares(values.data(), count), expected) << numel;
    for (const int num_threads : {1, 2, 5}) {
      double result = -1;
      make_cpu_kernels(num_threads)
          ->start_sum_of_squares(values.data(), count, &result, stream)
          .wait();
      EXPECT_EQ(result, expected) << numel << " elements, " << num_threads << " threads";
    }
  }
}

TEST(CpuKernels, SumSquaresOfPiecesThatGoOnWhereTheLastEnded) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  const auto kernels = make_cpu_kernels(2);
  const auto values = random_floats(kNumel, 3, 11);
  for (const std::int64_t piece : {kNormBlock, 5 * kNormBlock, std::int64_t{1} << 20}) {
    double result = -1;
    for (std::int64_t begin = 0; begin < static_cast<std::int64_t>(kNumel); begin += piece) {
      const NormSpan span{values.data() + begin, DType::kFloat32,
                          std::min(piece, static_cast<std::int64_t>(kNumel) - begin), begin > 0};
      kernels->start_sums_of_squares({&span, 1}, &result, stream).wait();
    }
    EXPECT_EQ(result, defined_sum_of(values)) << "pieces of " << piece;
  }
}

// As if their fp32 sum, made in order, had been given.
TEST(CpuKernels, AddMicroBatchesOnTheirWay) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  for (const int num_threads : {1, 3}) {
    const auto kernels = make_cpu_kernels(num_threads);
    for (const std::size_t numel : {std::size_t{1}, std::size_t{4097}, kNumel}) {
      std::vector<std::vector<BFloat16>> batches;
      std::vector<const void*> later;
      std::vector<float> sum(numel);
      for (std::uint64_t i = 0; i < 4; ++i) {
        batches.push_back(to_bfloat16s(random_floats(numel, 3, 20 + i)));
        for (std::size_t k = 0; k < numel; ++k) {
          sum[k] = i == 0 ? to_float(batches[i][k]) : sum[k] + to_float(batches[i][k]);
        }
      }
      for (std::size_t i = 1; i < batches.size(); ++i) {
        later.push_back(batches[i].data());
      }
      double squares = -1;
      const NormSpan norm{batches[0].data(),
                          DType::kBFloat16,
                          static_cast<std::int64_t>(numel),
                          false,
                          nullptr,
                          later};
      kernels->start_sums_of_squares({&norm, 1}, &squares, stream).wait();
      EXPECT_EQ(squares, defined_sum_of(sum));
      for (const auto& [name, rule] : all_rules()) {
        Weights expected(numel);
        Weights found(numel);
        UpdateSpan span = found.span(batches[0].data());
        span.later = later;
        UpdateSpan summed = expected.span(sum.data());
        for (auto* const each : {&span, &summed}) {
          each->parameter = each == &span ? found.parameter.data() : expected.parameter.data();
        }
        kernels->start_update(rule, {}, span, stream).wait();
        kernels->start_update(rule, {}, summed, stream).wait();
        EXPECT_TRUE(found == expected) << name << ", " << numel << " elements";
      }
    }
  }
}

// The first two become halves of the sum, which is an addend then; or fp32 its own place.
TEST(CpuKernels, AddMicroBatchesUpInThePlaceOfTheFirst) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  for (const DType dtype : kElementTypes) {
    for (const std::size_t numel : {std::size_t{1}, std::size_t{4097}, std::size_t{300'001}}) {
      std::vector<std::vector<std::uint32_t>> batches;
      std::vector<float> sum(numel);
      for (std::uint64_t k = 0; k < 5; ++k) {
        const auto values = random_floats(numel, 3, 30 + k);
        batches.emplace_back(numel);
        for (std::size_t i = 0; i < numel; ++i) {
          narrow_at(batches[k].data(), dtype, i, values[i]);
          const float rounded = widened_at(batches[k].data(), dtype, i);
          sum[i] = k == 0 ? rounded : sum[i] + rounded;
        }
      }
      const bool has_halves = dtype != DType::kFloat32;
      const auto kernels = make_cpu_kernels(3);
      NormSpan span{batches[0].data(), dtype, static_cast<std::int64_t>(numel)};
      const std::vector<const void*> first = {batches[1].data(), batches[2].data()};
      span.later = first;
      kernels->start_fold(span, stream).wait();
      const std::vector<const void*> second = {batches[3].data()};
      span.low = has_halves ? batches[1].data() : nullptr;
      span.later = second;
      kernels->start_fold(span, stream).wait();
      const std::vector<const void*> last = {batches[4].data()};
      span.later = last;
      double squares = -1;
      kernels->start_sums_of_squares({&span, 1}, &squares, stream).wait();
      EXPECT_EQ(squares, defined_sum_of(sum)) << to_string(dtype) << ", " << numel;
      Weights expected(numel);
      Weights found(numel);
      UpdateSpan update = found.span(sum.data());
      update.gradient = batches[0].data();
      update.gradient_dtype = dtype;
      update.low = span.low;
      update.later = last;
      kernels->start_update({}, {}, update, stream).wait();
      kernels->start_update({}, {}, expected.span(sum.data()), stream).wait();
      EXPECT_TRUE(found == expected) << to_string(dtype) << ", " << numel;
      if (has_halves) {
        std::vector<float> joined(numel, -1);
        kernels->start_fold(span, stream).wait();
        kernels
            ->start_join(joined.data(), batches[0].data(), batches[1].data(),
                         static_cast<std::int64_t>(numel), stream)
            .wait();
        EXPECT_EQ(joined, sum) << to_string(dtype) << ", " << numel;
      }
    }
  }
}

TEST(CpuKernels, SumSquaresTheSameInEveryInstructionSet) {
  for (const std::size_t numel : {1U, 16U, 31U, 4000U, 4096U}) {
    const auto values = random_floats(numel, 1, 4);
    const double expected = defined_sum_of(values);
    for (const Loops& loops : runnable_loops()) {
      EXPECT_EQ(loops.block_sum_of_squares(values.data(), static_cast<std::int64_t>(numel)),
                expected)
          << loops.name << ", " << numel;
    }
  }
}

TEST(CpuKernels, SumSquaresThatAreFiniteUnlessAnElementIsNot) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const std::vector<float> largest(10000, kMax);
  EXPECT_TRUE(std::isfinite(sum_of_squares(largest.data(), 10000)));
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t at : {0U, 4095U, 4096U, 9999U}) {
      std::vector<float> values(10000, 1.0F);
      values[at] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(values.data(), 10000))) << bad << " at " << at;
    }
  }
}

// The lazy device runs nothing before somebody waits, so work outside the stream's order shows.
TEST(CpuKernels, RunInTheOrderOfTheStream) {
  const auto device = device::make_mock_device();
  device::Stream& reduce = device->stream(StreamKind::kReduce);
  device::Stream& read = device->stream(StreamKind::kRead);
  const auto kernels = make_cpu_kernels(2);
  const auto source = random_floats(1000, 1, 1);
  std::vector<float> gradient(1000, -1.0F);
  Weights weights(1000);
  const Weights before = weights;
  const auto copied =
      device->start_copy(gradient.data(), source.data(), 1000 * sizeof(float), read);
  reduce.wait(copied);
  double squares = -1;
  const auto summed = kernels->start_sum_of_squares(gradient.data(), 1000, &squares, reduce);
  UpdateScalars scalars;
  scalars.lr = 1e-3;
  const auto updated = kernels->start_update({}, scalars, weights.span(gradient.data()), reduce);
  EXPECT_EQ(squares, -1);
  EXPECT_TRUE(weights == before);
  EXPECT_FALSE(updated.done());
  updated.wait();
  EXPECT_TRUE(summed.done());
  EXPECT_EQ(squares, sum_of_squares(source.data(), 1000));
  Weights expected = before;
  update({}, scalars, expected.span(source.data()));
  EXPECT_TRUE(weights == expected);
}

class KernelLists : public ::testing::Test {
 protected:
  device::Stream& stream() { return device_->stream(StreamKind::kReduce); }

  // Runs `start(kernels, base)` over a copy of the slab, with a few threads.
  template <typename Start>
  static Slab after(const Slab& slab, int num_threads, const Start& start) {
    AlignedBytes memory(slab.bytes());
    start(*make_cpu_kernels(num_threads), memory.data()).wait();
    Slab out = slab;
    out.bytes() = memory.bytes();
    return out;
  }

  std::unique_ptr<device::Device> device_ = device::make_cpu_device();
};

TEST_F(KernelLists, UpdateAsElementByElement) {
  const UpdateList list(odd_update_shapes());
  for (const auto& [name, rule] : all_rules()) {
    const Slab expected = list.expected(rule);
    for (const int num_threads : {1, 2, 5}) {
      const Slab found = after(list.slab, num_threads, [&](Kernels& kernels, std::byte* base) {
        return kernels.start_updates(rule, list.tasks(base), stream());
      });
      EXPECT_TRUE(found.same_as(expected)) << name << ", " << num_threads << " threads";
    }
  }
}

// Large enough for stores past the caches; under a sanitizer, for pieces of several threads.
constexpr std::size_t kLarge = support::rounds(std::size_t{2} << 20, std::size_t{1} << 16) + 77;

TEST_F(KernelLists, UpdateLargeSpansWithTheSameBits) {
  for (const UpdateShape& shape : {UpdateShape{kLarge, 0, 0, DType::kBFloat16, DType::kBFloat16},
                                   UpdateShape{kLarge, 0, 5, DType::kFloat32, DType::kFloat16}}) {
    const UpdateList list({shape});
    const Slab expected = list.expected({});
    for (const int num_threads : {2, 7}) {
      const Slab found = after(list.slab, num_threads, [&](Kernels& kernels, std::byte* base) {
        return kernels.start_updates({}, list.tasks(base), stream());
      });
      EXPECT_TRUE(found.same_as(expected)) << to_string(shape.parameter) << ", " << num_threads;
    }
  }
}

// The parameter takes the gradient's memory.
TEST_F(KernelLists, UpdateInPlaceOfTheGradient) {
  for (const std::size_t numel : {std::size_t{1}, std::size_t{1003}, kLarge}) {
    Weights apart(numel);
    Weights in_place(numel);
    auto gradient = to_bfloat16s(random_floats(numel, 1e-3, 7));
    const auto before = gradient;
    UpdateSpan span = apart.span(before.data());
    span.parameter = apart.parameter.data();
    const auto kernels = make_cpu_kernels(2);
    kernels->start_update({}, {}, span, stream()).wait();
    span = in_place.span(gradient.data());
    span.parameter = gradient.data();
    kernels->start_update({}, {}, span, stream()).wait();
    std::memcpy(in_place.parameter.data(), gradient.data(), numel * sizeof(BFloat16));
    EXPECT_TRUE(in_place == apart) << numel;
  }
}

TEST_F(KernelLists, UpdateTheSameInEveryInstructionSet) {
  const UpdateList list(odd_update_shapes());
  for (const auto& [name, rule] : all_rules()) {
    const Slab expected = list.expected(rule);
    for (const Loops& loops : runnable_loops()) {
      AlignedBytes memory(list.slab.bytes());
      for (const UpdateTask& task : list.tasks(memory.data())) {
        loops.update(element_rule(rule), element_scalars(rule, task.scalars), task.span, 0,
                     task.span.numel);
      }
      Slab found = list.slab;
      found.bytes() = memory.bytes();
      EXPECT_TRUE(found.same_as(expected)) << name << ", " << loops.name;
    }
  }
}

TEST_F(KernelLists, SumSquaresOfEachSpanAsDefined) {
  for (const std::size_t num_spans : {0U, 1U, 2U, 100U}) {
    NormList list(num_spans);
    const std::vector<double> expected = list.expected();
    AlignedBytes memory(list.slab.bytes());
    for (const int num_threads : {1, 2, 5}) {
      std::vector<double> results(num_spans, -1);
      make_cpu_kernels(num_threads)
          ->start_sums_of_squares(list.at(memory.data()), results.data(), stream())
          .wait();
      EXPECT_EQ(results, expected) << num_spans << " spans, " << num_threads << " threads";
    }
    for (const Loops& loops : runnable_loops()) {
      for (const NormSpan& span : list.at(memory.data())) {
        const std::int64_t numel = std::min(span.numel, kNormBlock);
        EXPECT_EQ(loops.any_block_sum_of_squares(span.values, span.dtype, numel),
                  defined_sum_of_squares(span.values, span.dtype, static_cast<std::size_t>(numel)))
            << loops.name << ", " << numel << " of " << to_string(span.dtype);
      }
    }
  }
}

TEST_F(KernelLists, OnlyTheSumOfANonFiniteElementIsNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const DType dtype : kElementTypes) {
      std::vector<std::uint32_t> memory(9000);
      narrow_at(memory.data(), dtype, 4999, bad);
      const NormSpan spans[] = {{memory.data(), dtype, 4999}, {memory.data(), dtype, 5000}};
      double results[2] = {-1, -1};
      make_cpu_kernels(2)->start_sums_of_squares(spans, results, stream()).wait();
      EXPECT_EQ(results[0], 0);
      EXPECT_FALSE(std::isfinite(results[1])) << bad << " as " << to_string(dtype);
    }
  }
}

// Strips of it are made in registers, and what is behind the last strip one by one.
TEST_F(KernelLists, SumSeveralTensorsInOrderInEveryInstructionSet) {
  for (const DType dtype : kElementTypes) {
    for (const std::size_t num_addends : {1U, 2U, 3U, 8U}) {
      for (const std::int64_t numel : {0, 1, 63, 64, 65, 1000}) {
        const auto length = static_cast<std::size_t>(numel) + 1;  // begins off the words of a line
        std::vector<std::vector<std::uint32_t>> memory(num_addends,
                                                       std::vector<std::uint32_t>(length));
        std::vector<const void*> addends;
        std::vector<float> expected(static_cast<std::size_t>(numel));
        for (std::size_t k = 0; k < num_addends; ++k) {
          for (std::size_t i = 0; i < length; ++i) {
            // Of sizes so different that another order rounds otherwise.
            const float value = std::ldexp(static_cast<float>(i * 37 % 101) - 50,
                                           static_cast<int>((i + 5 * k) % 11) - 5);
            narrow_at(memory[k].data(), dtype, i, value);
            if (i > 0) {
              const float rounded = widened_at(memory[k].data(), dtype, i);
              expected[i - 1] = k == 0 ? rounded : expected[i - 1] + rounded;
            }
          }
          addends.push_back(reinterpret_cast<const std::byte*>(memory[k].data()) + bytes_of(dtype));
        }
        for (const Loops& loops : runnable_loops()) {
          std::vector<float> found(expected.size(), -1);
          loops.sum(found.data(), addends, dtype, false, numel);
          EXPECT_EQ(found, expected)
              << to_string(dtype) << ", " << num_addends << " of " << numel << ", " << loops.name;
          if (dtype == DType::kFloat32 || num_addends < 3) {
            continue;
          }
          // In halves, and the last two are addends.
          std::vector<std::uint16_t> high(expected.size());
          std::vector<std::uint16_t> low(expected.size());
          loops.split(high.data(), low.data(), expected.data(), numel);
          const std::vector<const void*> joined = {high.data(), low.data(), addends[1], addends[2]};
          std::vector<float> more = expected;
          for (std::size_t i = 0; i < more.size(); ++i) {
            more[i] += widened_at(addends[1], dtype, i);
            more[i] += widened_at(addends[2], dtype, i);
          }
          loops.sum(found.data(), joined, dtype, true, numel);
          EXPECT_EQ(found, more) << to_string(dtype) << ", halves of " << numel << ", "
                                 << loops.name;
        }
      }
    }
  }
}

TEST_F(KernelLists, AddEveryType) {
  for (const DType dtype : kElementTypes) {
    for (const std::size_t skew : {0U, 1U, 3U}) {
      const AddCase given(dtype, skew);
      const Slab expected = given.expected();
      for (const int num_threads : {1, 3}) {
        const Slab found = after(given.slab, num_threads, [&](Kernels& kernels, std::byte* base) {
          return given.start(kernels, base, stream());
        });
        EXPECT_TRUE(found.bytes() == expected.bytes()) << to_string(dtype) << ", skew " << skew;
      }
    }
  }
}

TEST_F(KernelLists, JoinHalves) {
  for (const std::size_t skew : {0U, 1U, 3U}) {
    const JoinCase given(skew);
    const Slab found = after(given.slab, 3, [&](Kernels& kernels, std::byte* base) {
      return given.start(kernels, base, stream());
    });
    EXPECT_TRUE(found.bytes() == given.expected().bytes()) << "skew " << skew;
  }
}

TEST_F(KernelLists, ConvertEveryPairOfTypes) {
  for (const DType from : kElementTypes) {
    for (const DType to : kElementTypes) {
      const ConvertCase given(from, to, 1, 3);
      for (const float scale : {1.0F, 0.37F, -2.0F, 0x1p-20F}) {
        const Slab expected = given.expected(scale);
        for (const int num_threads : {1, 3}) {
          const Slab found = after(given.slab, num_threads, [&](Kernels& kernels, std::byte* base) {
            return kernels.start_convert(base + given.to, to, base + given.from, from, scale,
                                         static_cast<std::int64_t>(given.numel), stream());
          });
          // Without a product, a NaN's own bits count, too.
          EXPECT_TRUE(scale == 1.0F ? found.bytes() == expected.bytes() : found.same_as(expected))
              << to_string(from) << " to " << to_string(to) << ", times " << scale;
        }
        for (const Loops& loops : runnable_loops()) {
          AlignedBytes memory(given.slab.bytes());
          loops.convert(memory.data() + given.to, to, memory.data() + given.from, from, scale,
                        static_cast<std::int64_t>(given.numel));
          Slab found = given.slab;
          found.bytes() = memory.bytes();
          EXPECT_TRUE(scale == 1.0F ? found.bytes() == expected.bytes() : found.same_as(expected))
              << loops.name << ": " << to_string(from) << " to " << to_string(to);
        }
      }
    }
  }
}

TEST_F(KernelLists, HashBytesAsOneWordAfterTheOtherByAnyNumberOfThreads) {
  for (const int num_threads : {1, 3}) {
    const auto kernels = make_cpu_kernels(num_threads);
    for (const std::size_t bytes : kHashedBytes) {
      const std::vector<std::byte> values = hashed_bytes(bytes);
      std::vector<std::uint64_t> data(bytes / 8 + 1);  // aligned
      std::copy(values.begin(), values.end(), reinterpret_cast<std::byte*>(data.data()));
      std::uint64_t sum = 17;  // it is added to what is there
      kernels->start_hash(data.data(), bytes, &sum, stream()).wait();
      EXPECT_EQ(sum, 17 + reference_hash(values)) << bytes << ", " << num_threads << " threads";
    }
  }
}

// Two words that change places, too.
TEST(ContentHash, SeesEveryBitAndWhereItIs) {
  std::vector<std::byte> values = hashed_bytes(45);
  const std::uint64_t hash = reference_hash(values);
  for (std::size_t bit = 0; bit < values.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1U << (bit % 8));
    values[bit / 8] ^= mask;
    EXPECT_NE(reference_hash(values), hash) << "bit " << bit;
    values[bit / 8] ^= mask;
  }
  std::swap_ranges(values.begin(), values.begin() + 8, values.begin() + 16);
  EXPECT_NE(reference_hash(values), hash);
}

TEST_F(KernelLists, RefuseOtherTypes) {
  const auto kernels = make_cpu_kernels(1);
  double value = 0;
  const NormSpan span{&value, DType::kFloat64, 1};
  float wide = 0;
  EXPECT_THROW(std::ignore = kernels->start_sums_of_squares({&span, 1}, &value, stream()),
               InternalError);
  EXPECT_THROW(std::ignore = kernels->start_add(&wide, &value, DType::kFloat64, 1, stream()),
               InternalError);
  EXPECT_THROW(std::ignore = kernels->start_convert(&value, DType::kFloat64, &wide, DType::kFloat32,
                                                    1, 1, stream()),
               InternalError);
  EXPECT_THROW(std::ignore = kernels->start_convert(&wide, DType::kFloat32, &value, DType::kInt64,
                                                    1, 1, stream()),
               InternalError);
}

// The lazy device runs nothing before somebody waits: by then the lists are gone.
TEST_F(KernelLists, NeedTheirListsForTheCallOnly) {
  const auto device = device::make_mock_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  const auto kernels = make_cpu_kernels(2);
  const UpdateList updates({{100, 0, 0, DType::kBFloat16, DType::kBFloat16}});
  AlignedBytes memory(updates.slab.bytes());
  const NormList norms(3);
  AlignedBytes values(norms.slab.bytes());
  std::vector<double> results(3, -1);
  device::Pending updated;
  device::Pending summed;
  {
    auto tasks = std::make_unique<std::vector<UpdateTask>>(updates.tasks(memory.data()));
    auto spans = std::make_unique<std::vector<NormSpan>>(norms.at(values.data()));
    updated = kernels->start_updates({}, *tasks, stream);
    summed = kernels->start_sums_of_squares(*spans, results.data(), stream);
    tasks->assign(tasks->size(), {});
    spans->assign(spans->size(), {});
  }
  EXPECT_EQ(results[0], -1);
  summed.wait();
  EXPECT_TRUE(updated.done());
  EXPECT_EQ(results, norms.expected());
  Slab found = updates.slab;
  found.bytes() = memory.bytes();
  EXPECT_TRUE(found.same_as(updates.expected({})));
}

}  // namespace
}  // namespace tessera::optim
