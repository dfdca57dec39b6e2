// Memory for transfers, in pages as large as the system has.
//
// A direct transfer hands the disk a list of pages. In pages of 4 KiB a request of 1 MiB is a list
// of 256, in huge ones it is one entry, and a virtual disk was seen to read half as fast again.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace tessera::tier {

// Aligned to huge pages, and filled with bytes of which no two blocks are alike: some disks store
// zeros and equal blocks for nothing, and would be measured too fast.
class IoMemory {
 public:
  explicit IoMemory(std::size_t bytes);
  std::span<std::byte> bytes() const { return {data_.get(), bytes_}; }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> data_;
  std::size_t bytes_;
};

}  // namespace tessera::tier
