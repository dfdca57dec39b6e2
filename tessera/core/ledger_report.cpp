#include "tessera/core/ledger_report.h"

#include <algorithm>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

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
    return "nothing in the ledger could make room; other processes may hold the memory\n";
  }
  return detail::concat("not even all of these fit, ", both(still_missing),
                        " would still be missing; use more ranks, or a smaller model:\n", text);
}

}  // namespace

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
