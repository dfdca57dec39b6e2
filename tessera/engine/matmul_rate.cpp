#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/clock.h"
#include "tessera/engine/update_rates.h"

namespace tessera {
namespace {

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

double expected_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens) {
  // Two products, of two operations per element each.
  return kOverProducts * 4.0 * static_cast<double>(num_params) * static_cast<double>(num_tokens) /
         product_flops_per_s(cuda_device);
}

}  // namespace tessera
