#include "tessera/optim/optimizer_states.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"

namespace tessera::optim {
namespace {

std::size_t float_bytes(std::int64_t numel) {
  return static_cast<std::size_t>(numel) * sizeof(float);
}

// A tile on its way to NVMe: its lease goes back when it has been written, not before.
class TileWrite {
 public:
  TileWrite() = default;
  TileWrite(const TileWrite&) = delete;
  TileWrite& operator=(const TileWrite&) = delete;
  // After a failure, which is on its way to the caller.
  ~TileWrite() { device::wait_ignoring_failure(written_); }

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

OptimizerStates::OptimizerStates(shard::ParamTable& params, const RuleOptions& rule,
                                 const OptimizerOptions& options)
    : params_(params),
      rule_(rule),
      options_(options),
      is_discrete_(options.device.is_discrete()),
      slots_(static_cast<std::size_t>(params.num_params())) {
  for (int id = 0; id < params.num_params(); ++id) {
    uses_nvme_ = uses_nvme_ || params[id].placement().uses_nvme();
    check_placement(id);
  }
  fit_slots();
}

void OptimizerStates::check_placement(int id) const {
  const Placement& placement = params_[id].placement();
  const std::string& name = params_[id].name();
  TESSERA_INVARIANT(
      !params_[id].is_on_nvme() || (options_.parameters != nullptr && options_.parameters->has(id)),
      "parameter '", name, "' is on NVMe, and has no space there");
  TESSERA_INVARIANT(placement.states != Tier::kNvme || options_.states != nullptr,
                    "states of parameter '", name, "' are on NVMe, and there is no store");
  TESSERA_INVARIANT(!placement.uses_nvme() || options_.buffers != nullptr, "parameter '", name,
                    "' is on NVMe, and there are no buffers to update it in");
  TESSERA_INVARIANT(!is_discrete_ || placement.updater == Updater::kCpu || !placement.uses_nvme(),
                    "parameter '", name, "' is updated by ", options_.device.name(),
                    ", and is on NVMe");
}

// The largest piece of which a slot holds all tensors and the parameter.
void OptimizerStates::fit_slots() {
  std::size_t element_bytes = 0;
  bool is_needed = false;
  for (int id = 0; id < params_.num_params(); ++id) {
    if (streams(id)) {
      is_needed = is_needed || params_[id].trainable();
      element_bytes = std::max(element_bytes, num_tensors(id) * sizeof(float) +
                                                  bytes_of(params_[id].layout().dtype()) +
                                                  options_.slot_gradient_bytes);
    }
  }
  if (element_bytes == 0 || (!is_needed && options_.num_slots == 0)) {
    return;  // nothing was planned for what is frozen
  }
  const auto step = static_cast<std::size_t>(shard::kShardStep);
  slot_numel_ = static_cast<std::int64_t>(options_.slot_bytes / element_bytes / step * step);
  TESSERA_CHECK(options_.num_slots > 0 && slot_numel_ > 0, ConfigError,
                "states of the optimizer come to ", options_.device.name(), " in ",
                options_.num_slots, " slots of ", options_.slot_bytes,
                " bytes; a slot needs at least ", element_bytes * step,
                ". Raise memory.device, or set optim.cpu_share to 1");
}

bool OptimizerStates::is_on_cpu(int id) const {
  return is_discrete_ ? params_[id].placement().updater == Updater::kCpu : uses_nvme_;
}

bool OptimizerStates::streams(int id) const {
  return is_discrete_ && !is_on_cpu(id) && (!are_resident(id) || params_[id].is_on_host());
}

std::size_t OptimizerStates::num_tensors(int id) const {
  return num_state_tensors(params_[id].layout().dtype(),
                           static_cast<int>(state_names(rule_).size()));
}

std::size_t OptimizerStates::tensor_bytes(int id) const {
  const std::size_t bytes = float_bytes(params_[id].layout().shard_numel());
  return is_discrete_ || uses_nvme_ ? tier::whole_blocks(bytes) : bytes;
}

std::vector<OptimizerStates::Piece> OptimizerStates::pieces(int id) const {
  const bool in_slots = streams(id) && !are_resident(id);
  const std::int64_t numel =
      in_slots ? params_[id].range().numel : params_[id].layout().shard_numel();
  const std::int64_t cut = is_on_nvme(id) ? options_.sub_group_numel
                           : in_slots     ? slot_numel_
                                          : std::numeric_limits<std::int64_t>::max();
  const Slot& slot = slots_[static_cast<std::size_t>(id)];
  const auto first = static_cast<std::uint64_t>(std::max<std::int64_t>(slot.offset, 0));
  std::vector<Piece> pieces;
  for (std::int64_t begin = 0; begin < numel; begin += pieces.back().numel) {
    Piece& piece = pieces.emplace_back();
    piece.begin = begin;
    piece.numel = std::min(cut, numel - begin);
    piece.offset = first + num_tensors(id) * float_bytes(begin);
    piece.tensor_bytes =
        is_on_nvme(id) ? tier::whole_blocks(float_bytes(piece.numel))
        : in_slots ? float_bytes((piece.numel + kStreamedStep - 1) / kStreamedStep * kStreamedStep)
                   : tensor_bytes(id);
  }
  return pieces;
}

float* OptimizerStates::tensor(int id, std::size_t number) const {
  return reinterpret_cast<float*>(memory(id) + number * tensor_bytes(id));
}

float* OptimizerStates::host_tensor(int id, std::size_t number) const {
  const bool in_place = is_on_cpu(id) || !is_discrete_;
  return in_place && !is_on_nvme(id) ? tensor(id, number) : nullptr;
}

void OptimizerStates::add(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  const std::string& name = params_[id].name();
  TESSERA_INVARIANT(!slot.exists, "parameter '", name, "' has its states already");
  TESSERA_CHECK(
      !streams(id) || slot_numel_ > 0, ConfigError, "parameter '", name,
      "' is to be trained, and memory was planned while everything of its kind was frozen: "
      "there is no slot for its update. Make the engine with it trainable, and freeze it "
      "afterwards");
  slot.exists = true;
  if (is_on_nvme(id)) {
    allocate_extents(id);
    return;
  }
  const std::size_t bytes = num_tensors(id) * tensor_bytes(id);
  const bool on_device = !is_on_cpu(id) && are_resident(id);
  slot.memory = is_on_cpu(id) ? options_.cpu().allocate(Tier::kDevice, bytes, Role::kOptimizer)
                              : options_.device.allocate(on_device ? Tier::kDevice : Tier::kPinned,
                                                         bytes, Role::kOptimizer);
  if (bytes > 0 && on_device) {
    device::Stream& stream = options_.device.stream(device::StreamKind::kReduce);
    options_.device.start_fill(slot.memory.data(), 0, bytes, stream).wait();
  } else {
    device::fill_host(slot.memory.data(), 0, bytes);
  }
}

void OptimizerStates::allocate_extents(int id) {
  const shard::Param& param = params_[id];
  std::vector<std::string_view> names;
  if (!is_own_master(param.layout().dtype())) {
    names.emplace_back("master");
  }
  const auto states = state_names(rule_);
  names.insert(names.end(), states.begin(), states.end());
  slots_[static_cast<std::size_t>(id)].offset = static_cast<std::int64_t>(options_.states->bytes());
  const std::vector<Piece> all = pieces(id);
  for (const Piece& piece : all) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      std::string name = detail::concat(names[i], " of parameter '", param.name(), "'");
      if (all.size() > 1) {
        name += detail::concat(" from element ", piece.begin, " of its shard");
      }
      const std::uint64_t offset = options_.states->allocate(piece.tensor_bytes, std::move(name));
      TESSERA_INVARIANT(offset == piece.offset + i * piece.tensor_bytes, names[i],
                        " of parameter '", param.name(), "' is at ", offset,
                        " in its store, not behind what was there");
    }
  }
}

void OptimizerStates::make_master(int id, const std::byte* host_copy) {
  const shard::Param& param = params_[id];
  if (is_own_master(param.layout().dtype()) || param.layout().shard_numel() == 0) {
    return;
  }
  param.updated().wait();
  if (!is_on_cpu(id) && are_resident(id)) {
    make_resident_master(param);
  } else {
    make_host_master(param, host_copy);
  }
}

void OptimizerStates::make_resident_master(const shard::Param& param) {
  device::Device& device = options_.device;
  device::Stream& stream = device.stream(device::StreamKind::kReduce);
  const std::int64_t numel = param.layout().shard_numel();
  float* const master = tensor(param.id(), 0);
  if (param.first_master() != nullptr) {
    device.start_copy(master, param.first_master(), float_bytes(numel), stream).wait();
    return;
  }
  device::Memory copy;
  const void* from = param.shard();
  if (param.is_on_host()) {
    const std::size_t bytes = param.layout().shard_bytes();
    copy = device.allocate(Tier::kDevice, bytes, Role::kStaging);
    std::ignore = device.start_copy(copy.data(), from, bytes, stream);
    from = copy.data();
  }
  options_.kernels.start_widen(master, from, param.layout().dtype(), numel, stream).wait();
}

// What a lease holds of a parameter on NVMe may be less than a piece of states in memory.
std::vector<OptimizerStates::Piece> OptimizerStates::master_tiles(int id) const {
  std::vector<Piece> tiles;
  for (const Piece& piece : pieces(id)) {
    for (std::int64_t begin = 0; begin < piece.numel; begin += options_.sub_group_numel) {
      tiles.push_back({piece.begin + begin, std::min(options_.sub_group_numel, piece.numel - begin),
                       piece.offset + float_bytes(begin), piece.tensor_bytes});
    }
  }
  return tiles;
}

// Tile by tile; what is on NVMe passes through leases.
void OptimizerStates::make_host_master(const shard::Param& param, const std::byte* host_copy) {
  const DType dtype = param.layout().dtype();
  const bool on_nvme = is_on_nvme(param.id());
  device::Stream& stream = options_.cpu().stream(device::StreamKind::kWrite);
  std::vector<std::byte> scratch;  // of a shard that the host cannot read
  TileWrite last;
  for (const Piece& piece : master_tiles(param.id())) {
    const std::size_t values_bytes = static_cast<std::size_t>(piece.numel) * bytes_of(dtype);
    const std::size_t master_bytes = on_nvme ? piece.tensor_bytes : 0;
    const std::size_t lease_bytes =
        master_bytes + (param.is_on_nvme() ? tier::whole_blocks(values_bytes) : 0);
    tier::Lease lease;
    if (lease_bytes > 0) {
      std::optional<tier::Lease> free = options_.buffers->try_acquire(lease_bytes);
      if (!free) {
        last.finish();
        free = options_.buffers->acquire(lease_bytes);
      }
      lease = std::move(*free);
    }
    float* const master =
        reinterpret_cast<float*>(on_nvme ? lease.data() : memory(param.id()) + piece.offset);
    if (param.first_master() != nullptr) {
      std::copy_n(param.first_master() + piece.begin, piece.numel, master);
    } else {
      const std::size_t begin = static_cast<std::size_t>(piece.begin) * bytes_of(dtype);
      const std::byte* values = host_copy != nullptr ? host_copy + begin : param.shard() + begin;
      if (param.is_on_nvme()) {
        options_.parameters
            ->start_read(param, piece.begin, piece.numel, lease.data() + master_bytes)
            .wait();
        values = lease.data() + master_bytes;
      } else if (host_copy == nullptr && is_discrete_ && !param.is_on_host()) {
        scratch.resize(values_bytes);
        copy_from_device(scratch.data(), values, values_bytes);
        values = scratch.data();
      }
      options_.cpu_kernels().start_widen(master, values, dtype, piece.numel, stream).wait();
    }
    if (on_nvme) {
      const std::size_t used = float_bytes(piece.numel);
      std::memset(lease.data() + used, 0, master_bytes - used);
      last.finish();
      device::Pending written =
          options_.states->start_write(piece.offset, lease.data(), master_bytes);
      last.replace(std::move(lease), std::move(written));
    }
  }
  last.finish();
}

void OptimizerStates::copy_from_device(void* to, const void* from, std::size_t bytes) const {
  options_.device.start_copy(to, from, bytes, options_.device.stream(device::StreamKind::kWrite))
      .wait();
}

SubGroupPlan OptimizerStates::plan() const {
  std::vector<SubGroupParam> shapes;
  shapes.reserve(slots_.size());
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    const bool is_updated = param.trainable() && is_on_cpu(id);
    TESSERA_INVARIANT(has(id) || !is_updated, "parameter '", param.name(),
                      "' is trainable and has no states");
    shapes.push_back({param.layout().shard_numel(), param.layout().dtype(), is_updated,
                      param.placement(), slots_[static_cast<std::size_t>(id)].offset});
  }
  return plan_sub_groups(shapes, options_.sub_group_numel,
                         static_cast<int>(state_names(rule_).size()));
}

