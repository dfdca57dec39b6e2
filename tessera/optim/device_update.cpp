#include "tessera/optim/device_update.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/sub_group.h"
#include "tessera/optim/update_batch.h"
#include "tessera/tier/store.h"

namespace tessera::optim {

using device::MemoryKind;
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
      slots_(static_cast<std::size_t>(params.num_params())) {
  std::size_t element_bytes = 0;  // of a piece in its slot
  for (int id = 0; id < params.num_params(); ++id) {
    if (is_ours(id) && needs_slot(id)) {
      element_bytes = std::max(element_bytes, num_tensors(params[id]) * sizeof(float) +
                                                  bytes_of(params[id].layout().dtype()));
    }
  }
  if (element_bytes == 0) {
    return;
  }
  const auto step = static_cast<std::size_t>(shard::kShardStep);
  slot_numel_ = own.slot_bytes / element_bytes / step * step;
  TESSERA_CHECK(own.num_slots > 0 && slot_numel_ > 0, ConfigError,
                "states of the optimizer come to ", device_.name(), " in ", own.num_slots,
                " slots of ", own.slot_bytes, " bytes; a slot needs at least ",
                element_bytes * step, ". Raise memory.device, or set optim.cpu_share to 1");
  room_memory_ =
      device_.allocate(MemoryKind::kDevice,
                       static_cast<std::size_t>(own.num_slots) * own.slot_bytes, Role::kStaging);
  for (int i = 0; i < own.num_slots; ++i) {
    rooms_.push_back({room_memory_.data() + static_cast<std::size_t>(i) * own.slot_bytes, {}, {}});
  }
  thread_ = std::thread([this] { hand_over(); });
}

DeviceUpdate::~DeviceUpdate() {
  try {
    wait_all();
  } catch (const std::exception&) {
  }
  if (thread_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
}

std::size_t DeviceUpdate::num_tensors(const shard::Param& param) const {
  return num_state_tensors(param.layout().dtype(), static_cast<int>(state_names(rule_).size()));
}

std::size_t DeviceUpdate::tensor_bytes(const shard::Param& param) const {
  return tier::whole_blocks(static_cast<std::size_t>(param.layout().shard_numel()) * sizeof(float));
}

float* DeviceUpdate::resident_tensor(int id, std::size_t number) const {
  return reinterpret_cast<float*>(slots_[static_cast<std::size_t>(id)].memory.data() +
                                  number * tensor_bytes(params_[id]));
}

std::vector<DeviceUpdate::Piece> DeviceUpdate::pieces_of(int id, std::int64_t numel) const {
  std::vector<Piece> pieces;
  const auto step = static_cast<std::int64_t>(slot_numel_);
  for (std::int64_t begin = 0; begin < numel; begin += step) {
    pieces.push_back({id, begin, std::min(step, numel - begin), begin + step >= numel, {}});
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
  return slots_[static_cast<std::size_t>(piece.param)].memory.data() +
         num_tensors(params_[piece.param]) * static_cast<std::size_t>(piece.begin) * sizeof(float);
}

void DeviceUpdate::add(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  const shard::Param& param = params_[id];
  TESSERA_INVARIANT(!slot.exists, "parameter '", param.name(), "' has its states already");
  const std::size_t bytes = num_tensors(param) * tensor_bytes(param);
  slot.memory = device_.allocate(is_resident(id) ? MemoryKind::kDevice : MemoryKind::kPinned, bytes,
                                 Role::kOptimizer);
  slot.exists = true;
  if (bytes == 0) {
    return;
  }
  if (is_resident(id)) {
    device_.start_fill(slot.memory.data(), 0, bytes, write_).wait();
  } else {
    std::memset(slot.memory.data(), 0, bytes);
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
  num_prepared_ = 0;  // what was sent up is of before
  param.updated().wait();
  if (is_resident(id)) {
    make_resident_master(param);
    return;
  }
  const std::size_t element = bytes_of(dtype);
  std::byte* const slot = rooms_.front().data;
  std::byte* const values = slot + slot_numel_ * sizeof(float);
  for (const Piece& piece : pieces_of(id, param.range().numel)) {
    const auto begin = static_cast<std::size_t>(piece.begin);
    const auto numel = static_cast<std::size_t>(piece.numel);
    std::ignore =
        device_.start_copy(values, param.shard() + begin * element, numel * element, update_);
    std::ignore =
        kernels_.start_widen(reinterpret_cast<float*>(slot), values, dtype, piece.numel, update_);
    std::ignore = device_.start_copy(piece_home(piece), slot, numel * sizeof(float), update_);
  }
  update_.synchronize();
}

void DeviceUpdate::make_resident_master(const shard::Param& param) {
  device::Memory copy;
  const void* from = param.shard();
  if (param.is_on_host()) {
    copy = device_.allocate(MemoryKind::kDevice, param.layout().shard_bytes(), Role::kStaging);
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
  num_prepared_ = 0;
  pieces_.clear();
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    if (!param.trainable() || !is_ours(id) || !needs_slot(id)) {
      continue;
    }
    TESSERA_INVARIANT(has(id), "parameter '", param.name(), "' is trainable and has no states");
    const std::vector<Piece> pieces = pieces_of(id, param.range().numel);
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  }
}

void DeviceUpdate::prepare() {
  if (pieces_.empty()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  must_prepare_ = true;
  changed_.notify_all();
}

void DeviceUpdate::send_ahead() {
  while (num_prepared_ < std::min(pieces_.size(), rooms_.size())) {
    start_up(num_prepared_++);
  }
}

// In a slot: the tensors as on the host, then the parameter.
std::byte* DeviceUpdate::parameter_place(const Piece& piece, const Room& room) const {
  const shard::Param& param = params_[piece.param];
  return param.is_on_host() ? room.data + num_tensors(param) * slot_numel_ * sizeof(float)
                            : param.shard() + static_cast<std::size_t>(piece.begin) *
                                                  bytes_of(param.layout().dtype());
}

void DeviceUpdate::start_up(std::size_t index) {
  const Piece& piece = pieces_[index];
  Room& room = room_of(index);
  const shard::Param& param = params_[piece.param];
  room.free.wait();
  piece.down.wait();
  room.up = Pending();
  if (const std::size_t bytes = piece_bytes(piece); bytes > 0 && !is_resident(piece.param)) {
    room.up = device_.start_copy(room.data, piece_home(piece), bytes, read_);
  }
  if (is_own_master(param.layout().dtype()) && param.is_on_host()) {
    const std::size_t bytes = static_cast<std::size_t>(piece.numel) * sizeof(float);
    room.up = device_.start_copy(
        parameter_place(piece, room),
        param.shard() + static_cast<std::size_t>(piece.begin) * sizeof(float), bytes, read_);
  }
}

UpdateTask DeviceUpdate::make_task(int id, const grad::ShardGradient& gradient,
                                   const UpdateScalars& scalars) {
  UpdateTask task;
  task.scalars = scalars;
  task.scalars.step = slots_[static_cast<std::size_t>(id)].num_updates;
  task.scalars.weight_decay_scale = params_[id].spec().weight_decay_scale;
  task.span.gradient = gradient.values;
  task.span.gradient_dtype = gradient.dtype;
  task.span.numel = gradient.numel;
  return task;
}

void DeviceUpdate::start(grad::Reducer& gradients, const UpdateScalars& scalars) {
  for (const StreamKind kind : {StreamKind::kCompute, StreamKind::kGather}) {
    update_.wait(device_.stream(kind).record());
  }
  for (int id = 0; id < params_.num_params(); ++id) {
    if (params_[id].trainable() && is_ours(id)) {
      ++slots_[static_cast<std::size_t>(id)].num_updates;
    }
  }
  // First, so that no copy holds them up: they are small, or the first that are needed.
  update_resident(gradients, scalars);
  last_update_ = update_.record();
  if (pieces_.empty()) {
    return;
  }
  std::vector<Item> items(slots_.size());
  for (const Piece& piece : pieces_) {
    Item& item = items[static_cast<std::size_t>(piece.param)];
    if (!item.done) {
      item.task = make_task(piece.param, gradients.shard_gradient(piece.param), scalars);
      item.done = std::make_shared<device::HandedOver>();
      params_[piece.param].set_updated(Pending(item.done));
    }
    count_bytes(piece);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  items_ = std::move(items);
  has_items_ = true;
  changed_.notify_all();
}

void DeviceUpdate::update_resident(grad::Reducer& gradients, const UpdateScalars& scalars) {
  UpdateBatch batch(params_, kernels_, rule_, update_);
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    if (!param.trainable() || !is_ours(id) || needs_slot(id)) {
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

UpdateSpan DeviceUpdate::span_of(const Piece& piece, const Room& room,
                                 const UpdateSpan& whole) const {
  const DType dtype = params_[piece.param].layout().dtype();
  const auto begin = static_cast<std::size_t>(piece.begin);
  UpdateSpan span = whole;
  span.gradient =
      static_cast<const std::byte*>(whole.gradient) + begin * bytes_of(whole.gradient_dtype);
  span.numel = piece.numel;
  std::size_t next = 0;
  const auto next_tensor = [&] {
    const std::size_t number = next++;
    return is_resident(piece.param) ? resident_tensor(piece.param, number) + begin
                                    : reinterpret_cast<float*>(room.data) + number * stride(piece);
  };
  std::byte* const values = parameter_place(piece, room);
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

void DeviceUpdate::update_piece(std::size_t index, Item& item) {
  Piece& piece = pieces_[index];
  Room& room = room_of(index);
  const shard::Param& param = params_[piece.param];
  update_.wait(room.up);
  Pending updated = kernels_.start_update(rule_, item.task.scalars,
                                          span_of(piece, room, item.task.span), update_);
  if (param.is_on_host()) {
    const std::size_t element = bytes_of(param.layout().dtype());
    const std::size_t bytes = static_cast<std::size_t>(piece.numel) * element;
    updated = device_.start_copy(param.shard() + static_cast<std::size_t>(piece.begin) * element,
                                 parameter_place(piece, room), bytes, update_);
  }
  piece.down = updated;
  if (const std::size_t bytes = piece_bytes(piece); bytes > 0 && !is_resident(piece.param)) {
    write_.wait(updated);
    piece.down = device_.start_copy(piece_home(piece), room.data, bytes, write_);
  }
  room.free = piece.down;
  if (piece.is_last) {
    item.done->hand_over(updated);  // those before it come before it on their stream
  }
}

void DeviceUpdate::hand_over_pieces(std::vector<Item>& items) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i >= num_prepared_) {
      start_up(i);
    }
    update_piece(i, items[static_cast<std::size_t>(pieces_[i].param)]);
  }
  first_room_ = (first_room_ + pieces_.size()) % rooms_.size();
  num_prepared_ = 0;
  last_update_ = update_.record();
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

// See [Note: who hands pieces over].
void DeviceUpdate::hand_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return has_items_ || must_prepare_ || is_stopping_; });
    if (!has_items_ && !must_prepare_) {
      return;
    }
    const bool must_prepare = std::exchange(must_prepare_, false);
    std::vector<Item> items = std::move(items_);
    const bool has_items = std::exchange(has_items_, false);
    is_busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (must_prepare && !has_items) {
        send_ahead();
      }
      if (has_items) {
        hand_over_pieces(items);
      }
    } catch (...) {
      error = std::current_exception();
      for (Item& item : items) {
        if (item.done && item.done->is_open()) {
          item.done->fail(error);
        }
      }
    }
    lock.lock();
    failure_ = failure_ ? failure_ : error;
    is_busy_ = false;
    changed_.notify_all();
  }
}

void DeviceUpdate::wait_handed_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !has_items_ && !must_prepare_ && !is_busy_; });
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void DeviceUpdate::wait() {
  wait_handed_over();
  last_update_.wait();
}

void DeviceUpdate::wait_all() {
  wait();
  for (const Piece& piece : pieces_) {
    piece.down.wait();
  }
  read_.synchronize();
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
