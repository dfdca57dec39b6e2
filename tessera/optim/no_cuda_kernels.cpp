#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tessera/optim/kernels.h"

namespace tessera::optim {

std::unique_ptr<Kernels> make_cuda_kernels(device::Device& device) {
  throw DeviceError(detail::concat("updates on ", device.name(), ": ", device::cuda_description()));
}

}  // namespace tessera::optim
