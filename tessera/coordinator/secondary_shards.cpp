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
    wait_ignoring_failure(slot.in_flight);
  }
}

std::int64_t SecondaryShards::numel_of(const Param& param) const {
  return param.layout().padded_numel() / group_.size();
}

bool SecondaryShards::has(const Param& param) const {
  const Slot& slot = slot_of(param);
  return slot.is_made && slot.version == param.version();
}

void SecondaryShards::take_memory(const Param& param, std::size_t bytes) {
  Slot& slot = slot_of(param);
  if (slot.memory.data() == nullptr) {
    slot.is_on_host = param.placement().secondary != Tier::kDevice;
    slot.memory =
        device_.allocate(slot.is_on_host ? Tier::kPinned : Tier::kDevice, bytes, Role::kShard);
  }
}

comm::KeptWires SecondaryShards::wires_to_keep(const Param& param, const comm::Codec& codec) {
  if (!is_kept(param) || has(param)) {
    return {};
  }
  const int num = num_kept_shards();
  take_memory(param,
              codec.wire_bytes(param.layout().shard_numel()) * static_cast<std::size_t>(num));
  Slot& slot = slot_of(param);
  slot.codec = &codec;
  slot.is_made = false;
  slot.arriving = param.version();
  return {slot.memory.data(), group_.rank() * num, num};
}

void SecondaryShards::keep(const Param& param, bool by_all) {
  if (!by_all || !is_kept(param) || has(param)) {
    return;
  }
  Slot& slot = slot_of(param);
  if (slot.codec != nullptr) {
    TESSERA_INVARIANT(slot.arriving == param.version(), "wires of parameter '", param.name(),
                      "' at update ", slot.arriving, " are kept for update ", param.version());
  }
  slot.version = param.version();
  slot.is_made = true;
  if (slot.codec != nullptr) {  // the gather has left it here, and computing is behind that
    slot.made = device_.stream(device::StreamKind::kCompute).record();
    kept_bytes_ += slot.is_on_host ? slot.memory.bytes() : 0;
    return;
  }
  const std::size_t bytes =
      static_cast<std::size_t>(numel_of(param)) * bytes_of(param.layout().dtype());
  take_memory(param, bytes);
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
}

std::size_t SecondaryShards::scratch_bytes(const Param& param) const {
  const Slot& slot = slot_of(param);
  return slot.codec != nullptr && slot.is_on_host ? slot.memory.bytes() : 0;
}

comm::Gather SecondaryShards::start_gather(const Param& param, void* full, std::byte* scratch,
                                           device::Stream& stream) {
  Slot& slot = slot_of(param);
  TESSERA_INVARIANT(has(param), "the secondary shard of parameter '", param.name(),
                    slot.is_made ? detail::concat("' is of update ", slot.version)
                                 : std::string("' was never made"),
                    "; the parameter is at update ", param.version());
  stream.wait(slot.made);
  std::byte* shard = slot.memory.data();
  if (slot.is_on_host) {
    shard = slot.codec != nullptr
                ? scratch
                : static_cast<std::byte*>(full) +
                      static_cast<std::size_t>(group_.rank()) * slot.memory.bytes();
    slot.brought = device_.start_copy(shard, slot.memory.data(), slot.memory.bytes(), stream);
    brought_bytes_ += slot.memory.bytes();
  }
  const shard::Layout& layout = param.layout();
  if (slot.codec != nullptr) {
    return {shard,        full,       layout.shard_numel(), layout.dtype(),
            param.name(), slot.codec, num_kept_shards()};
  }
  return {shard, full, numel_of(param), layout.dtype(), param.name()};
}

device::Pending SecondaryShards::with_copies(const Param& param,
                                             const device::Pending& last_use) const {
  const Slot& slot = slot_of(param);
  const bool is_copied = slot.is_on_host && slot.codec == nullptr;
  return is_copied && !slot.made.done() ? device::Pending::all({last_use, slot.made}) : last_use;
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
