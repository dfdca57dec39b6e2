// The device of a machine without an accelerator: all memory is the host's, and every stream runs
// its work on the calling thread, so everything is done when it has been started.
//
// For finding mistakes in the order of work this device is too kind; see mock_device.h.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/core/ledger.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"

namespace tessera::device {

struct CpuDeviceOptions {
  Ledger* ledger = nullptr;  // may be null; must outlive the device and its memory
  // Called once, with a sentence for people, when pinned memory could not be page-locked.
  std::function<void(const std::string&)> notice;
  Spans* spans = nullptr;  // may be null; must outlive the device
};

std::unique_ptr<Device> make_cpu_device(CpuDeviceOptions options = {});

}  // namespace tessera::device
