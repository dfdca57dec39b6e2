#include "tessera/core/ledger.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

void raise_to(std::atomic<std::size_t>& peak, std::size_t bytes) {
  std::size_t seen = peak.load(std::memory_order_relaxed);
  while (seen < bytes && !peak.compare_exchange_weak(seen, bytes, std::memory_order_relaxed)) {
  }
}

}  // namespace

std::string_view to_string(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kPinned:
      return "pinned";
    case Tier::kHost:
      return "host";
    case Tier::kNvme:
      return "nvme";
  }
  return "unknown";
}

std::string_view to_string(Role role) {
  switch (role) {
    case Role::kShard:
      return "shard";
    case Role::kFull:
      return "full";
    case Role::kGradient:
      return "gradient";
    case Role::kOptimizer:
      return "optimizer";
    case Role::kStaging:
      return "staging";
    case Role::kOther:
      return "other";
  }
  return "unknown";
}

void Ledger::add(Cell& cell, std::size_t bytes) {
  cell.used.store(true, std::memory_order_relaxed);
  // Every value that `current` ever takes passes through here, so the peak is exact.
  raise_to(cell.peak, cell.current.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

bool Ledger::subtract(Cell& cell, std::size_t bytes) {
  std::size_t held = cell.current.load(std::memory_order_relaxed);
  while (held >= bytes) {
    if (cell.current.compare_exchange_weak(held, held - bytes, std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void Ledger::reset_peak(Cell& cell) {
  cell.peak.store(cell.current.load(std::memory_order_relaxed), std::memory_order_relaxed);
  // A charge between the load and the store has been overwritten; what it still holds counts.
  raise_to(cell.peak, cell.current.load(std::memory_order_relaxed));
}

void Ledger::charge(Tier tier, Role role, std::size_t bytes) {
  const auto tier_index = static_cast<std::size_t>(tier);
  // The tier first, and last in discharge(): its sum is never below one of its cells.
  add(tiers_[tier_index], bytes);
  add(cells_[tier_index][static_cast<std::size_t>(role)], bytes);
}

void Ledger::discharge(Tier tier, Role role, std::size_t bytes) {
  const auto tier_index = static_cast<std::size_t>(tier);
  Cell& cell = cells_[tier_index][static_cast<std::size_t>(role)];
  TESSERA_INVARIANT(subtract(cell, bytes), "ledger: ", bytes, " B given back to ", to_string(tier),
                    "/", to_string(role), ", which holds ", cell.current.load(), " B");
  TESSERA_INVARIANT(subtract(tiers_[tier_index], bytes), "ledger: the sum of tier ",
                    to_string(tier), " is below its cells");
}

std::size_t Ledger::current_bytes(Tier tier, Role role) const {
  return cells_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)].current.load(
      std::memory_order_relaxed);
}

std::size_t Ledger::peak_bytes(Tier tier, Role role) const {
  return cells_[static_cast<std::size_t>(tier)][static_cast<std::size_t>(role)].peak.load(
      std::memory_order_relaxed);
}

std::size_t Ledger::current_bytes(Tier tier) const {
  return tiers_[static_cast<std::size_t>(tier)].current.load(std::memory_order_relaxed);
}

std::size_t Ledger::peak_bytes(Tier tier) const {
  return tiers_[static_cast<std::size_t>(tier)].peak.load(std::memory_order_relaxed);
}

void Ledger::reset_peaks() {
  for (auto& roles : cells_) {
    std::for_each(roles.begin(), roles.end(), reset_peak);
  }
  std::for_each(tiers_.begin(), tiers_.end(), reset_peak);
}

std::string Ledger::table() const {
  std::ostringstream out;
  const auto line = [&out](std::string_view tier, std::string_view role, std::string_view current,
                           std::string_view peak) {
    out << std::left << std::setw(8) << tier << std::setw(11) << role << std::right << std::setw(20)
        << current << std::setw(20) << peak << '\n';
  };
  line("tier", "role", "now", "peak");
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    if (!tiers_[tier].used.load(std::memory_order_relaxed)) {
      continue;
    }
    const auto as_tier = static_cast<Tier>(tier);
    for (std::size_t role = 0; role < kNumRoles; ++role) {
      const auto as_role = static_cast<Role>(role);
      if (cells_[tier][role].used.load(std::memory_order_relaxed)) {
        line(to_string(as_tier), to_string(as_role),
             approximate_bytes(current_bytes(as_tier, as_role)),
             approximate_bytes(peak_bytes(as_tier, as_role)));
      }
    }
    line(to_string(as_tier), "all", approximate_bytes(current_bytes(as_tier)),
         approximate_bytes(peak_bytes(as_tier)));
  }
  return out.str();
}

}  // namespace tessera
