#include "tessera/optim/device_update.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/sub_group.h"
#include "tessera/tier/store.h"

namespace tessera::optim {

using device::MemoryKind;
using device::Pending;
using device::StreamKind;

namespace {

// Resident parameters that are updated by one piece of work.
constexpr std::int64_t kLaunchNumel = std::int64_t{1} << 25;

}  // namespace

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
  const std::size_t step = static_cast<std::size_t>(shard::kShardStep);
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
}

DeviceUpdate::~DeviceUpdate() {
  try {
    wait_all();
  } catch (const std::exception&) {
  }
}

std::size_t DeviceUpdate::num_tensors(const shard::Param& param) const {
  return num_state_tensors(param.layout().dtype(), static_cast<int>(state_names(rule_).size()));
}

std::size_t DeviceUpdate::tensor_bytes(const shard::Param& param) const {
  return tier::whole_blocks(static_cast<std::size_t>(param.layout().shard_numel()) * sizeof(float));
}

float* DeviceUpdate::tensor(int id, std::size_t number) const {
  return reinterpret_cast<float*>(slots_[static_cast<std::size_t>(id)].memory.data() +
                                  number * tensor_bytes(params_[id]));
}

void DeviceUpdate::add(int id) {
  Slot& slot = slots_[static_cast<std::size_t>(id)];
  const shard::Param& param = params_[id];
  TESSERA_INVARIANT(!slot.exists, "parameter '", param.name(), "' has its states already");
  const std::size_t bytes = num_tensors(param) * tensor_bytes(param);
  slot.memory = device_.allocate(is_resident(id) ? MemoryKind::kDevice : MemoryKind::kPinned, bytes,
                                 Role::kOptimizer);
  slot.exists = true;
  if (is_resident(id)) {
    device_.start_fill(slot.memory.data(), 0, bytes, write_).wait();
  } else if (bytes > 0) {
    std::memset(slot.memory.data(), 0, bytes);
  }
  make_master(id);
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
  const auto shard_numel = static_cast<std::size_t>(param.layout().shard_numel());
  const std::size_t element = bytes_of(dtype);
  if (is_resident(id)) {
    const device::Memory values =
        param.is_on_host()
            ? device_.allocate(MemoryKind::kDevice, param.layout().shard_bytes(), Role::kStaging)
            : device::Memory();
    const void* from = param.shard();
    if (param.is_on_host()) {
      std::ignore =
          device_.start_copy(values.data(), param.shard(), param.layout().shard_bytes(), update_);
      from = values.data();
    }
    kernels_
        .start_widen(tensor(id, 0), from, dtype, static_cast<std::int64_t>(shard_numel), update_)
        .wait();
    return;
  }
  Room& room = rooms_.front();
  auto* const master = reinterpret_cast<float*>(room.data);
  std::byte* const values = room.data + slot_numel_ * sizeof(float);
  for (std::size_t begin = 0; begin < shard_numel; begin += slot_numel_) {
    const std::size_t numel = std::min(slot_numel_, shard_numel - begin);
    std::ignore =
        device_.start_copy(values, param.shard() + begin * element, numel * element, update_);
    std::ignore =
        kernels_.start_widen(master, values, dtype, static_cast<std::int64_t>(numel), update_);
    std::ignore = device_.start_copy(tensor(id, 0) + begin, master, numel * sizeof(float), update_);
  }
  update_.synchronize();
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
    const std::int64_t numel = param.range().numel;
    const auto step = static_cast<std::int64_t>(slot_numel_);
    for (std::int64_t begin = 0; begin < numel; begin += step) {
      pieces_.push_back({id, begin, std::min(step, numel - begin), begin + step >= numel, {}});
    }
  }
}

void DeviceUpdate::prepare() {
  while (num_prepared_ < std::min(pieces_.size(), rooms_.size())) {
    start_up(num_prepared_++);
  }
}

