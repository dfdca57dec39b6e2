#include "tessera/optim/device_update.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"
#include "tessera/optim/sub_group.h"
#include "tessera/optim/update_batch.h"
#include "tessera/tier/store.h"

namespace tessera::optim {

using device::Pending;
using device::StreamKind;

DeviceUpdate::DeviceUpdate(shard::ParamTable& params, const RuleOptions& rule,
                           const OwnMemoryParts& own, const std::vector<StoredParts>& stored)
    : params_(params),
      rule_(rule),
      device_(*own.device),
      kernels_(*own.kernels),
      stored_(stored),
      read_(device_.stream(StreamKind::kRead)),
      write_(device_.stream(StreamKind::kWrite)),
      update_(device_.stream(StreamKind::kReduce)),
      states_(static_cast<std::size_t>(params.num_params())) {
  std::size_t element_bytes = 0;  // of a piece in its slot
  bool is_needed = false;
  for (int id = 0; id < params.num_params(); ++id) {
    if (is_ours(id) && needs_slot(id)) {
      is_needed = is_needed || params[id].trainable();
      element_bytes = std::max(element_bytes, num_tensors(params[id]) * sizeof(float) +
                                                  bytes_of(params[id].layout().dtype()));
    }
  }
  if (element_bytes == 0 || (!is_needed && own.num_slots == 0)) {
    return;  // nothing was planned for what is frozen
  }
  const auto step = static_cast<std::size_t>(shard::kShardStep);
  slot_numel_ = own.slot_bytes / element_bytes / step * step;
  TESSERA_CHECK(own.num_slots > 0 && slot_numel_ > 0, ConfigError,
                "states of the optimizer come to ", device_.name(), " in ", own.num_slots,
                " slots of ", own.slot_bytes, " bytes; a slot needs at least ",
                element_bytes * step, ". Raise memory.device, or set optim.cpu_share to 1");
  slots_.take_own(device_, own.num_slots, own.slot_bytes);
  thread_ = std::thread([this] { hand_over(); });
}

DeviceUpdate::~DeviceUpdate() {
  try {
    wait_all();
  } catch (const std::exception&) {  // whoever waited has been told
  }
  if (thread_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  // After a failure of one stream the others still use this memory.
  for (device::Stream* const stream : {&read_, &update_, &write_}) {
    try {
      stream->synchronize();
    } catch (const std::exception&) {  // here only the end of its work matters
    }
  }
}

std::size_t DeviceUpdate::num_tensors(const shard::Param& param) const {
  return num_state_tensors(param.layout().dtype(), static_cast<int>(state_names(rule_).size()));
}

std::size_t DeviceUpdate::tensor_bytes(const shard::Param& param) const {
  return tier::whole_blocks(static_cast<std::size_t>(param.layout().shard_numel()) * sizeof(float));
}

float* DeviceUpdate::resident_tensor(int id, std::size_t number) const {
  return reinterpret_cast<float*>(states_[static_cast<std::size_t>(id)].memory.data() +
                                  number * tensor_bytes(params_[id]));
}

std::vector<DeviceUpdate::Piece> DeviceUpdate::pieces_of(int id, std::int64_t numel) const {
  std::vector<Piece> pieces;
  const auto step = static_cast<std::int64_t>(slot_numel_);
  for (std::int64_t begin = 0; begin < numel; begin += step) {
    Piece piece;
    piece.param = id;
    piece.begin = begin;
    piece.numel = std::min(step, numel - begin);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// Vector accesses of kernels want each tensor aligned. Pieces before the last one of a shard are as
// long as a slot, which is a multiple of this.
std::size_t DeviceUpdate::stride(const Piece& piece) {
  return static_cast<std::size_t>((piece.numel + kStreamedStep - 1) / kStreamedStep *
                                  kStreamedStep);
}

std::size_t DeviceUpdate::piece_bytes(const Piece& piece) const {
  return num_tensors(params_[piece.param]) * stride(piece) * sizeof(float);
}

std::byte* DeviceUpdate::piece_home(const Piece& piece) const {
  return states_[static_cast<std::size_t>(piece.param)].memory.data() +
         num_tensors(params_[piece.param]) * static_cast<std::size_t>(piece.begin) * sizeof(float);
}

void DeviceUpdate::add(int id) {
  States& states = states_[static_cast<std::size_t>(id)];
  const shard::Param& param = params_[id];
  TESSERA_INVARIANT(!states.exists, "parameter '", param.name(), "' has its states already");
  TESSERA_CHECK(
      !needs_slot(id) || slot_numel_ > 0, ConfigError, "parameter '", param.name(),
      "' is to be trained, and memory was planned while everything of its kind was frozen: "
      "there is no slot for its update. Make the engine with it trainable, and freeze it "
      "afterwards");
  const std::size_t bytes = num_tensors(param) * tensor_bytes(param);
  states.memory =
      device_.allocate(is_resident(id) ? Tier::kDevice : Tier::kPinned, bytes, Role::kOptimizer);
  states.exists = true;
  if (bytes == 0) {
    return;
  }
  if (is_resident(id)) {
    device_.start_fill(states.memory.data(), 0, bytes, write_).wait();
  } else {
    device::fill_host(states.memory.data(), 0, bytes);
  }
}

// Through a slot where the states live on the host: kernels work on the device.
void DeviceUpdate::make_master(int id) {
  const shard::Param& param = params_[id];
  const DType dtype = param.layout().dtype();
  if (is_own_master(dtype) || param.layout().shard_numel() == 0) {
    return;
  }
  wait_all();
  put_slots_back();  // what was sent up is of before
  param.updated().wait();
  if (is_resident(id)) {
    make_resident_master(param);
    return;
  }
  const std::size_t element = bytes_of(dtype);
  std::byte* const slot = slots_.first_data();
  std::byte* const values = slot + slot_numel_ * sizeof(float);
  for (const Piece& piece : pieces_of(id, param.range().numel)) {
    const auto begin = static_cast<std::size_t>(piece.begin);
    const auto numel = static_cast<std::size_t>(piece.numel);
    if (param.first_master() != nullptr) {
      std::copy_n(param.first_master() + begin, numel, reinterpret_cast<float*>(piece_home(piece)));
      continue;
    }
    std::ignore =
        device_.start_copy(values, param.shard() + begin * element, numel * element, update_);
    std::ignore =
        kernels_.start_widen(reinterpret_cast<float*>(slot), values, dtype, piece.numel, update_);
    std::ignore = device_.start_copy(piece_home(piece), slot, numel * sizeof(float), update_);
  }
  update_.synchronize();
}

void DeviceUpdate::make_resident_master(const shard::Param& param) {
  if (param.first_master() != nullptr) {
    const auto numel = static_cast<std::size_t>(param.layout().shard_numel());
    device_
        .start_copy(resident_tensor(param.id(), 0), param.first_master(), numel * sizeof(float),
                    update_)
        .wait();
    return;
  }
  device::Memory copy;
  const void* from = param.shard();
  if (param.is_on_host()) {
    copy = device_.allocate(Tier::kDevice, param.layout().shard_bytes(), Role::kStaging);
    std::ignore = device_.start_copy(copy.data(), from, param.layout().shard_bytes(), update_);
    from = copy.data();
  }
  kernels_
      .start_widen(resident_tensor(param.id(), 0), from, param.layout().dtype(),
                   param.layout().shard_numel(), update_)
      .wait();
}

void DeviceUpdate::plan() {
  wait_all();
  put_slots_back();
  pieces_.clear();
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    States& states = states_[static_cast<std::size_t>(id)];
    states.first_piece = pieces_.size();
    states.num_pieces = 0;
    if (!param.trainable() || !is_ours(id) || !needs_slot(id)) {
      continue;
    }
    TESSERA_INVARIANT(has(id), "parameter '", param.name(), "' is trainable and has no states");
    const std::vector<Piece> pieces = pieces_of(id, param.range().numel);
    states.num_pieces = pieces.size();
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  }
}

// In a slot: the tensors as on the host, then the parameter.
std::byte* DeviceUpdate::parameter_place(const Piece& piece) const {
  const shard::Param& param = params_[piece.param];
  return param.is_on_host() ? piece.slot->data + num_tensors(param) * slot_numel_ * sizeof(float)
                            : param.shard() + static_cast<std::size_t>(piece.begin) *
                                                  bytes_of(param.layout().dtype());
}

void DeviceUpdate::start_up(const Piece& piece) {
  UpdateSlot& slot = *piece.slot;
  const shard::Param& param = params_[piece.param];
  slot.free.wait();
  piece.down.wait();
  for (; copies_up_.size() >= kMostCopiesUp; copies_up_.pop_front()) {
    copies_up_.front().wait();
  }
  if (const std::size_t bytes = piece_bytes(piece); bytes > 0 && !is_resident(piece.param)) {
    slot.up = device_.start_copy(slot.data, piece_home(piece), bytes, read_);
  }
  if (is_own_master(param.layout().dtype()) && param.is_on_host()) {
    const std::size_t bytes = static_cast<std::size_t>(piece.numel) * sizeof(float);
    slot.up = device_.start_copy(
        parameter_place(piece),
        param.shard() + static_cast<std::size_t>(piece.begin) * sizeof(float), bytes, read_);
  }
  copies_up_.push_back(slot.up);
}

UpdateTask DeviceUpdate::make_task(int id, const grad::ShardGradient& gradient,
                                   const UpdateScalars& scalars) {
  UpdateTask task;
  task.scalars = scalars;
  task.scalars.step = states_[static_cast<std::size_t>(id)].num_updates;
  task.scalars.weight_decay_scale = params_[id].spec().weight_decay_scale;
  task.span.gradient = gradient.values;
  task.span.gradient_dtype = gradient.dtype;
  task.span.numel = gradient.numel;
  return task;
}

DeviceUpdate::Item DeviceUpdate::make_item(int id, grad::Reducer& gradients,
                                           const UpdateScalars& scalars) {
  shard::Param& param = params_[id];
  const DType dtype = param.layout().dtype();
  Item item;
  item.param = id;
  item.done = std::make_shared<device::HandedOver>();
  param.set_updated(Pending(item.done));
  item.keeps = !gradients.has_gradient(id);
  if (item.keeps) {
    return item;
  }
  const grad::ShardGradient gradient = gradients.shard_gradient(id);
  item.task = make_task(id, gradient, scalars);
  item.takes_over = param.is_on_host() && !is_own_master(dtype) && gradient.dtype == dtype;
  if (item.takes_over) {
    item.made = std::make_shared<device::HandedOver>();
    param.set_device_copy({static_cast<const std::byte*>(gradient.values), Pending(item.made)});
  }
  return item;
}

void DeviceUpdate::start(std::span<const int> ids, grad::Reducer& gradients,
                         const UpdateScalars& scalars) {
  for (const StreamKind kind : {StreamKind::kCompute, StreamKind::kGather}) {
    update_.wait(device_.stream(kind).record());
  }
  for (const int id : ids) {
    states_[static_cast<std::size_t>(id)].num_updates += gradients.has_gradient(id) ? 1 : 0;
  }
  // First, so that no copy holds them up: they are small, or the first that are needed.
  update_resident(ids, gradients, scalars);
  std::deque<Item> items;
  for (const int id : ids) {
    const States& states = states_[static_cast<std::size_t>(id)];
    if (states.num_pieces > 0) {
      items.push_back(make_item(id, gradients, scalars));
    }
    for (std::size_t i = 0; i < states.num_pieces; ++i) {
      count_bytes(pieces_[states.first_piece + i]);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  last_update_ = update_.record();
  items_.insert(items_.end(), std::make_move_iterator(items.begin()),
                std::make_move_iterator(items.end()));
  changed_.notify_all();
}

void DeviceUpdate::update_resident(std::span<const int> ids, grad::Reducer& gradients,
                                   const UpdateScalars& scalars) {
  UpdateBatch batch(params_, kernels_, rule_, update_);
  for (const int id : ids) {
    const shard::Param& param = params_[id];
    if (needs_slot(id) || !gradients.has_gradient(id)) {
      continue;
    }
    UpdateTask task = make_task(id, gradients.shard_gradient(id), scalars);
    std::size_t next = 0;
    if (is_own_master(param.layout().dtype())) {
      task.span.master = reinterpret_cast<float*>(param.shard());
    } else {
      task.span.master = resident_tensor(id, next++);
      task.span.parameter = param.shard();
      task.span.parameter_dtype = param.layout().dtype();
    }
    for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
      task.span.states[i] = resident_tensor(id, next++);
    }
    batch.add(id, task);
  }
  batch.launch();
}

UpdateSpan DeviceUpdate::span_of(const Piece& piece, const Item& item) const {
  const DType dtype = params_[piece.param].layout().dtype();
  const auto begin = static_cast<std::size_t>(piece.begin);
  UpdateSpan span = item.task.span;
  const std::byte* gradient = nullptr;
  if (!item.keeps) {
    gradient = static_cast<const std::byte*>(span.gradient) + begin * bytes_of(span.gradient_dtype);
    span.gradient = gradient;
  }
  span.numel = piece.numel;
  std::size_t next = 0;
  const auto next_tensor = [&] {
    const std::size_t number = next++;
    return is_resident(piece.param)
               ? resident_tensor(piece.param, number) + begin
               : reinterpret_cast<float*>(piece.slot->data) + number * stride(piece);
  };
  // A gradient's memory is its reducer's, and written to.
  std::byte* const values =
      item.takes_over ? const_cast<std::byte*>(gradient) : parameter_place(piece);
  if (is_own_master(dtype)) {
    span.master = reinterpret_cast<float*>(values);
  } else {
    span.master = next_tensor();
    span.parameter = values;
    span.parameter_dtype = dtype;
  }
  for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
    span.states[i] = next_tensor();
  }
  return span;
}

void DeviceUpdate::update_piece(Piece& piece, const Item& item, bool is_last) {
  const shard::Param& param = params_[piece.param];
  update_.wait(piece.slot->up);
  const UpdateSpan span = span_of(piece, item);
  Pending updated = item.keeps ? start_parameter(kernels_, span, update_)
                               : kernels_.start_update(rule_, item.task.scalars, span, update_);
  if (is_last && item.made) {
    item.made->hand_over(updated);  // those before it come before it on their stream
  }
  if (param.is_on_host()) {
    const std::size_t element = bytes_of(param.layout().dtype());
    const std::size_t bytes = static_cast<std::size_t>(piece.numel) * element;
    const void* const from = is_own_master(param.layout().dtype()) ? span.master : span.parameter;
    write_.wait(updated);
    updated = device_.start_copy(param.shard() + static_cast<std::size_t>(piece.begin) * element,
                                 from, bytes, write_);
  }
  piece.down = updated;
  if (const std::size_t bytes = piece_bytes(piece); bytes > 0 && !is_resident(piece.param)) {
    write_.wait(updated);
    piece.down = device_.start_copy(piece_home(piece), piece.slot->data, bytes, write_);
  }
  if (is_last) {
    item.done->hand_over(updated);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_.leave(*std::exchange(piece.slot, nullptr), piece.down);
  piece.is_updated = true;
  (param.is_on_host() ? last_parameter_ : last_update_) = updated;
}

// On the caller's thread: what it hands over is known, when it moves is not.
void DeviceUpdate::count_bytes(const Piece& piece) {
  const shard::Param& param = params_[piece.param];
  const std::uint64_t states = is_resident(piece.param) ? 0 : piece_bytes(piece);
  const std::uint64_t parameter = param.is_on_host() ? static_cast<std::uint64_t>(piece.numel) *
                                                           bytes_of(param.layout().dtype())
                                                     : 0;
  stats_.states_up_bytes += states;
  stats_.states_down_bytes += states;
  stats_.parameters_up_bytes += is_own_master(param.layout().dtype()) ? parameter : 0;
  stats_.parameters_down_bytes += parameter;
}

std::vector<float> DeviceUpdate::read(int id, std::size_t number) {
  wait_all();
  const auto numel = static_cast<std::size_t>(params_[id].layout().shard_numel());
  std::vector<float> copy(numel);
  if (is_resident(id) && numel > 0) {
    device_.start_copy(copy.data(), resident_tensor(id, number), numel * sizeof(float), write_)
        .wait();
    return copy;
  }
  for (const Piece& piece : pieces_of(id, params_[id].range().numel)) {
    const auto* const tensor =
        reinterpret_cast<const float*>(piece_home(piece)) + number * stride(piece);
    std::copy_n(tensor, piece.numel, copy.begin() + piece.begin);
  }
  return copy;
}

TieredStats DeviceUpdate::take_stats() { return std::exchange(stats_, {}); }

}  // namespace tessera::optim
