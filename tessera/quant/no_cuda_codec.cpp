#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tessera/quant/block_codec.h"

namespace tessera::quant {

std::unique_ptr<comm::Codec> make_cuda_block_codec(const BlockFormat& format,
                                                   device::Device& device) {
  check_block_format(format);
  throw DeviceError(
      detail::concat(to_string(format), " on ", device.name(), ": ", device::cuda_description()));
}

}  // namespace tessera::quant