// In a slot: state tensors of slot_numel_ elements each, then the parameter.
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
  const std::size_t bytes = static_cast<std::size_t>(piece.numel) * sizeof(float);
  read_.wait(room.free);
  read_.wait(piece.down);
  Pending up;
  for (std::size_t i = 0; i < num_tensors(param) && !is_resident(piece.param); ++i) {
    up = device_.start_copy(room.data + i * slot_numel_ * sizeof(float),
                            tensor(piece.param, i) + piece.begin, bytes, read_);
    stats_.states_up_bytes += bytes;
  }
  if (is_own_master(param.layout().dtype()) && param.is_on_host()) {
    read_.wait(param.updated());
    up = device_.start_copy(parameter_place(piece, room),
                            param.shard() + static_cast<std::size_t>(piece.begin) * sizeof(float),
                            bytes, read_);
    stats_.parameters_up_bytes += bytes;
  }
  room.up = std::move(up);
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
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i >= num_prepared_) {
      start_up(i);
    }
    update_piece(i, gradients.shard_gradient(pieces_[i].param), scalars);
  }
  if (!rooms_.empty()) {
    first_room_ = (first_room_ + pieces_.size()) % rooms_.size();
  }
  num_prepared_ = 0;
  last_update_ = update_.record();
}

void DeviceUpdate::update_resident(grad::Reducer& gradients, const UpdateScalars& scalars) {
  std::vector<UpdateTask> tasks;
  std::vector<int> ids;
  std::int64_t numel = 0;
  const auto launch = [&] {
    if (tasks.empty()) {
      return;
    }
    const Pending updated = kernels_.start_updates(rule_, tasks, update_);
    for (const int id : ids) {
      params_[id].set_updated(updated);
    }
    tasks.clear();
    ids.clear();
    numel = 0;
  };
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
      task.span.master = tensor(id, next++);
      task.span.parameter = param.shard();
      task.span.parameter_dtype = param.layout().dtype();
    }
    for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
      task.span.states[i] = tensor(id, next++);
    }
    tasks.push_back(task);
    ids.push_back(id);
    numel += task.span.numel;
    if (numel >= kLaunchNumel) {
      launch();
    }
  }
  launch();
}

void DeviceUpdate::update_piece(std::size_t index, const grad::ShardGradient& gradient,
                                const UpdateScalars& scalars) {
  Piece& piece = pieces_[index];
  Room& room = room_of(index);
  shard::Param& param = params_[piece.param];
  const DType dtype = param.layout().dtype();
  const auto begin = static_cast<std::size_t>(piece.begin);
  const auto numel = static_cast<std::size_t>(piece.numel);
  UpdateTask task = make_task(piece.param, gradient, scalars);
  task.span.gradient =
      static_cast<const std::byte*>(gradient.values) + begin * bytes_of(gradient.dtype);
  task.span.numel = piece.numel;
  const bool stays = is_resident(piece.param);
  std::size_t next = 0;
  const auto next_tensor = [&] {
    const std::size_t number = next++;
    return stays ? tensor(piece.param, number) + begin
                 : reinterpret_cast<float*>(room.data + number * slot_numel_ * sizeof(float));
  };
  std::byte* const values = parameter_place(piece, room);
  if (is_own_master(dtype)) {
    task.span.master = reinterpret_cast<float*>(values);
  } else {
    task.span.master = next_tensor();
    task.span.parameter = values;
    task.span.parameter_dtype = dtype;
  }
  for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
    task.span.states[i] = next_tensor();
  }
  update_.wait(room.up);
  Pending updated = kernels_.start_update(rule_, task.scalars, task.span, update_);
  write_.wait(updated);
  if (param.is_on_host()) {
    const std::size_t bytes = numel * bytes_of(dtype);
    updated = device_.start_copy(param.shard() + begin * bytes_of(dtype), values, bytes, write_);
    stats_.parameters_down_bytes += bytes;
  }
  if (piece.is_last) {
    param.set_updated(updated);  // those before it come before it on their stream
  }
  piece.down = updated;
  for (std::size_t i = 0; i < num_tensors(param) && !stays; ++i) {
    piece.down = device_.start_copy(tensor(piece.param, i) + begin,
                                    room.data + i * slot_numel_ * sizeof(float),
                                    numel * sizeof(float), write_);
    stats_.states_down_bytes += numel * sizeof(float);
  }
  room.free = piece.down;
}

void DeviceUpdate::wait() { last_update_.wait(); }

void DeviceUpdate::wait_all() {
  last_update_.wait();
  for (const Piece& piece : pieces_) {
    piece.down.wait();
  }
  read_.synchronize();
}

std::vector<float> DeviceUpdate::read(int id, std::size_t number) {
  wait_all();
  std::vector<float> copy(static_cast<std::size_t>(params_[id].layout().shard_numel()));
  if (!copy.empty()) {
    device_.start_copy(copy.data(), tensor(id, number), copy.size() * sizeof(float), write_).wait();
  }
  return copy;
}

TieredStats DeviceUpdate::take_stats() { return std::exchange(stats_, {}); }

}  // namespace tessera::optim
