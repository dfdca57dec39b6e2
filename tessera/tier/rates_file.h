// The small file in which measured rates are kept. Internal to tier.
//
// Reading believes nothing: a file that is too large, no JSON, of another version or device, or
// with a value out of range is as good as none. Writing replaces the file in one step and keeps
// what it said of other engines.
//
// Threads: stateless; the last of several writers wins.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/tier/io_measure.h"

namespace tessera::tier {

// What an entry is valid for.
struct RatesKey {
  std::string engine;
  bool is_direct = false;
  std::uint64_t device_id = 0;  // st_dev of the directory
};

std::optional<DiskRates> read_rates(const std::string& directory, const RatesKey& key);
// Empty, or why it could not be written; then the old file is as it was.
std::string write_rates(const std::string& directory, const RatesKey& key, const DiskRates& rates);

}  // namespace tessera::tier
