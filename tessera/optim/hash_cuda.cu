// Hashes on an NVIDIA GPU: content_hash.cuh, added up by all threads.
#include <cstddef>

#include "tessera/optim/content_hash.cuh"
#include "tessera/optim/cuda_elements.cuh"
#include "tessera/optim/cuda_launch.h"

namespace tessera::optim::cuda {
namespace {

constexpr int kBlocksPerProcessor = 8;
constexpr int kWarp = 32;
static_assert(kThreads % kWarp == 0);

__global__ void __launch_bounds__(kThreads)
    add_hash(const std::uint64_t* __restrict__ words, std::int64_t bytes, unsigned long long* sum) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t num_words = bytes / kHashWordBytes;
  std::uint64_t terms = 0;
  for (std::int64_t i = thread; i < num_words; i += num_threads) {
    terms += hash_term(words[i], static_cast<std::uint64_t>(i));
  }
  const auto rest = static_cast<int>(bytes % kHashWordBytes);
  if (thread == 0 && rest > 0) {
    const auto* tail = reinterpret_cast<const unsigned char*>(words + num_words);
    std::uint64_t word = 0;
    for (int i = 0; i < rest; ++i) {
      word |= static_cast<std::uint64_t>(tail[i]) << (8 * i);
    }
    terms += hash_term(word, static_cast<std::uint64_t>(num_words));
  }
  for (int half = kWarp / 2; half > 0; half /= 2) {
    terms += __shfl_down_sync(0xffffffffU, terms, half);
  }
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(sum, static_cast<unsigned long long>(terms));
  }
}

}  // namespace

void launch_hash(const void* data, std::int64_t bytes, std::uint64_t* sum, cudaStream_t stream) {
  constexpr std::int64_t kPart = kThreads * kHashWordBytes;
  const unsigned grid = grid_of((bytes + kPart - 1) / kPart, kBlocksPerProcessor);
  add_hash<<<grid, kThreads, 0, stream>>>(static_cast<const std::uint64_t*>(data), bytes,
                                          reinterpret_cast<unsigned long long*>(sum));
  device::check_cuda("hash kernel", cudaGetLastError());
}

}  // namespace tessera::optim::cuda
