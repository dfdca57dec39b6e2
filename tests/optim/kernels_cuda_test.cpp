// CUDA kernels beside the host's: the same bits for every rule and for the norm.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "tessera/optim/kernels.h"
#include "tests/optim/kernel_cases.h"
#include "tests/optim/step_cases.h"
#include "tests/optim/update_case.h"

namespace tessera::optim {
namespace {

using device::StreamKind;

TEST(CudaKernelsWithoutCuda, SayWhatIsMissing) {
  if (device::cuda_built()) {
    GTEST_SKIP() << "this build has CUDA";
  }
  const auto device = device::make_cpu_device();
  EXPECT_THROW(make_cuda_kernels(*device), DeviceError);
}

class CudaKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device::num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
    device_ = device::make_cuda_device();
    kernels_ = make_cuda_kernels(*device_);
  }

  device::Stream& stream() { return device_->stream(StreamKind::kReduce); }

  template <typename Value>
  device::Memory upload(const std::vector<Value>& values) {
    const std::size_t bytes = values.size() * sizeof(Value);
    device::Memory memory = device_->allocate(Tier::kDevice, bytes, Role::kOther);
    if (bytes > 0) {
      device_->start_copy(memory.data(), values.data(), bytes, stream()).wait();
    }
    return memory;
  }

  template <typename Value>
  void download(const device::Memory& memory, std::vector<Value>& values) {
    if (!values.empty()) {
      device_->start_copy(values.data(), memory.data(), values.size() * sizeof(Value), stream())
          .wait();
    }
  }

  // Runs `start(base)` over a copy of the slab on the device.
  template <typename Start>
  Slab after(const Slab& slab, const Start& start) {
    const device::Memory memory = upload(slab.bytes());
    start(memory.data()).wait();
    Slab out = slab;
    download(memory, out.bytes());
    return out;
  }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<Kernels> kernels_;
};

TEST_F(CudaKernels, UpdateTheBitsOfTheHost) {
  for (const auto& [name, rule] : all_rules()) {
    for (const std::size_t numel :
         {std::size_t{0}, std::size_t{1}, std::size_t{1003}, std::size_t{3000017}}) {
      for (const DType gradient_dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (const DType parameter : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
          Weights host(numel);
          const device::Memory master = upload(host.master);
          const device::Memory first = upload(host.first);
          const device::Memory second = upload(host.second);
          const device::Memory low = upload(host.parameter);
          for (std::int64_t step = 1; step <= 3; ++step) {
            UpdateScalars scalars;
            scalars.step = step;
            scalars.lr = 1e-3;
            scalars.gradient_scale = 0.37;
            const auto gradient = random_floats(numel, 1e-3, static_cast<std::uint64_t>(step));
            const auto halves = to_bfloat16s(gradient);
            const bool is_half = gradient_dtype == DType::kBFloat16;
            UpdateSpan span = is_half ? host.span(halves.data()) : host.span(gradient.data());
            span.parameter = parameter == DType::kFloat32 ? nullptr : host.parameter.data();
            span.parameter_dtype = parameter;
            update(rule, scalars, span);
            const device::Memory on_device = is_half ? upload(halves) : upload(gradient);
            span.master = reinterpret_cast<float*>(master.data());
            span.gradient = on_device.data();
            span.states = {reinterpret_cast<float*>(first.data()),
                           reinterpret_cast<float*>(second.data())};
            span.parameter = parameter == DType::kFloat32 ? nullptr : low.data();
            kernels_->start_update(rule, scalars, span, stream()).wait();
          }
          Weights found(numel);
          download(master, found.master);
          download(first, found.first);
          download(second, found.second);
          download(low, found.parameter);
          EXPECT_TRUE(found == host)
              << name << ", " << numel << " elements, gradient " << to_string(gradient_dtype)
              << ", parameter " << to_string(parameter);
        }
      }
    }
  }
}

