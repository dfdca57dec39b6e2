// Bytes of a test that live on a device.
#pragma once

#include <vector>

#include "tessera/device/device.h"

namespace tessera::comm {

using Bytes = std::vector<std::byte>;

// `source` stays valid until the stream has read it; what is done with the memory on other streams
// must be ordered behind this one.
inline device::Memory start_upload(device::Device& device, const Bytes& source,
                                   device::Stream& stream) {
  device::Memory memory = device.allocate(Tier::kDevice, source.size(), Role::kOther);
  static_cast<void>(device.start_copy(memory.data(), source.data(), source.size(), stream));
  return memory;
}

inline device::Memory upload(device::Device& device, const Bytes& source) {
  device::Stream& stream = device.stream(device::StreamKind::kRead);
  device::Memory memory = start_upload(device, source, stream);
  stream.record().wait();
  return memory;
}

inline device::Memory on_device(device::Device& device, std::size_t bytes) {
  return device.allocate(Tier::kDevice, bytes, Role::kOther);
}

inline Bytes download(device::Device& device, const device::Memory& memory) {
  Bytes bytes(memory.bytes());
  device
      .start_copy(bytes.data(), memory.data(), bytes.size(),
                  device.stream(device::StreamKind::kWrite))
      .wait();
  return bytes;
}

}  // namespace tessera::comm
