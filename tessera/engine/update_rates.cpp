#include "tessera/engine/update_rates.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/clock.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "tessera/optim/kernels.h"

namespace tessera {
namespace {

using device::Pending;
using device::StreamKind;

constexpr int kSpans = 8;                  // of two milliseconds or so
constexpr int kCopyPlaces = 4;             // on the host, each way, in turn
constexpr std::int64_t kUpdateBytes = 16;  // in memory, per element
constexpr std::int64_t kMostBytes = std::int64_t{2} << 30;
constexpr std::int64_t kLeastBytes = std::int64_t{16} << 20;
// Of a rank's free host memory, most of which the plan may give to shards later.
constexpr std::int64_t kPart = 8;
// A tenth of a second: many updates.
constexpr int kCopies = 32;
constexpr int kRounds = 2;

// AdamW in memory of the host, 28 bytes per element; each run of the next span.
class HostUpdate {
 public:
  HostUpdate(device::Device& host, optim::Kernels& kernels, const UpdateRateSizes& sizes)
      : host_(host),
        kernels_(kernels),
        sizes_(sizes),
        memory_(host.allocate(Tier::kHost, static_cast<std::size_t>(sizes.numel * kUpdateBytes),
                              Role::kOther)) {
    for (std::int64_t begin = 0; begin < sizes.numel; begin += sizes.span_numel) {
      run();  // touches the pages
    }
  }
  void run() {
    const std::int64_t numel = sizes_.numel;
    auto* const floats = reinterpret_cast<float*>(memory_.data()) + begin_;
    std::byte* const halves = memory_.data() + numel * 12 + begin_ * 2;
    optim::UpdateSpan span;
    span.master = floats;
    span.states = {floats + numel, floats + 2 * numel};
    span.gradient = halves;
    span.gradient_dtype = DType::kBFloat16;
    span.parameter = halves + numel * 2;
    span.parameter_dtype = DType::kBFloat16;
    span.numel = sizes_.span_numel;
    begin_ = (begin_ + sizes_.span_numel) % numel;
    optim::UpdateScalars scalars;
    scalars.lr = 1e-3;
    kernels_.start_update(optim::RuleOptions(), scalars, span, host_.stream(StreamKind::kReduce))
        .wait();
  }

 private:
  device::Device& host_;
  optim::Kernels& kernels_;
  const UpdateRateSizes sizes_;
  device::Memory memory_;
  std::int64_t begin_ = 0;
};

double seconds(std::int64_t begin_ns, std::int64_t end_ns) {
  return static_cast<double>(end_ns - begin_ns) * 1e-9;
}

// Large enough to keep a GPU busy, and done in a few milliseconds.
constexpr std::int64_t kSide = 4096;
constexpr int kProducts = 16;
// What a backward takes, over its large products at this rate: attention and all that is bound by
// memory besides. A GPT of 1.4 billion parameters on an H200: 1.28 at 32,768 tokens, 1.42 at 8,192
// (products of ones, which are a tenth faster).
constexpr double kOverProducts = 1.25;

double product_flops_per_s(int cuda_device) {
  const at::NoGradGuard no_grad;
  const SteadyClock clock;
  // Not ones: a GPU that flips fewer bits takes less power, and is faster than with any model.
  const at::Tensor factor =
      at::sin(
          at::arange(kSide * kSide,
                     at::TensorOptions(at::kFloat)
                         .device(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(cuda_device)))))
          .reshape({kSide, kSide})
          .to(at::kBFloat16);
  at::Tensor product = at::mm(factor, factor);  // makes the library ready
  std::int64_t begin_ns = 0;
  for (int i = 0; i <= kProducts; ++i) {
    at::mm_out(product, factor, factor);
    if (i == 0) {
      product.select(0, 0).select(0, 0).item<float>();  // waits
      begin_ns = clock.now_ns();
    }
  }
  product.select(0, 0).select(0, 0).item<float>();
  const double flops = 2.0 * kSide * kSide * kSide * kProducts;
  return flops / (static_cast<double>(clock.now_ns() - begin_ns) * 1e-9);
}

}  // namespace