TEST_F(CudaKernels, UpdateInPlaceOfTheGradient) {
  for (const std::size_t numel : {std::size_t{1}, std::size_t{1003}, std::size_t{3000017}}) {
    Weights host(numel);
    const device::Memory master = upload(host.master);
    const device::Memory first = upload(host.first);
    const device::Memory second = upload(host.second);
    const auto gradient = to_bfloat16s(random_floats(numel, 1e-3, 7));
    const device::Memory shared = upload(gradient);
    UpdateSpan span = host.span(gradient.data());
    span.parameter = host.parameter.data();
    update({}, {}, span);
    span.master = reinterpret_cast<float*>(master.data());
    span.gradient = shared.data();
    span.states = {reinterpret_cast<float*>(first.data()), reinterpret_cast<float*>(second.data())};
    span.parameter = shared.data();
    kernels_->start_update({}, {}, span, stream()).wait();
    Weights found(numel);
    download(master, found.master);
    download(first, found.first);
    download(second, found.second);
    download(shared, found.parameter);
    EXPECT_TRUE(found == host) << numel;
  }
}

TEST_F(CudaKernels, SumSquaresToTheBitsOfTheHost) {
  // Growing and shrinking, so that scratch memory is outgrown and used again; all in flight.
  const std::vector<std::size_t> sizes = {0, 1, 17, 4096, 4097, 65537, 3000017, 5, 70001};
  std::vector<std::vector<float>> values;
  std::vector<device::Memory> on_device;
  for (const std::size_t numel : sizes) {
    values.push_back(random_floats(numel, 3, numel));
    on_device.push_back(upload(values.back()));
  }
  std::vector<double> results(sizes.size(), -1);
  std::vector<device::Pending> summed;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    summed.push_back(
        kernels_->start_sum_of_squares(reinterpret_cast<const float*>(on_device[i].data()),
                                       static_cast<std::int64_t>(sizes[i]), &results[i], stream()));
  }
  device::Pending::all(summed).wait();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(results[i], sum_of_squares(values[i].data(), static_cast<std::int64_t>(sizes[i])))
        << sizes[i];
  }
}

TEST_F(CudaKernels, SumSquaresOfPiecesThatGoOnWhereTheLastEnded) {
  constexpr std::int64_t kAll = 3000017;
  const std::vector<float> values = random_floats(kAll, 3, 5);
  const device::Memory on_device = upload(values);
  const device::Memory result = device_->allocate(Tier::kPinned, sizeof(double), Role::kOther);
  for (const std::int64_t piece : {kNormBlock, 100 * kNormBlock}) {
    device::Pending summed;
    for (std::int64_t begin = 0; begin < kAll; begin += piece) {
      const NormSpan span{reinterpret_cast<const float*>(on_device.data()) + begin, DType::kFloat32,
                          std::min(piece, kAll - begin), begin > 0};
      summed = kernels_->start_sums_of_squares({&span, 1}, reinterpret_cast<double*>(result.data()),
                                               stream());
    }
    summed.wait();
    EXPECT_EQ(*reinterpret_cast<const double*>(result.data()), sum_of_squares(values.data(), kAll));
  }
}

TEST_F(CudaKernels, SumOfANonFiniteElementIsNotFinite) {
  std::vector<float> values(9000, 1.0F);
  values[5000] = std::numeric_limits<float>::infinity();
  const device::Memory on_device = upload(values);
  double result = 0;
  kernels_
      ->start_sum_of_squares(reinterpret_cast<const float*>(on_device.data()), 9000, &result,
                             stream())
      .wait();
  EXPECT_FALSE(std::isfinite(result));
}

