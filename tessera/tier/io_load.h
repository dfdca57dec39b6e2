// A steady load on an engine and the rate that comes out: what the measurement of a directory and
// `tessera bench-io` have in common.
//
// Ranges go through the file in order and begin anew at its end. As many as memory holds are given
// to the engine at once; whenever the oldest is done the next is given. A mixed load alternates, so
// that as much is read as is written.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {

// A new file in `directory` that has no name: it is gone as soon as it is closed, however the
// process ends. IoError if nothing can be written there, ConfigError as of open_io_file().
std::unique_ptr<IoFile> open_nameless(const std::string& directory, DirectIo mode);

// transfer_memory(), filled with bytes of which no two blocks are alike: some disks store zeros and
// equal blocks for nothing, and would be measured too fast.
class IoMemory {
 public:
  explicit IoMemory(std::size_t bytes);
  std::span<std::byte> bytes() const { return {memory_.data(), bytes_}; }

 private:
  device::Memory memory_;
  std::size_t bytes_;
};

enum class IoMix : std::uint8_t { kRead, kWrite, kMixed };

struct IoRates {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
};

struct IoLoad {
  const IoFile* file = nullptr;
  std::uint64_t file_bytes = 0;      // all of it written; at least two ranges
  std::size_t range_bytes = 0;       // whole blocks
  std::span<std::byte> memory = {};  // aligned to kBlockBytes, at least two ranges
};

// For `seconds`, and two ranges at least. Throws what a transfer failed with, after all that was
// started is done.
IoRates run_load(IoEngine& engine, const IoLoad& load, IoMix mix, double seconds);

// Writes the file from its beginning until `bytes` are there or `seconds` have passed; how many are
// there, in whole ranges and two of them at least. What is measured afterwards finds its blocks.
std::uint64_t fill_file(IoEngine& engine, const IoLoad& load, std::uint64_t bytes, double seconds);

}  // namespace tessera::tier
