#include "tessera/optim/tiered_states.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"

namespace tessera::optim {
namespace {

// A tile on its way to the store: its lease goes back when it has been written, not before.
class TileWrite {
 public:
  TileWrite() = default;
  TileWrite(const TileWrite&) = delete;
  TileWrite& operator=(const TileWrite&) = delete;
  ~TileWrite() {
    try {
      written_.wait();
    } catch (const std::exception&) {
      // Something else has failed already, and is on its way to the caller.
    }
  }

  void replace(tier::Lease lease, device::Pending written) {
    finish();
    lease_ = std::move(lease);
    written_ = std::move(written);
  }
  void finish() {
    std::exchange(written_, {}).wait();
    lease_.reset();
  }

 private:
  tier::Lease lease_;
  device::Pending written_;
};

}  // namespace

TieredStates::TieredStates(shard::ParamTable& params, device::Device& device, Kernels& kernels,
                           const RuleOptions& rule, const TieredParts& parts)
    : params_(params),
      device_(device),
      kernels_(kernels),
      rule_(rule),
      parts_(parts),
      slots_(static_cast<std::size_t>(params.num_params())) {}

std::size_t TieredStates::num_tensors(int id) const {
  return num_state_tensors(params_[id].layout().dtype(),
                           static_cast<int>(state_names(rule_).size()));
}

std::vector<TieredStates::Tile> TieredStates::tiles(int id) const {
  const Slot& slot = slots_[static_cast<std::size_t>(id)];
  const std::int64_t shard_numel = params_[id].layout().shard_numel();
  std::vector<Tile> tiles;
  auto offset = static_cast<std::uint64_t>(std::max<std::int64_t>(slot.offset, 0));
  for (std::int64_t begin = 0; begin < shard_numel; begin += parts_.sub_group_numel) {
    const std::int64_t numel = std::min(parts_.sub_group_numel, shard_numel - begin);
    const std::size_t bytes = tier::whole_blocks(static_cast<std::size_t>(numel) * sizeof(float));
    tiles.push_back({begin, numel, bytes, offset});
    offset += num_tensors(id) * bytes;
  }
  return tiles;
}

void TieredStates::add(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  TESSERA_INVARIANT(!slot.exists, "parameter '", params_[id].name(), "' has its states already");
  if (stored(id).states) {
    allocate_extents(id);
  } else {
    std::size_t bytes = 0;
    for (const Tile& tile : tiles(id)) {
      bytes += num_tensors(id) * tile.tensor_bytes;
    }
    slot.memory = device_.allocate(Tier::kDevice, bytes, Role::kOptimizer);
    device::fill_host(slot.memory.data(), 0, bytes);  // the processor updates them in place
  }
  slot.exists = true;
}

void TieredStates::allocate_extents(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  const shard::Param& param = params_[id];
  std::vector<std::string_view> names;
  if (!is_own_master(param.layout().dtype())) {
    names.emplace_back("master");
  }
  const auto states = state_names(rule_);
  names.insert(names.end(), states.begin(), states.end());
  slot.offset = static_cast<std::int64_t>(parts_.states->bytes());
  const std::vector<Tile> all = tiles(id);
  for (const Tile& tile : all) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      std::string name = detail::concat(names[i], " of parameter '", param.name(), "'");
      if (all.size() > 1) {
        name += detail::concat(" from element ", tile.begin, " of its shard");
      }
      const std::uint64_t offset = parts_.states->allocate(tile.tensor_bytes, std::move(name));
      TESSERA_INVARIANT(offset == tile.states_offset + i * tile.tensor_bytes, names[i],
                        " of parameter '", param.name(), "' is at ", offset,
                        " in its store, not behind what was there");
    }
  }
}

