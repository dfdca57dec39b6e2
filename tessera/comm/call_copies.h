// Copies between the memory of a call, which its caller gave, and the memory that the network
// reaches. For most groups that is one memory, and copies are made at once. Where the caller's
// memory is that of a device, which the host must not touch, they are work of the device's comm
// stream.
//
// Why a stream of their own: a caller may order any other stream behind the very call that the
// copies belong to, and they would wait for themselves. Nothing is ever ordered behind a call on
// this one, so what was started comes to its end by itself, and a group that has failed can still
// wait for it before it tells the owners of the memory.
//
// Threads: one at a time. Not for the thread that starts calls: finish() blocks.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>

#include "tessera/device/device.h"

namespace tessera::comm {

class CallCopies {
 public:
  // `device`: whose memory calls are given; null: memory of the host.
  explicit CallCopies(device::Device* device) : device_(device) {}
  CallCopies(const CallCopies&) = delete;
  CallCopies& operator=(const CallCopies&) = delete;
  ~CallCopies() {
    try {
      finish();
    } catch (...) {  // another failure is on its way; here only the end of the copies matters
    }
  }

  // Either side may be the device's or the host's. Both stay valid until finish().
  void add(void* to, const void* from, std::size_t bytes) {
    if (to == from || bytes == 0) {
      return;
    }
    if (device_ == nullptr) {
      std::memcpy(to, from, bytes);
    } else {
      last_ = device_->start_copy(to, from, bytes, device_->stream(device::StreamKind::kComm));
    }
  }

  // Blocks until all are made; throws what went wrong.
  void finish() { std::exchange(last_, {}).wait(); }

 private:
  device::Device* const device_;
  device::Pending last_;  // of a stream: when it is done, so is all before it
};

}  // namespace tessera::comm