std::vector<float> OptimizerStates::read(int id, std::size_t number) const {
  std::vector<float> values(static_cast<std::size_t>(params_[id].layout().shard_numel()));
  const bool on_device = are_on_device(id);
  for (const Piece& piece : pieces(id)) {
    const std::uint64_t from = piece.offset + number * piece.tensor_bytes;
    float* const to = values.data() + piece.begin;
    if (is_on_nvme(id)) {
      const tier::Lease lease = options_.buffers->acquire(piece.tensor_bytes);
      options_.states->start_read(from, lease.data(), piece.tensor_bytes).wait();
      std::memcpy(to, lease.data(), float_bytes(piece.numel));
    } else if (on_device) {
      copy_from_device(to, memory(id) + from, float_bytes(piece.numel));
    } else {
      std::memcpy(to, memory(id) + from, float_bytes(piece.numel));
    }
  }
  return values;
}

CarriedStates::Each OptimizerStates::take(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  CarriedStates::Each states;
  states.exists = true;
  states.updates = slot.updates;
  for (std::size_t number = 0; number < num_tensors(id); ++number) {
    states.tensors.push_back(read(id, number));
  }
  slot = Slot();
  return states;
}

void OptimizerStates::put(int id, const CarriedStates::Each& states) {
  TESSERA_INVARIANT(has(id) && !is_on_nvme(id), "states of parameter '", params_[id].name(),
                    "' are carried to where there is no memory for them");
  slots_[static_cast<std::size_t>(id)].updates = states.updates;
  device::Stream& stream = options_.device.stream(device::StreamKind::kWrite);
  for (std::size_t number = 0; number < states.tensors.size(); ++number) {
    for (const Piece& piece : pieces(id)) {
      std::byte* const to = memory(id) + piece.offset + number * piece.tensor_bytes;
      const float* const from = states.tensors[number].data() + piece.begin;
      if (are_on_device(id)) {
        options_.device.start_copy(to, from, float_bytes(piece.numel), stream).wait();
      } else {
        std::memcpy(to, from, float_bytes(piece.numel));
      }
    }
  }
}

std::vector<float> OptimizerStates::read_parameter(int id) const {
  const shard::Param& param = params_[id];
  std::vector<float> values(static_cast<std::size_t>(param.layout().shard_numel()));
  param.updated().wait();
  if (!param.is_on_nvme()) {
    copy_from_device(values.data(), param.shard(), float_bytes(param.layout().shard_numel()));
    return values;
  }
  options_.parameters->wait_written(id);
  const std::int64_t cut = options_.sub_group_numel;
  for (std::int64_t begin = 0; begin < param.layout().shard_numel(); begin += cut) {
    const std::int64_t numel = std::min(cut, param.layout().shard_numel() - begin);
    const tier::Lease lease = options_.buffers->acquire(tier::whole_blocks(float_bytes(numel)));
    options_.parameters->start_read(param, begin, numel, lease.data()).wait();
    std::memcpy(values.data() + begin, lease.data(), float_bytes(numel));
  }
  return values;
}

}  // namespace tessera::optim
