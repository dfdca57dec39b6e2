// Where the bytes of a shard live, and who updates them: the one answer that planner, parameters,
// loader, reducer, optimizer and inspection share.
//
// A CPU-only machine is the case in which device and host are one memory: a placement there says
// kDevice, or kNvme.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

// A kind of memory. kHost is pageable and kPinned page-locked memory of the host; a placement says
// kHost for both, since what a discrete device reads is always pinned.
enum class Tier : std::uint8_t { kDevice, kPinned, kHost, kNvme };
inline constexpr std::size_t kNumTiers = 4;
std::string_view to_string(Tier tier);

enum class Updater : std::uint8_t { kCpu, kDevice };

// Of one parameter's shard on this rank.
struct Placement {
  Tier parameter = Tier::kDevice;
  Tier gradient = Tier::kDevice;
  Tier states = Tier::kDevice;  // with the master weights, where the parameter is not its own
  Updater updater = Updater::kDevice;
  // kDevice or kHost, of the secondary shard, where there is one (coordinator/secondary_shards.h).
  Tier secondary = Tier::kDevice;

  bool uses_nvme() const {
    return parameter == Tier::kNvme || gradient == Tier::kNvme || states == Tier::kNvme;
  }
  bool operator==(const Placement&) const = default;
};

}  // namespace tessera
