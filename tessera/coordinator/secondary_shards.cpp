#include "tessera/coordinator/secondary_shards.h"

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using shard::Param;

SecondaryShards::SecondaryShards(comm::Group& group, device::Device& device,
                                 shard::ParamTable& params)
    : group_(group),
      device_(device),
      params_(params),
      slots_(static_cast<std::size_t>(params.num_params())) {
  TESSERA_INVARIANT(params.num_ranks() % group.size() == 0, "secondary shards over ", group.size(),
                    " of ", params.num_ranks(), " ranks");
}

SecondaryShards::~SecondaryShards() {
  for (const Slot& slot : slots_) {
    wait_ignoring_failure(slot.made);
    wait_ignoring_failure(slot.brought);
  }
}

std::int64_t SecondaryShards::numel_of(const Param& param) const {
  return param.layout().padded_numel() / group_.size();
}

bool SecondaryShards::has(const Param& param) const {
  const Slot& slot = slot_of(param);
  return slot.is_made && slot.version == param.version();
}

void SecondaryShards::keep(const Param& param, bool by_all) {
  if (!by_all || param.dynamic() || param.shard_is_full() || has(param) ||
      param.layout().numel() == 0) {
    return;
  }
  Slot& slot = slot_of(param);
  const std::size_t bytes =
      static_cast<std::size_t>(numel_of(param)) * bytes_of(param.layout().dtype());
  if (slot.memory.data() == nullptr) {
    slot.is_on_host = param.placement().secondary != Tier::kDevice;
    slot.memory =
        device_.allocate(slot.is_on_host ? Tier::kPinned : Tier::kDevice, bytes, Role::kShard);
  }
  // The compute stream is behind this gather and behind all readers of the memory; it does not wait
  // for the link.
  device::Stream& compute = device_.stream(device::StreamKind::kCompute);
  device::Stream& write = device_.stream(device::StreamKind::kWrite);
  if (slot.is_on_host) {
    write.wait(compute.record());
    kept_bytes_ += bytes;
  }
  slot.made = device_.start_copy(
      slot.memory.data(),
      static_cast<const std::byte*>(param.full()) + static_cast<std::size_t>(group_.rank()) * bytes,
      bytes, slot.is_on_host ? write : compute);
  slot.version = param.version();
  slot.is_made = true;
}

comm::Gather SecondaryShards::start_gather(const Param& param, void* full, device::Stream& stream) {
  Slot& slot = slot_of(param);
  TESSERA_INVARIANT(has(param), "the secondary shard of parameter '", param.name(),
                    slot.is_made ? detail::concat("' is of update ", slot.version)
                                 : std::string("' was never made"),
                    "; the parameter is at update ", param.version());
  stream.wait(slot.made);
  std::byte* shard = slot.memory.data();
  if (slot.is_on_host) {
    shard = static_cast<std::byte*>(full) +
            static_cast<std::size_t>(group_.rank()) * slot.memory.bytes();
    slot.brought = device_.start_copy(shard, slot.memory.data(), slot.memory.bytes(), stream);
    brought_bytes_ += slot.memory.bytes();
  }
  return {shard, full, numel_of(param), param.layout().dtype(), param.name()};
}

device::Pending SecondaryShards::with_copies(const Param& param,
                                             const device::Pending& last_use) const {
  const Slot& slot = slot_of(param);
  return slot.is_on_host && !slot.made.done() ? device::Pending::all({last_use, slot.made})
                                              : last_use;
}

std::uint64_t SecondaryShards::hash_of_versions(std::span<const int> ids) const {
  std::uint64_t hash = 0;
  for (const int id : ids) {
    const std::uint64_t version = slot_of(params_[id]).version;
    hash = comm::hash_bytes(&version, sizeof(version), hash);
  }
  return hash;
}

}  // namespace tessera::coordinator
