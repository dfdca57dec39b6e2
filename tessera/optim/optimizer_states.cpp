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

}  // namespace

void OptimizerStates::TileWrites::drop() {
  for (const Write& write : writes_) {
    device::wait_ignoring_failure(write.written);
  }
  writes_.clear();
}

tier::Lease OptimizerStates::TileWrites::acquire(tier::BufferPool& pool, std::size_t bytes) {
  std::optional<tier::Lease> lease = pool.try_acquire(bytes);
  while (!lease && !writes_.empty()) {
    retire_oldest();
    lease = pool.try_acquire(bytes);
  }
  return lease ? std::move(*lease) : pool.acquire(bytes);
}

void OptimizerStates::TileWrites::add(tier::Lease lease, device::Pending written) {
  writes_.push_back({std::move(lease), std::move(written)});
}

void OptimizerStates::TileWrites::finish() {
  while (!writes_.empty()) {
    retire_oldest();
  }
}

void OptimizerStates::TileWrites::retire_oldest() {
  const Write oldest = std::move(writes_.front());
  writes_.pop_front();
  oldest.written.wait();
}

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
  if (!params_[id].trainable()) {
    return;  // nothing updates it
  }
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

// Those that stream through slots are without padding.
std::int64_t OptimizerStates::numel_in_pieces(int id) const {
  return streams(id) && !are_resident(id) ? params_[id].range().numel
                                          : params_[id].layout().shard_numel();
}

std::int64_t OptimizerStates::most_in_piece(int id) const {
  if (is_on_nvme(id)) {
    return options_.sub_group_numel;
  }
  return streams(id) && !are_resident(id) ? slot_numel_ : std::numeric_limits<std::int64_t>::max();
}

OptimizerStates::Piece OptimizerStates::piece_at(int id, std::int64_t begin) const {
  const std::int64_t offset = slots_[static_cast<std::size_t>(id)].offset;
  Piece piece;
  piece.begin = begin;
  piece.numel = std::min(most_in_piece(id), numel_in_pieces(id) - begin);
  piece.offset = static_cast<std::uint64_t>(std::max<std::int64_t>(offset, 0)) +
                 num_tensors(id) * float_bytes(begin);
  piece.tensor_bytes =
      is_on_nvme(id) ? tier::whole_blocks(float_bytes(piece.numel))
      : streams(id) && !are_resident(id)
          ? float_bytes((piece.numel + kStreamedStep - 1) / kStreamedStep * kStreamedStep)
          : tensor_bytes(id);
  return piece;
}

std::vector<OptimizerStates::Piece> OptimizerStates::pieces(int id) const {
  std::vector<Piece> pieces;
  for (std::int64_t begin = 0; begin < numel_in_pieces(id); begin += pieces.back().numel) {
    pieces.push_back(piece_at(id, begin));
  }
  return pieces;
}

std::vector<OptimizerStates::Part> OptimizerStates::parts(int id, std::size_t number,
                                                          std::int64_t begin,
                                                          std::int64_t numel) const {
  TESSERA_INVARIANT(has(id) && number < num_tensors(id) && begin >= 0 &&
                        begin % shard::kShardStep == 0 && numel >= 0 &&
                        begin + numel <= params_[id].layout().shard_numel(),
                    "elements [", begin, ", +", numel, ") of tensor ", number, " of parameter '",
                    params_[id].name(), "', whose shard has ", params_[id].layout().shard_numel());
  std::vector<Part> parts;
  const std::int64_t end = std::min(begin + numel, numel_in_pieces(id));
  while (begin < end) {
    const Piece piece = piece_at(id, begin - begin % most_in_piece(id));
    Part& part = parts.emplace_back();
    part.begin = begin;
    part.numel = std::min(end, piece.begin + piece.numel) - begin;
    part.offset =
        piece.offset + number * piece.tensor_bytes + float_bytes(part.begin - piece.begin);
    begin += part.numel;
  }
  return parts;
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
  }
}