TEST_F(CudaKernels, AddAndWiden) {
  const auto a = random_floats(100003, 1, 1);
  const auto b = random_floats(100003, 1, 2);
  const auto halves = to_bfloat16s(a);
  std::vector<Float16> fp16s;
  std::vector<float> sum, wide_bf16, wide_fp16;
  for (std::size_t i = 0; i < a.size(); ++i) {
    fp16s.push_back(to_float16(a[i]));
    sum.push_back(a[i] + b[i]);
    wide_bf16.push_back(to_float(halves[i]));
    wide_fp16.push_back(to_float(fp16s[i]));
  }
  const device::Memory values = upload(a);
  const device::Memory addend = upload(b);
  auto* out = reinterpret_cast<float*>(values.data());
  const auto numel = static_cast<std::int64_t>(a.size());
  std::vector<float> found(a.size());
  kernels_->start_add(out, reinterpret_cast<const float*>(addend.data()), numel, stream()).wait();
  download(values, found);
  EXPECT_TRUE(same_bits(found, sum));
  const device::Memory bf16_on_device = upload(halves);
  kernels_->start_widen(out, bf16_on_device.data(), DType::kBFloat16, numel, stream()).wait();
  download(values, found);
  EXPECT_TRUE(same_bits(found, wide_bf16));
  const device::Memory fp16_on_device = upload(fp16s);
  kernels_->start_widen(out, fp16_on_device.data(), DType::kFloat16, numel, stream()).wait();
  download(values, found);
  EXPECT_TRUE(same_bits(found, wide_fp16));
}

TEST_F(CudaKernels, UpdateListsOfOddSpansWithTheBitsOfTheHost) {
  const UpdateList list(odd_update_shapes());
  for (const auto& [name, rule] : all_rules()) {
    const Slab found = after(list.slab, [&](std::byte* base) {
      return kernels_->start_updates(rule, list.tasks(base), stream());
    });
    EXPECT_TRUE(found.same_as(list.expected(rule))) << name;
  }
}

TEST_F(CudaKernels, UpdateSmallSpansBesideLargeOnes) {
  const UpdateList list({{300007, 0, 0, DType::kBFloat16, DType::kBFloat16},
                         {7, 1, 0, DType::kBFloat16, DType::kBFloat16},
                         {0, 0, 0, DType::kBFloat16, DType::kBFloat16},
                         {250000, 3, 0, DType::kFloat16, DType::kFloat16},
                         {200001, 2, 1, DType::kFloat32, DType::kBFloat16}});
  const Slab found = after(list.slab, [&](std::byte* base) {
    return kernels_->start_updates({}, list.tasks(base), stream());
  });
  EXPECT_TRUE(found.same_as(list.expected({})));
}

TEST_F(CudaKernels, UpdateAnEmptyList) {
  kernels_->start_updates({}, {}, stream()).wait();
  EXPECT_EQ(stream().record().wait_for(std::chrono::seconds(10)), true);
}

TEST_F(CudaKernels, FindTheFactorsOfAStepWithTheBitsOfTheHost) {
  const device::Memory step = device_->allocate(Tier::kDevice, sizeof(StepOnDevice), Role::kOther);
  const device::Memory for_host = device_->allocate(Tier::kPinned, sizeof(FoundStep), Role::kOther);
  for (const StepCase& test : step_cases()) {
    const device::Memory squares = upload(test.squares);
    const device::Memory uploaded = upload(std::vector<StepSums>{test.sums()});
    auto* const sums = reinterpret_cast<StepSums*>(uploaded.data());
    std::ignore = kernels_->start_total(
        addresses(reinterpret_cast<const double*>(squares.data()), test.squares.size()),
        &sums->gradient_squares, stream());
    kernels_
        ->start_step_factors(sums, test.inputs, reinterpret_cast<StepOnDevice*>(step.data()),
                             reinterpret_cast<FoundStep*>(for_host.data()), stream())
        .wait();
    const StepOnDevice expected = defined_step(test);
    const auto& found = *reinterpret_cast<const FoundStep*>(for_host.data());
    EXPECT_TRUE(same_found(found, {expected, test.sums()}))
        << text_of(found.step) << "; not " << text_of(expected);
    std::vector<StepOnDevice> on_device(1);
    download(step, on_device);
    EXPECT_TRUE(same_step(on_device[0], expected)) << text_of(on_device[0]);
  }
}

