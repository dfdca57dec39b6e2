#include "tessera/device/device.h"

namespace tessera::device {

std::string_view to_string(StreamKind kind) {
  switch (kind) {
    case StreamKind::kCompute:
      return "compute";
    case StreamKind::kGather:
      return "gather";
    case StreamKind::kRead:
      return "read";
    case StreamKind::kWrite:
      return "write";
    case StreamKind::kReduce:
      return "reduce";
    case StreamKind::kComm:
      return "comm";
  }
  return "unknown";
}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    give_back_ = std::exchange(other.give_back_, nullptr);
  }
  return *this;
}

void Memory::reset() noexcept {
  data_ = nullptr;
  bytes_ = 0;
  if (const auto give_back = std::exchange(give_back_, nullptr)) {
    give_back();
  }
}

}  // namespace tessera::device
