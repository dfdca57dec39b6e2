#include "tessera/core/ledger.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

void raise_to(std::atomic<std::size_t>& peak, std::size_t bytes) {
  std::size_t seen = peak.load(std::memory_order_relaxed);
  while (seen < bytes && !peak.compare_exchange_weak(seen, bytes, std::memory_order_relaxed)) {
  }
}

// --- the report ---

// An option, and the bytes that it takes off the tier.
struct Change {
  std::string text;
  std::size_t gives_bytes = 0;
  // Gives as little of it as is needed; otherwise all or nothing.
  bool is_gradual = false;

  std::size_t moved_bytes(std::size_t missing_bytes) const {
    return is_gradual ? std::min(gives_bytes, missing_bytes) : gives_bytes;
  }
};

std::string both(std::size_t bytes) {
  return detail::concat(bytes, " B (", approximate_bytes(bytes), ")");
}

// The tiers that lie in the same memory as `tier`.
std::vector<Tier> same_memory(Tier tier, bool device_is_host) {
  const bool is_host =
      tier == Tier::kPinned || tier == Tier::kHost || (tier == Tier::kDevice && device_is_host);
  if (!is_host) {
    return {tier};
  }
  return device_is_host ? std::vector{Tier::kDevice, Tier::kPinned, Tier::kHost}
                        : std::vector{Tier::kPinned, Tier::kHost};
}

// One line each; "gives" is said in bytes where all of it goes.
std::string line(const Change& change, std::size_t missing_bytes) {
  if (!change.is_gradual) {
    return detail::concat("  ", change.text, ": gives ", both(change.gives_bytes), "\n");
  }
  return detail::concat("  ", change.text, ": needs to give ",
                        both(change.moved_bytes(missing_bytes)), " of ", both(change.gives_bytes),
                        "\n");
}

// What could come free, by what holds it.
struct Holdings {
  std::size_t full_bytes = 0;
  std::size_t optimizer_bytes = 0;
  std::size_t shard_bytes = 0;
  std::size_t beyond_bytes = 0;  // not in the ledger
};

std::vector<Change> changes_for(Tier tier, bool device_is_host, const Holdings& holdings) {
  const bool is_own_device = tier == Tier::kDevice && !device_is_host;
  const std::string down = is_own_device || tier == Tier::kNvme ? "host" : "nvme";
  std::vector<Change> changes;
  changes.push_back(
      {"live.limit_bytes lower (gathered parameters; at least the largest unit stays)",
       holdings.full_bytes, true});
  changes.push_back({"place.optimizer=" + down, holdings.optimizer_bytes, false});
  changes.push_back({"place.parameters=" + down, holdings.shard_bytes, false});
  if (tier == Tier::kDevice) {
    changes.push_back(
        {"a smaller batch or sequence (activations are in what is used beyond the ledger)",
         holdings.beyond_bytes, true});
  }
  std::erase_if(changes, [](const Change& change) { return change.gives_bytes == 0; });
  return changes;
}

// The smallest that is enough first; or, where none is, the fewest that are together.
std::string advice(std::vector<Change> changes, std::size_t missing_bytes) {
  const auto is_enough = [&](const Change& change) { return change.gives_bytes >= missing_bytes; };
  const auto too_small = std::stable_partition(changes.begin(), changes.end(), is_enough);
  std::stable_sort(changes.begin(), too_small, [&](const Change& a, const Change& b) {
    return a.moved_bytes(missing_bytes) < b.moved_bytes(missing_bytes);
  });
  std::stable_sort(too_small, changes.end(),
                   [](const Change& a, const Change& b) { return a.gives_bytes > b.gives_bytes; });
  if (too_small != changes.begin()) {
    std::string text = "any one of these would fit, the smallest change first:\n";
    for (auto change = changes.begin(); change != too_small; ++change) {
      text += line(*change, missing_bytes);
    }
    return text;
  }
  std::string text;
  std::size_t still_missing = missing_bytes;
  for (const Change& change : changes) {
    if (still_missing == 0) {
      break;
    }
    text += line(change, still_missing);
    still_missing -= std::min(still_missing, change.gives_bytes);
  }
  if (still_missing == 0) {
    return "none of these is enough alone; together they fit:\n" + text;
  }
  if (text.empty()) {
    return "nothing in the ledger could be freed; other processes may hold the memory\n";
  }
  return detail::concat("not even all of these fit, ", both(still_missing),
                        " would still be missing; use more ranks, or a smaller model:\n", text);
}

}  // namespace