TEST_F(CudaKernels, TakeTheFactorOfAStepFromMemory) {
  const UpdateList list(odd_update_shapes());
  StepOnDevice given{};
  given.gradient_scale = 0.37;  // that of the list
  const device::Memory step = upload(std::vector<StepOnDevice>{given});
  for (const auto& [name, rule] : all_rules()) {
    const Slab found = after(list.slab, [&](std::byte* base) {
      return kernels_->start_updates(
          rule, with_step(list.tasks(base), reinterpret_cast<const StepOnDevice*>(step.data())),
          stream());
    });
    EXPECT_TRUE(found.same_as(list.expected(rule))) << name;
  }
}

TEST_F(CudaKernels, LeaveEveryBitOfAStepThatSkips) {
  const UpdateList list(odd_update_shapes());
  StepOnDevice given{};
  given.gradient_scale = std::numeric_limits<double>::quiet_NaN();
  given.skips = 1;
  const device::Memory step = upload(std::vector<StepOnDevice>{given});
  for (const auto& [name, rule] : all_rules()) {
    const Slab found = after(list.slab, [&](std::byte* base) {
      auto tasks = list.tasks(base);
      for (UpdateTask& task : tasks) {
        task.scalars.on_device = reinterpret_cast<const StepOnDevice*>(step.data());
      }
      return kernels_->start_updates(rule, tasks, stream());
    });
    EXPECT_TRUE(found.bytes() == list.slab.bytes()) << name;
  }
}

// Sums, factors and updates are handed over together; the host waits for nothing in between.
TEST_F(CudaKernels, UpdateByTheFactorOfSumsThatTheHostHasNotSeen) {
  for (const bool is_finite : {true, false}) {
    auto values = random_floats(100003, 1, 5);
    values[77] = is_finite ? values[77] : std::numeric_limits<float>::infinity();
    const device::Memory gradient = upload(values);
    const device::Memory step =
        device_->allocate(Tier::kDevice, sizeof(StepOnDevice), Role::kOther);
    const device::Memory pinned =
        device_->allocate(Tier::kPinned, sizeof(FoundStep) + sizeof(StepSums) + 8, Role::kOther);
    auto* const factors = reinterpret_cast<StepOnDevice*>(step.data());
    auto* const for_host = reinterpret_cast<FoundStep*>(pinned.data());
    auto* const sums = reinterpret_cast<StepSums*>(for_host + 1);
    auto* const squares = reinterpret_cast<double*>(sums + 1);
    *sums = {0, 3};
    const StepInputs inputs{2, 1, true};
    const UpdateList list(odd_update_shapes());
    const Slab found = after(list.slab, [&](std::byte* base) {
      const NormSpan span{gradient.data(), DType::kFloat32, 100003};
      std::ignore = kernels_->start_sums_of_squares({&span, 1}, squares, stream());
      std::ignore = kernels_->start_total(addresses(squares, 1), &sums->gradient_squares, stream());
      std::ignore = kernels_->start_step_factors(sums, inputs, factors, for_host, stream());
      auto tasks = list.tasks(base);
      for (UpdateTask& task : tasks) {
        task.scalars.on_device = factors;
      }
      return kernels_->start_updates({}, tasks, stream());
    });
    const StepOnDevice expected =
        defined_step({{sum_of_squares(values.data(), 100003)}, 3, inputs});
    EXPECT_TRUE(same_step(for_host->step, expected)) << text_of(for_host->step);
    EXPECT_EQ(expected.skips, is_finite ? 0 : 1);
    Slab reference = list.slab;
    AlignedBytes memory(reference.bytes());
    for (UpdateTask task : list.tasks(memory.data())) {
      task.scalars.on_device = &expected;
      update({}, task.scalars, task.span);
    }
    reference.bytes() = memory.bytes();
    EXPECT_TRUE(found.same_as(reference)) << (is_finite ? "finite" : "not finite");
  }
}

TEST_F(CudaKernels, SumSquaresOfListsIntoPinnedAndDeviceMemory) {
  // As few as one launch takes lightly, more than that, and more than one launch takes.
  for (const std::size_t num_spans : {0U, 1U, 16U, 17U, 300U, 1100U}) {
    const NormList list(num_spans);
    const std::vector<double> expected = list.expected();
    const device::Memory values = upload(list.slab.bytes());
    for (const Tier tier : {Tier::kPinned, Tier::kDevice}) {
      const device::Memory results =
          device_->allocate(tier, num_spans * sizeof(double) + 8, Role::kOther);
      kernels_
          ->start_sums_of_squares(list.at(values.data()), reinterpret_cast<double*>(results.data()),
                                  stream())
          .wait();
      std::vector<double> found(num_spans, -1);
      download(results, found);
      EXPECT_EQ(found, expected) << num_spans << " spans";
    }
  }
}

