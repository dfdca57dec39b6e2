// Runtimes on a stand-in for a GPU: memory of its own, and streams that are late at random.
#pragma once

#include <utility>

#include "tessera/engine/runtime.h"
#include "testing/mock_device.h"

namespace tessera {

inline RuntimeOptions on_late_device() {
  RuntimeOptions options{-1, 1};
  options.make_device = [](device::CpuDeviceOptions host) {
    device::MockDeviceOptions late;
    late.mode = device::LateMode::kRandom;
    late.own_memory = true;
    late.host = std::move(host);
    return device::make_mock_device(std::move(late));
  };
  return options;
}

}  // namespace tessera
