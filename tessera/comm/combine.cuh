// How a reduction makes one number of two: once for CPU and GPU, so that their bits are the same.
//
// Threads: stateless.
#pragma once

#include <cmath>
#include <type_traits>

#include "tessera/core/host_device.cuh"

namespace tessera::comm {

template <typename Wide>
TESSERA_HOST_DEVICE bool is_nan(Wide value) {
  if constexpr (std::is_floating_point_v<Wide>) {
    return std::isnan(value);
  } else {
    return false;
  }
}

struct Add {
  template <typename Wide>
  TESSERA_HOST_DEVICE Wide operator()(Wide sum, Wide value) const {
    if constexpr (std::is_integral_v<Wide>) {
      // Wraps around as every backend's integer sum does; signed overflow would be undefined.
      using Unsigned = std::make_unsigned_t<Wide>;
      return static_cast<Wide>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(value));
    } else {
      return sum + value;
    }
  }
};
struct Max {
  template <typename Wide>
  TESSERA_HOST_DEVICE Wide operator()(Wide best, Wide value) const {
    return is_nan(best) || !(value > best || is_nan(value)) ? best : value;
  }
};
struct Min {
  template <typename Wide>
  TESSERA_HOST_DEVICE Wide operator()(Wide best, Wide value) const {
    return is_nan(best) || !(value < best || is_nan(value)) ? best : value;
  }
};

}  // namespace tessera::comm
