#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"

namespace tessera::device {

bool cuda_built() { return false; }

int num_cuda_devices() { return 0; }

std::string cuda_description() {
  return "not built with CUDA; it needs a torch with CUDA and the CUDA toolkit when it is "
         "configured (TESSERA_CUDA=ON says what is missing)";
}

std::unique_ptr<Device> make_cuda_device(CudaDeviceOptions options) {
  throw DeviceError(detail::concat("cuda:", options.index, ": ", cuda_description()));
}

}  // namespace tessera::device