std::string_view to_string(Tier tier) {
  constexpr std::array<std::string_view, kNumTiers> kNames = {"device", "pinned", "host", "nvme"};
  return kNames[static_cast<std::size_t>(tier)];
}

std::string_view to_string(Role role) {
  constexpr std::array<std::string_view, kNumRoles> kNames = {"shard",     "full",    "gradient",
                                                              "optimizer", "staging", "other"};
  return kNames[static_cast<std::size_t>(role)];
}

void Ledger::add(Cell& cell, std::size_t bytes) {
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
  const auto reset = [](Cell& cell) {
    cell.peak.store(cell.current.load(std::memory_order_relaxed), std::memory_order_relaxed);
    // A charge between the load and the store has been overwritten; what it still holds counts.
    raise_to(cell.peak, cell.current.load(std::memory_order_relaxed));
  };
  for (auto& roles : cells_) {
    std::for_each(roles.begin(), roles.end(), reset);
  }
  std::for_each(tiers_.begin(), tiers_.end(), reset);
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
    if (peak_bytes(static_cast<Tier>(tier)) == 0) {
      continue;
    }
    const auto as_tier = static_cast<Tier>(tier);
    for (std::size_t role = 0; role < kNumRoles; ++role) {
      const auto as_role = static_cast<Role>(role);
      if (peak_bytes(as_tier, as_role) != 0) {
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

std::string memory_report(const Ledger& ledger, Tier tier, std::size_t asked_bytes,
                          std::size_t free_bytes, std::size_t total_bytes, bool device_is_host) {
  const std::vector<Tier> tiers = same_memory(tier, device_is_host);
  const auto held = [&](Role role) {
    std::size_t bytes = 0;
    for (const Tier each : tiers) {
      bytes += ledger.current_bytes(each, role);
    }
    return bytes;
  };
  std::size_t held_bytes = 0;
  for (const Tier each : tiers) {
    held_bytes += ledger.current_bytes(each);
  }

  std::string text = detail::concat("asked for ", both(asked_bytes), " of ", to_string(tier),
                                    " memory, ", both(free_bytes));
  if (total_bytes != 0) {
    text += " of " + both(total_bytes);
  }
  // Where enough is free, it is not in one piece; as much as was asked for must then come free.
  const bool is_in_pieces = free_bytes >= asked_bytes;
  const std::size_t missing_bytes = is_in_pieces ? asked_bytes : asked_bytes - free_bytes;
  text += is_in_pieces ? " are free, but not in one piece\n"
                       : " are free: " + both(missing_bytes) + " are missing\n";
  text += "who holds what:\n" + ledger.table();

  const std::size_t used_bytes = total_bytes - std::min(total_bytes, free_bytes);
  const std::size_t beyond_bytes = used_bytes - std::min(used_bytes, held_bytes);
  if (beyond_bytes != 0) {
    text += detail::concat("in use beyond this: ", both(beyond_bytes),
                           " (activations, caches of an allocator, other processes)\n");
  }
  Holdings holdings;
  holdings.full_bytes = held(Role::kFull);
  holdings.optimizer_bytes = held(Role::kOptimizer);
  holdings.shard_bytes = held(Role::kShard);
  holdings.beyond_bytes = beyond_bytes;
  text += advice(changes_for(tier, device_is_host, holdings), missing_bytes);
  text.pop_back();
  return text;
}

}  // namespace tessera
