#include "tessera/planner/cuda_refusal.h"

#include <string>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/byte_sum.h"
#include "tessera/planner/placement_cost.h"

namespace tessera::planner {
namespace {

[[noreturn]] void refuse(const PlacementOptions& options, const ByteSum& need, const char* memory,
                         const char* budget, std::int64_t budget_bytes, const char* otherwise) {
  throw ConfigError(detail::concat("the model does not fit: one of ", options.num_ranks,
                                   options.num_ranks == 1 ? " rank" : " ranks", " needs ",
                                   approximate_bytes(need.total()), " of ", memory,
                                   " memory: ", need.text(), "; ", budget, " allows ",
                                   approximate_bytes(budget_bytes), ". Raise ", budget,
                                   " to at least ", exact_bytes(need.total()), otherwise));
}

}  // namespace

void refuse_device(const PlacementOptions& options, const Lines& shards,
                   const DeviceNeed& besides) {
  ByteSum need;
  need.add("parameters", shards.bytes(Tier::kDevice, Role::kShard));
  need.add("gradients", shards.bytes(Tier::kDevice, Role::kGradient));
  need.add("optimizer states", shards.bytes(Tier::kDevice, Role::kOptimizer));
  need.add("arena (the largest unit)", besides.arena_bytes);
  need.add("slots of the update", besides.slot_bytes);
  const bool is_wished = options.parameters == Wish::kDevice || options.optimizer == Wish::kDevice;
  refuse(options, need, "device", "memory.device", options.device_bytes,
         is_wished
             ? ", use more ranks, or let more live elsewhere (place.parameters, place.optimizer)"
             : ", or use more ranks");
}

void refuse_host(const PlacementOptions& options, const Lines& shards, const HostNeed& besides) {
  const auto in_host = [&shards](Role role) {
    return shards.bytes(Tier::kPinned, role) + shards.bytes(Tier::kHost, role);
  };
  ByteSum need;
  need.add("parameters", in_host(Role::kShard));
  need.add("gradients", in_host(Role::kGradient));
  need.add("optimizer states", in_host(Role::kOptimizer));
  need.add("new parameters on their way", in_host(Role::kStaging));
  need.add("staging of the network's calls", besides.comm_bytes);
  need.add("buffers of NVMe", besides.pool_bytes);
  need.add("checksums", options.verify ? checksum_bytes(shards.bytes(Tier::kNvme)) : 0);
  refuse(options, need, "host", "memory.host", options.host_bytes,
         options.has_nvme ? ", or use more ranks"
                          : ", use more ranks, or give a directory for what does not fit "
                            "(nvme.paths, --nvme DIR)");
}

}  // namespace tessera::planner
