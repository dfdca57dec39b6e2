// Memory that direct I/O takes, filled with a pattern in which no two blocks are alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "tessera/tier/io_engine.h"

namespace tessera::testing {

class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(std::aligned_alloc(
                  tier::kBlockBytes, std::max(tier::kBlockBytes, tier::whole_blocks(bytes)))),
              std::free) {
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
    std::memset(data_.get(), 0, bytes);
  }
  static AlignedBytes pattern(std::size_t bytes, std::uint64_t seed) {
    AlignedBytes made(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      made.data()[i] = static_cast<std::byte>(((seed + i) * 0x9E3779B97F4A7C15ULL) >> 56);
    }
    return made;
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }
  bool operator==(const AlignedBytes& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> data_;
};

}  // namespace tessera::testing
