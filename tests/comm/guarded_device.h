// A late double whose memory the host really cannot touch: the addresses that it gives out have no
// access rights, and only its copies know where the bytes are. A program that reads or writes such
// memory by itself ends at once.
#pragma once

#include <memory>

#include "testing/mock_device.h"

namespace tessera::comm {

// `options.own_memory` is set here.
std::unique_ptr<device::Device> make_guarded_device(device::MockDeviceOptions options);

}  // namespace tessera::comm
