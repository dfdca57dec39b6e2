#include "tessera/device/cuda_times.h"

#include <algorithm>
#include <cmath>

#include "tessera/device/cuda_call.h"

namespace tessera::device {
namespace {

constexpr std::int64_t kMicrosecond = 1000;
constexpr std::int64_t kSecond = 1'000'000'000;

// The first tries pay for what CUDA sets up on first use.
constexpr int kFirstTries = 8;
constexpr std::int64_t kRenewEvery = kSecond;
constexpr std::int64_t kRetryAfter = kSecond / 10;
constexpr std::int64_t kMostWait = 200 * kMicrosecond;
constexpr std::int64_t kMostError = 20 * kMicrosecond;

}  // namespace

CudaTimes::CudaTimes(const Spans& spans, int device_index)
    : spans_(spans), pool_(device_index, cudaEventDefault) {
  cudaStream_t stream = nullptr;
  TESSERA_CUDA_CALL(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);
  stream_.reset(stream);
  for (int i = 0; i < kFirstTries; ++i) {
    const std::optional<Anchor> found = try_anchor(60 * kSecond);
    TESSERA_CHECK(found, DeviceError,
                  "the GPU did not reach an event on an idle stream within 60 s; another program "
                  "may hold it up (see nvidia-smi), or turn tracing off (trace.path)");
    const bool is_better = anchor_.event == nullptr || found->error_ns < anchor_.error_ns;
    const Anchor worse = is_better ? anchor_ : *found;
    anchor_ = is_better ? *found : anchor_;
    if (worse.event != nullptr) {
      pool_.give_back(worse.event);
    }
  }
  next_anchor_ns_ = anchor_.at_ns + kRenewEvery;
}

CudaTimes::~CudaTimes() {
  if (anchor_.event != nullptr) {
    pool_.give_back(anchor_.event);
  }
}

void CudaTimes::give_back(void* event) noexcept {
  pool_.give_back(static_cast<cudaEvent_t>(event));
}

std::optional<CudaTimes::Anchor> CudaTimes::try_anchor(std::int64_t limit_ns) {
  Anchor anchor;
  anchor.event = pool_.take();
  try {
    const std::int64_t before_ns = spans_.now_ns();
    TESSERA_CUDA_CALL(cudaEventRecord, anchor.event, stream_.get());
    while (true) {
      const cudaError_t code = cudaEventQuery(anchor.event);
      const std::int64_t waited_ns = spans_.now_ns() - before_ns;
      if (code == cudaSuccess) {
        anchor.error_ns = waited_ns / 2;
        anchor.at_ns = before_ns + anchor.error_ns;
        return anchor;
      }
      if (code != cudaErrorNotReady) {
        check_cuda("cudaEventQuery", code);
      }
      cudaGetLastError();  // not an error, but kept as one
      if (waited_ns > limit_ns) {
        pool_.give_back(anchor.event);
        return std::nullopt;
      }
    }
  } catch (...) {
    pool_.give_back(anchor.event);
    throw;
  }
}

void CudaTimes::renew_anchor_if_due() {
  const std::int64_t now_ns = spans_.now_ns();
  if (now_ns < next_anchor_ns_) {
    return;
  }
  const std::optional<Anchor> found = try_anchor(kMostWait);
  if (!found) {
    next_anchor_ns_ = now_ns + kRetryAfter;
    return;
  }
  const bool is_good = found->error_ns <= std::max(kMostError, anchor_.error_ns);
  pool_.give_back(is_good ? anchor_.event : found->event);
  if (is_good) {
    anchor_ = *found;
  }
  next_anchor_ns_ = now_ns + (is_good ? kRenewEvery : kRetryAfter);
}

std::optional<std::int64_t> CudaTimes::time_ns(void* event) {
  const std::lock_guard lock(mutex_);
  renew_anchor_if_due();
  float milliseconds = 0;  // below zero for what came before the anchor
  const cudaError_t code =
      cudaEventElapsedTime(&milliseconds, anchor_.event, static_cast<cudaEvent_t>(event));
  if (code == cudaErrorNotReady) {
    cudaGetLastError();  // not an error, but kept as one
    return std::nullopt;
  }
  check_cuda("cudaEventElapsedTime", code);
  return anchor_.at_ns + std::llround(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace tessera::device
