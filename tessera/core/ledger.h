// Who holds how many bytes, per tier and role: the answer to "where did my memory go?".
//
// Every allocation of the library that grows with the model is charged here while it lives. The
// numbers are exact: they count the bytes asked for, rounded as they were really taken.
//
// Threads: every method may be called from any thread. A reader sees each cell exactly; cells
// that change at the same time need not belong to one moment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/core/placement.h"

namespace tessera {

enum class Role : std::uint8_t {
  kShard,      // this rank's pieces of the parameters
  kFull,       // gathered parameters (the arena)
  kGradient,   // gradient shards and buckets
  kOptimizer,  // master weights and moments
  kStaging,    // buffers of copies, collectives and I/O
  kOther,
};
inline constexpr std::size_t kNumRoles = 6;

std::string_view to_string(Role role);

class Ledger {
 public:
  void charge(Tier tier, Role role, std::size_t bytes);
  // REQUIRES: at least this many bytes are charged there; anything else is an InternalError.
  void discharge(Tier tier, Role role, std::size_t bytes);

  std::size_t current_bytes(Tier tier, Role role) const;
  std::size_t peak_bytes(Tier tier, Role role) const;
  std::size_t current_bytes(Tier tier) const;
  // The peak of the tier's sum, not the sum of the peaks.
  std::size_t peak_bytes(Tier tier) const;
  // Peaks start again from what is held now.
  void reset_peaks();

  // A table of current and peak bytes, one line per cell that was ever used.
  std::string table() const;

 private:
  struct Cell {
    std::atomic<std::size_t> current{0};
    std::atomic<std::size_t> peak{0};
  };
  static void add(Cell& cell, std::size_t bytes);
  // False, and nothing changed, when fewer bytes are charged.
  static bool subtract(Cell& cell, std::size_t bytes);

  std::array<std::array<Cell, kNumRoles>, kNumTiers> cells_;
  std::array<Cell, kNumTiers> tiers_;
};

// Why memory ran out, for people: what was asked for, who holds what, and the smallest change of
// options that would fit. `tier`: where `asked_bytes` were refused while `free_bytes` of
// `total_bytes` were free; a total of 0 is unknown. What is in use beyond the ledger (activations,
// caches of an allocator, other processes) is the rest of `total_bytes`. `device_is_host`: the
// device is a CPU, so only NVMe takes anything off it. Lines, without a line break at the end.
std::string memory_report(const Ledger& ledger, Tier tier, std::size_t asked_bytes,
                          std::size_t free_bytes, std::size_t total_bytes,
                          bool device_is_host = false);

}  // namespace tessera
