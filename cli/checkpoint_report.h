// What `tessera checkpoint` says of saves, as tables.
//
// Parameters that are alike but for numbers in their names (blocks.0, blocks.1) are one row.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/comparison.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::cli {

struct SaveView {
  std::string name;  // of its directory, without those above it
  checkpoint::Manifest manifest;
  std::int64_t made_at_s = 0;  // since 1970
};

// One row per save.
std::string saves_table(const std::vector<SaveView>& saves, std::int64_t now_s);

// All of one: parameters, bytes by kind, options, what the engine and the program keep in it.
std::string save_screen(const SaveView& save, std::int64_t now_s);

// Values and forms side by side, tensors with how many elements differ, the first of many; empty:
// nothing differs.
std::string differences_table(const checkpoint::CheckpointDifferences& differences);

// Of all its files.
std::uint64_t file_bytes(const checkpoint::Manifest& manifest);

// "45 s", "12 min", "3 h", "5 days".
std::string age_text(std::int64_t seconds);

}  // namespace tessera::cli
