#include "tessera/device/cuda_connections.h"

#include <charconv>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tessera/core/error.h"

namespace tessera::device {
namespace {

constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";

// Somebody else has started CUDA on some device, so that it has read the environment.
bool is_cuda_started() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found,
                                                            7000, cudaEnableDefault, &result);
#else
  const cudaError_t code =
      cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &result);
#endif
  if (code != cudaSuccess || found == nullptr) {
    cudaGetLastError();
    return false;
  }
  const auto get_state = reinterpret_cast<CUresult (*)(CUdevice, unsigned*, int*)>(found);
  unsigned flags = 0;
  int is_active = 0;
  // Fails, and says nothing, where the driver has not been started at all.
  for (CUdevice device = 0; get_state(device, &flags, &is_active) == CUDA_SUCCESS; ++device) {
    if (is_active != 0) {
      return true;
    }
  }
  return false;
}

// What a process has once: its environment.
struct Asked {
  std::once_flag once;
  bool is_too_late = false;
};
Asked& asked() {
  static Asked state;
  return state;
}

}  // namespace

void ask_for_cuda_connections() {
  std::call_once(asked().once, [] {
    if (std::getenv(kVariable) == nullptr) {
      // First of all: asking whether CUDA has started may start its driver.
      ::setenv(kVariable, std::to_string(kCudaConnections).c_str(), /*overwrite=*/0);
      asked().is_too_late = is_cuda_started();
    }
  });
}

std::string why_too_few_cuda_connections() {
  ask_for_cuda_connections();
  if (asked().is_too_late) {
    return detail::concat("CUDA was in use before Tessera could ask for ", kCudaConnections,
                          " connections to the GPU, without which streams of ranks can wait for "
                          "each other for ever; set ",
                          kVariable, "=", kCudaConnections,
                          " in the environment of every rank, or make the runtime before anything "
                          "uses CUDA");
  }
  const char* const text = std::getenv(kVariable);
  const std::string_view given = text == nullptr ? "" : text;
  int connections = 0;
  std::from_chars(given.data(), given.data() + given.size(), connections);
  if (connections < kCudaConnections) {
    return detail::concat(kVariable, "=", given, " in the environment: with fewer than ",
                          kCudaConnections,
                          " connections to the GPU streams of ranks can wait for each other for "
                          "ever; raise it, or unset it");
  }
  return "";
}

}  // namespace tessera::device
