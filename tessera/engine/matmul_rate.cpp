#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/clock.h"
#include "tessera/engine/update_rates.h"

namespace tessera {
namespace {

// Large enough to keep a GPU busy, and done in a few milliseconds.
constexpr std::int64_t kSide = 4096;
constexpr int kProducts = 16;

double product_flops_per_s(int cuda_device) {
  const at::NoGradGuard no_grad;
  const SteadyClock clock;
  const at::Tensor factor = at::ones(
      {kSide, kSide}, at::TensorOptions(at::kBFloat16).device(at::Device(at::kCUDA, cuda_device)));
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

double least_backward_s(int cuda_device, std::int64_t num_params, std::int64_t num_tokens) {
  // Two products, of two operations per element each.
  return 4.0 * static_cast<double>(num_params) * static_cast<double>(num_tokens) /
         product_flops_per_s(cuda_device);
}

}  // namespace tessera