std::int64_t UpdateRateSizes::host_bytes() const {
  return numel * kUpdateBytes + 2 * kCopyPlaces * static_cast<std::int64_t>(copy_bytes);
}

// Half for updates, half for copies.
UpdateRateSizes update_rate_sizes(std::int64_t free_host_bytes) {
  std::int64_t bytes = kMostBytes;
  while (bytes > kLeastBytes && bytes > free_host_bytes / kPart) {
    bytes /= 2;
  }
  UpdateRateSizes sizes;
  sizes.numel = bytes / 2 / kUpdateBytes;
  sizes.span_numel = sizes.numel / kSpans;
  sizes.copy_bytes = static_cast<std::size_t>(bytes / 2 / (2 * kCopyPlaces));
  return sizes;
}

planner::UpdateRates measure_update_rates(int cuda_device, int num_threads,
                                          const optim::CoreShare& share,
                                          const UpdateRateSizes& sizes) {
  const SteadyClock clock;
  const auto host = device::make_cpu_device();
  const auto kernels =
      optim::make_cpu_kernels(num_threads, optim::cores_for_threads(num_threads, share));
  device::CudaDeviceOptions options;
  options.index = cuda_device;
  const auto device = device::make_cuda_device(options);
  HostUpdate update(*host, *kernels, sizes);
  const std::size_t copy_bytes = sizes.copy_bytes;
  const auto on_device = device->allocate(Tier::kDevice, 2 * copy_bytes, Role::kOther);
  const auto pinned = device->allocate(Tier::kPinned, 2 * kCopyPlaces * copy_bytes, Role::kOther);
  device::Stream& read = device->stream(StreamKind::kRead);
  device::Stream& write = device->stream(StreamKind::kWrite);
  const double copied = static_cast<double>(kCopies) * static_cast<double>(copy_bytes);
  // Copies one way or both, beside updates as long as they run; bytes per second of each.
  struct Rates {
    double copies = 0;
    double updates = 0;
  };
  const auto run = [&](bool goes_up, bool updates) {
    Pending up;
    Pending down;
    const std::int64_t begin = clock.now_ns();
    for (int i = 0; i < kCopies; ++i) {
      std::byte* const place =
          pinned.data() + static_cast<std::size_t>(2 * (i % kCopyPlaces)) * copy_bytes;
      if (goes_up) {
        up = device->start_copy(on_device.data(), place, copy_bytes, read);
      }
      down =
          device->start_copy(place + copy_bytes, on_device.data() + copy_bytes, copy_bytes, write);
    }
    int num_updates = 0;
    while (updates && (!up.done() || !down.done())) {
      update.run();
      ++num_updates;
    }
    up.wait();
    down.wait();
    const double took_s = seconds(begin, clock.now_ns());
    return Rates{copied / took_s,
                 28.0 * static_cast<double>(sizes.span_numel) * num_updates / took_s};
  };
  planner::UpdateRates best;
  for (int round = 0; round < kRounds; ++round) {
    // What goes up does so in backward for the most part; what goes down, beside the update. They
    // slow each other down, and it is so in a step.
    const Rates beside = run(/*goes_up=*/false, /*updates=*/true);
    best.d2h_bytes_per_s = std::max(best.d2h_bytes_per_s, beside.copies);
    best.cpu_bytes_per_s = std::max(best.cpu_bytes_per_s, beside.updates);
    const Rates all = run(/*goes_up=*/true, /*updates=*/true);
    best.h2d_bytes_per_s = std::max(best.h2d_bytes_per_s, all.copies);
    best.host_bytes_per_s = std::max(best.host_bytes_per_s, all.updates + 2 * all.copies);
    best.h2d_alone_bytes_per_s =
        std::max(best.h2d_alone_bytes_per_s, run(/*goes_up=*/true, /*updates=*/false).copies);
  }
  return best;
}

double expected_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens) {
  // Two products, of two operations per element each.
  return kOverProducts * 4.0 * static_cast<double>(num_params) * static_cast<double>(num_tokens) /
         product_flops_per_s(cuda_device);
}

}  // namespace tessera