void TieredStates::make_master(int id, const std::byte* values) {
  const shard::Param& param = params_[id];
  const DType dtype = param.layout().dtype();
  if (is_own_master(dtype)) {
    return;
  }
  param.updated().wait();
  device::Stream& stream = device_.stream(device::StreamKind::kWrite);
  const StoredParts where = stored(id);
  const std::size_t element_bytes = bytes_of(dtype);
  TileWrite last;
  for (const Tile& tile : tiles(id)) {
    const auto begin = static_cast<std::size_t>(tile.begin);
    const std::size_t parameter_bytes =
        tier::whole_blocks(static_cast<std::size_t>(tile.numel) * element_bytes);
    const std::size_t master_bytes = where.states ? tile.tensor_bytes : 0;
    const std::size_t lease_bytes = master_bytes + (where.parameter ? parameter_bytes : 0);
    tier::Lease lease;
    if (lease_bytes > 0) {
      std::optional<tier::Lease> free = parts_.buffers->try_acquire(lease_bytes);
      if (!free) {
        last.finish();
        free = parts_.buffers->acquire(lease_bytes);
      }
      lease = std::move(*free);
    }
    const std::byte* const shard = values != nullptr ? values : param.shard();
    const std::byte* from =
        where.parameter ? lease.data() + master_bytes : shard + begin * element_bytes;
    if (where.parameter) {
      parts_.parameters->start_read(param, tile.begin, tile.numel, lease.data() + master_bytes)
          .wait();
    }
    float* const master =
        where.states ? reinterpret_cast<float*>(lease.data()) : in_memory(id, 0) + begin;
    if (param.first_master() != nullptr) {
      std::copy_n(param.first_master() + begin, tile.numel, master);
    } else {
      kernels_.start_widen(master, from, dtype, tile.numel, stream).wait();
    }
    if (where.states) {
      const std::size_t used = static_cast<std::size_t>(tile.numel) * sizeof(float);
      std::memset(lease.data() + used, 0, master_bytes - used);
      last.finish();
      device::Pending written =
          parts_.states->start_write(tile.states_offset, lease.data(), master_bytes);
      last.replace(std::move(lease), std::move(written));
    }
  }
  last.finish();
}

SubGroupPlan TieredStates::plan() const {
  std::vector<SubGroupParam> shapes;
  shapes.reserve(slots_.size());
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    const Slot& slot = slots_[static_cast<std::size_t>(id)];
    const StoredParts where = stored(id);
    const bool is_updated = param.trainable() && !where.device_update;
    TESSERA_INVARIANT(slot.exists || !is_updated, "parameter '", param.name(),
                      "' is trainable and has no states");
    shapes.push_back({param.layout().shard_numel(), param.layout().dtype(), is_updated,
                      where.parameter, where.gradient, where.states, slot.offset});
  }
  return plan_sub_groups(shapes, parts_.sub_group_numel,
                         static_cast<int>(state_names(rule_).size()));
}

float* TieredStates::in_memory(int id, std::size_t tensor) const {
  std::byte* const data = slots_[static_cast<std::size_t>(id)].memory.data();
  if (data == nullptr) {
    return nullptr;
  }
  const auto shard_numel = static_cast<std::size_t>(params_[id].layout().shard_numel());
  return reinterpret_cast<float*>(data + tensor * tier::whole_blocks(shard_numel * sizeof(float)));
}

void TieredStates::read(int id, std::size_t tensor, float* to) const {
  for (const Tile& tile : tiles(id)) {
    const tier::Lease lease = parts_.buffers->acquire(tile.tensor_bytes);
    parts_.states
        ->start_read(tile.states_offset + tensor * tile.tensor_bytes, lease.data(),
                     tile.tensor_bytes)
        .wait();
    std::memcpy(to + tile.begin, lease.data(),
                static_cast<std::size_t>(tile.numel) * sizeof(float));
  }
}

void TieredStates::read_parameter(int id, float* to) const {
  const shard::Param& param = params_[id];
  param.updated().wait();
  parts_.parameters->wait_written(id);
  for (const Tile& tile : tiles(id)) {
    const tier::Lease lease = parts_.buffers->acquire(tile.tensor_bytes);
    parts_.parameters->start_read(param, tile.begin, tile.numel, lease.data()).wait();
    std::memcpy(to + tile.begin, lease.data(),
                static_cast<std::size_t>(tile.numel) * sizeof(float));
  }
}

}  // namespace tessera::optim
