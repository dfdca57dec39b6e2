// Host kernels: the bits do not depend on the number of threads, and the order is the stream's.
#include <array>
#include <atomic>
#include <cmath>
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

TEST(CpuKernels, UpdateTheSameBitsWithAnyNumberOfThreads) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kCompute);
  const auto gradient = random_floats(kNumel, 1e-3, 2);
  const Weights initial(kNumel);
  for (const auto& [name, rule] : all_rules()) {
    UpdateScalars scalars;
    scalars.lr = 1e-3;
    Weights expected = initial;
    UpdateSpan span = expected.span(gradient.data());
    span.parameter = expected.parameter.data();
    update(rule, scalars, span);
    for (const int num_threads : {1, 2, 3, 7}) {
      const auto kernels = make_cpu_kernels(num_threads);
      Weights weights = initial;
      span = weights.span(gradient.data());
      span.parameter = weights.parameter.data();
      kernels->start_update(rule, scalars, span, stream).wait();
      EXPECT_TRUE(weights == expected) << name << ", " << num_threads << " threads";
    }
  }
}

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

TEST(CpuKernels, AddAndWiden) {
  const auto device = device::make_cpu_device();
  device::Stream& stream = device->stream(StreamKind::kReduce);
  const auto kernels = make_cpu_kernels(2);
  const auto a = random_floats(kNumel, 1, 1);
  const auto b = random_floats(kNumel, 1, 2);
  const auto count = static_cast<std::int64_t>(kNumel);
  std::vector<float> sum = a;
  kernels->start_add(sum.data(), b.data(), count, stream).wait();
  const auto halves = to_bfloat16s(a);
  std::vector<Float16> fp16s;
  std::vector<float> expected_bf16, expected_fp16, expected_sum;
  for (std::size_t i = 0; i < kNumel; ++i) {
    expected_sum.push_back(a[i] + b[i]);
    expected_bf16.push_back(to_float(halves[i]));
    fp16s.push_back(to_float16(a[i]));
    expected_fp16.push_back(to_float(fp16s.back()));
  }
  EXPECT_TRUE(same_bits(sum, expected_sum));
  std::vector<float> wide(kNumel);
  kernels->start_widen(wide.data(), halves.data(), DType::kBFloat16, count, stream).wait();
  EXPECT_TRUE(same_bits(wide, expected_bf16));
  kernels->start_widen(wide.data(), fp16s.data(), DType::kFloat16, count, stream).wait();
  EXPECT_TRUE(same_bits(wide, expected_fp16));
  EXPECT_THROW(
      std::ignore = kernels->start_widen(wide.data(), a.data(), DType::kFloat64, 1, stream),
      InternalError);
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

}  // namespace
}  // namespace tessera::optim