TEST_F(CudaKernels, SumSquaresOfListsInFlightTogether) {
  // One behind the other on one stream, in the same scratch memory, and on another one beside.
  constexpr std::size_t kRounds = 6;
  const NormList list(90);
  const std::vector<double> expected = list.expected();
  const device::Memory values = upload(list.slab.bytes());
  const device::Memory results =
      device_->allocate(Tier::kPinned, kRounds * expected.size() * sizeof(double), Role::kOther);
  std::vector<device::Pending> summed;
  for (std::size_t round = 0; round < kRounds; ++round) {
    device::Stream& on =
        device_->stream(round % 3 == 2 ? StreamKind::kCompute : StreamKind::kReduce);
    summed.push_back(kernels_->start_sums_of_squares(
        list.at(values.data()), reinterpret_cast<double*>(results.data()) + round * expected.size(),
        on));
  }
  device::Pending::all(summed).wait();
  for (std::size_t round = 0; round < kRounds; ++round) {
    const auto* of_round = reinterpret_cast<double*>(results.data()) + round * expected.size();
    EXPECT_EQ(std::vector<double>(of_round, of_round + expected.size()), expected) << round;
  }
}

TEST_F(CudaKernels, AddEveryType) {
  for (const DType dtype : kElementTypes) {
    for (const std::size_t skew : {0U, 1U, 2U}) {
      const AddCase given(dtype, skew);
      const Slab found = after(
          given.slab, [&](std::byte* base) { return given.start(*kernels_, base, stream()); });
      EXPECT_TRUE(found.bytes() == given.expected().bytes())
          << to_string(dtype) << ", skew " << skew;
    }
  }
}

TEST_F(CudaKernels, JoinHalves) {
  for (const std::size_t skew : {0U, 1U, 2U}) {
    const JoinCase given(skew);
    const Slab found =
        after(given.slab, [&](std::byte* base) { return given.start(*kernels_, base, stream()); });
    EXPECT_TRUE(found.bytes() == given.expected().bytes()) << "skew " << skew;
  }
}

TEST_F(CudaKernels, ConvertEveryPairOfTypes) {
  for (const DType from : kElementTypes) {
    for (const DType to : kElementTypes) {
      for (const std::size_t to_skew : {1U, 2U}) {
        const ConvertCase given(from, to, 1, to_skew);
        for (const float scale : {1.0F, 0.37F, -2.0F, 0x1p-20F}) {
          const Slab expected = given.expected(scale);
          const Slab found = after(given.slab, [&](std::byte* base) {
            return kernels_->start_convert(base + given.to, to, base + given.from, from, scale,
                                           static_cast<std::int64_t>(given.numel), stream());
          });
          // Without a product, a NaN's own bits count, too.
          EXPECT_TRUE(scale == 1.0F ? found.bytes() == expected.bytes() : found.same_as(expected))
              << to_string(from) << " to " << to_string(to) << ", times " << scale;
        }
      }
    }
  }
}

TEST_F(CudaKernels, HashAsTheHostDoes) {
  for (const std::size_t bytes : kHashedBytes) {
    const std::vector<std::byte> values = hashed_bytes(bytes);
    const device::Memory data = upload(values);
    std::vector<std::uint64_t> sum = {17};  // it is added to what is there
    const device::Memory on_device = upload(sum);
    kernels_
        ->start_hash(data.data(), bytes, reinterpret_cast<std::uint64_t*>(on_device.data()),
                     stream())
        .wait();
    download(on_device, sum);
    EXPECT_EQ(sum.front(), 17 + reference_hash(values)) << bytes;
  }
}

}  // namespace
}  // namespace tessera::optim