void OptimizerStates::take_memory(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  TESSERA_INVARIANT(slot.exists, "parameter '", params_[id].name(), "' has no states");
  if (slot.has_memory || is_on_nvme(id)) {
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
  slot.has_memory = true;
}

std::vector<std::string_view> OptimizerStates::tensor_names(int id) const {
  std::vector<std::string_view> names;
  if (!is_own_master(params_[id].layout().dtype())) {
    names.emplace_back("master");
  }
  const auto states = state_names(rule_);
  names.insert(names.end(), states.begin(), states.end());
  return names;
}

void OptimizerStates::allocate_extents(int id) {
  const shard::Param& param = params_[id];
  const std::vector<std::string_view> names = tensor_names(id);
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
  TileWrites writes;
  for (const Piece& piece : master_tiles(param.id())) {
    const std::size_t values_bytes = static_cast<std::size_t>(piece.numel) * bytes_of(dtype);
    const std::size_t master_bytes = on_nvme ? piece.tensor_bytes : 0;
    const std::size_t lease_bytes =
        master_bytes + (param.is_on_nvme() ? tier::whole_blocks(values_bytes) : 0);
    tier::Lease lease;
    if (lease_bytes > 0) {
      lease = writes.acquire(*options_.buffers, lease_bytes);
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
      device::Pending written =
          options_.states->start_write(piece.offset, lease.data(), master_bytes);
      writes.add(std::move(lease), std::move(written));
    }
  }
  writes.finish();
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

// D2H copies go on the one stream that is never made to wait for others: updates that wait until
// something has been read cannot hold them up.
device::Pending OptimizerStates::start_read(int id, std::size_t number, std::int64_t begin,
                                            std::int64_t numel, std::byte* to) const {
  std::vector<device::Pending> reads;
  std::int64_t end = begin;
  for (const Part& part : parts(id, number, begin, numel)) {
    std::byte* const out = to + float_bytes(part.begin - begin);
    const std::size_t bytes = float_bytes(part.numel);
    if (is_on_nvme(id)) {
      reads.push_back(options_.states->start_read(part.offset, out, tier::whole_blocks(bytes)));
    } else if (are_on_device(id)) {
      reads.push_back(options_.device.start_copy(
          out, memory(id) + part.offset, bytes, options_.device.stream(device::StreamKind::kComm)));
    } else {
      device::copy_host(out, memory(id) + part.offset, bytes);
    }
    end = part.begin + part.numel;
  }
  device::fill_host(to + float_bytes(end - begin), 0, float_bytes(begin + numel - end));
  return device::Pending::all(std::move(reads));
}

void OptimizerStates::write(int id, std::size_t number, std::int64_t begin, std::int64_t numel,
                            const std::byte* from) {
  const std::int64_t most = std::max<std::int64_t>(params_[id].range().numel - begin, 0);
  TESSERA_INVARIANT(numel % shard::kShardStep == 0 || numel >= most, "elements [", begin, ", +",
                    numel, ") of parameter '", params_[id].name(), "' end inside a block");
  for (const Part& part : parts(id, number, begin, std::min(numel, most))) {
    const std::byte* const in = from + float_bytes(part.begin - begin);
    const std::size_t bytes = float_bytes(part.numel);
    if (is_on_nvme(id)) {
      const std::size_t blocks = tier::whole_blocks(bytes);
      const std::lock_guard<std::mutex> lock(writes_mutex_);
      tier::Lease lease = writes_.acquire(*options_.buffers, blocks);
      device::copy_host(lease.data(), in, bytes);
      std::memset(lease.data() + bytes, 0, blocks - bytes);
      device::Pending written = options_.states->start_write(part.offset, lease.data(), blocks);
      writes_.add(std::move(lease), std::move(written));
    } else if (are_on_device(id)) {
      options_.device
          .start_copy(memory(id) + part.offset, in, bytes,
                      options_.device.stream(device::StreamKind::kWrite))
          .wait();
    } else {
      device::copy_host(memory(id) + part.offset, in, bytes);
    }
  }
}

// What is on NVMe passes through leases.
template <typename StartRead>
std::vector<float> OptimizerStates::read_tiles(int id, bool on_nvme,
                                               const StartRead& start_read) const {
  const std::int64_t numel = params_[id].layout().shard_numel();
  std::vector<float> values(static_cast<std::size_t>(numel));
  if (!on_nvme) {
    start_read(0, numel, reinterpret_cast<std::byte*>(values.data())).wait();
    return values;
  }
  for (std::int64_t begin = 0; begin < numel; begin += options_.sub_group_numel) {
    const std::int64_t count = std::min(options_.sub_group_numel, numel - begin);
    const tier::Lease lease = options_.buffers->acquire(tier::whole_blocks(float_bytes(count)));
    start_read(begin, count, lease.data()).wait();
    std::memcpy(values.data() + begin, lease.data(), float_bytes(count));
  }
  return values;
}

std::vector<float> OptimizerStates::read(int id, std::size_t number) const {
  return read_tiles(id, is_on_nvme(id), [&](std::int64_t begin, std::int64_t numel, std::byte* to) {
    return start_read(id, number, begin, numel, to);
  });
}

std::vector<float> OptimizerStates::read_parameter(int id) const {
  const shard::Param& param = params_[id];
  param.updated().wait();
  return read_tiles(id, param.is_on_nvme(),
                    [&](std::int64_t begin, std::int64_t numel, std::byte* to) {
                      return shard::start_read_shard(param, options_.parameters, begin, numel, to);
                    });
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
  for (std::size_t number = 0; number < states.tensors.size(); ++number) {
    const std::vector<float>& values = states.tensors[number];
    write(id, number, 0, static_cast<std::int64_t>(values.size()),
          reinterpret_cast<const std::byte*>(values.data()));
  }
}

}  // namespace tessera::optim
