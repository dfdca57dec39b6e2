// Block-aligned memory with contents that tell where they came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "tessera/tier/io_engine.h"

namespace tessera::testing {

class Blocks {
 public:
  explicit Blocks(std::size_t count, std::uint8_t value = 0)
      : bytes_(count * tier::kBlockBytes),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(tier::kBlockBytes, bytes_ > 0 ? bytes_ : tier::kBlockBytes))) {
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
    std::memset(data_.get(), value, bytes_);
  }

  std::byte* data() const { return data_.get(); }
  std::byte* block(std::size_t index) const { return data_.get() + index * tier::kBlockBytes; }
  std::size_t bytes() const { return bytes_; }

  // Every word is unique to its place and to `seed`.
  void number(std::uint64_t seed) const {
    for (std::size_t i = 0; i < bytes_ / sizeof(std::uint64_t); ++i) {
      const std::uint64_t word = (seed << 32) + i + 1;
      std::memcpy(data_.get() + i * sizeof(word), &word, sizeof(word));
    }
  }
  bool operator==(const Blocks& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace tessera::testing
