#include "tessera/optim/device_executor.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/sub_group.h"

namespace tessera::optim {

using device::Pending;
using device::StreamKind;

namespace {

// Elements of a batch: few launches, and the first layers of the next forward do not wait for the
// last ones.
constexpr std::int64_t kBatchNumel = std::int64_t{1} << 25;

}  // namespace

DeviceExecutor::DeviceExecutor(shard::ParamTable& params, const RuleOptions& rule,
                               const OptimizerOptions& options, const OptimizerStates& states)
    : params_(params),
      rule_(rule),
      device_(options.device),
      kernels_(options.kernels),
      states_(states),
      slot_gradient_bytes_(options.slot_gradient_bytes),
      read_(device_.stream(StreamKind::kRead)),
      write_(device_.stream(StreamKind::kWrite)),
      update_(device_.stream(StreamKind::kReduce)),
      ranges_(static_cast<std::size_t>(params.num_params())),
      states_written_(static_cast<std::size_t>(params.num_params())) {
  if (states.slot_numel() > 0) {
    slots_.take_own(device_, options.num_slots, options.slot_bytes);
    thread_ = std::thread([this] { hand_over(); });
  }
}

DeviceExecutor::~DeviceExecutor() {
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

// --- what streams ---

// States that stay on the device are cut as those that stream.
std::vector<DeviceExecutor::Piece> DeviceExecutor::pieces_of(int id) const {
  std::vector<Piece> pieces;
  if (!states_.are_resident(id)) {
    for (const OptimizerStates::Piece& states : states_.pieces(id)) {
      pieces.push_back({id, states, {}, nullptr});
    }
    return pieces;
  }
  const std::int64_t numel = params_[id].range().numel;
  for (std::int64_t begin = 0; begin < numel; begin += states_.slot_numel()) {
    pieces.push_back(
        {id, {begin, std::min(states_.slot_numel(), numel - begin), 0, 0}, {}, nullptr});
  }
  return pieces;
}

std::size_t DeviceExecutor::states_bytes(const Piece& piece) const {
  return states_.num_tensors(piece.param) * piece.states.tensor_bytes;
}

void DeviceExecutor::plan() {
  wait_all();
  put_slots_back();
  pieces_.clear();
  for (int id = 0; id < params_.num_params(); ++id) {
    PieceRange& range = ranges_[static_cast<std::size_t>(id)];
    range = {pieces_.size(), 0};
    if (params_[id].trainable() && states_.streams(id)) {
      const std::vector<Piece> pieces = pieces_of(id);
      range.count = pieces.size();
      pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
    }
  }
}

// REQUIRES: the thread is idle, and does not go ahead.
void DeviceExecutor::put_slots_back() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Piece& piece : pieces_) {
    if (piece.slot != nullptr) {
      slots_.put_back(*std::exchange(piece.slot, nullptr));
    }
  }
}

void DeviceExecutor::prepare() {
  if (pieces_.empty()) {
    return;
  }
  wait_handed_over();
  const std::lock_guard<std::mutex> lock(mutex_);
  next_ahead_ = 0;
  goes_ahead_ = true;
  changed_.notify_all();
}

bool DeviceExecutor::wants_slot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return goes_ahead_ && next_ahead_ + slots_.num_free() < pieces_.size();
}

void DeviceExecutor::lend(std::byte* data, Pending ready, std::shared_ptr<void> owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_.lend(data, std::move(ready), std::move(owner));
  changed_.notify_all();
}

void DeviceExecutor::keep_lent(std::size_t num_slots) {
  std::unique_lock<std::mutex> lock(mutex_);
  slots_.limit_lent(num_slots);
  while (slots_.num_lent() > num_slots) {
    goes_ahead_ = false;
    if (UpdateSlot* const slot = slots_.first_draining()) {
      const Pending free = slot->free;
      lock.unlock();
      wait_ignoring_failure(free);
      lock.lock();
      slots_.drop(*slot);  // only this thread does
    } else if (is_busy_ || !items_.empty()) {
      changed_.wait(lock);
    } else {
      // Sent ahead in vain; the last one is needed last.
      const auto piece = std::find_if(pieces_.rbegin(), pieces_.rend(), [](const Piece& each) {
        return each.slot != nullptr && each.slot->is_lent;
      });
      TESSERA_INVARIANT(piece != pieces_.rend(), "a slot for an update is taken by nobody");
      slots_.put_back(*std::exchange(piece->slot, nullptr));
    }
  }
}

// --- starting an update ---

std::vector<StartedUpdate> DeviceExecutor::start(std::span<const int> ids, grad::Reducer& gradients,
                                                 const UpdateScalars& scalars) {
  for (const StreamKind kind : {StreamKind::kCompute, StreamKind::kGather}) {
    update_.wait(device_.stream(kind).record());
  }
  std::vector<StartedUpdate> started;
  // First, so that no copy holds them up: they are small, or the first that are needed.
  update_resident(ids, gradients, scalars, started);
  std::deque<Item> items;
  for (const int id : ids) {
    if (!states_.streams(id)) {
      continue;
    }
    const PieceRange& range = ranges_[static_cast<std::size_t>(id)];
    if (range.count > 0) {
      items.push_back(make_item(id, gradients, scalars, started));
    } else {  // a shard without elements is updated as often as those of other ranks
      started.push_back({id, Pending(), {}, gradients.has_gradient(id)});
    }
    for (std::size_t i = 0; i < range.count; ++i) {
      count_bytes(pieces_[range.first + i]);
    }
  }
  if (pieces_.empty()) {
    return started;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  goes_ahead_ = false;  // what has no slot yet gets one in its turn
  items_.insert(items_.end(), std::make_move_iterator(items.begin()),
                std::make_move_iterator(items.end()));
  changed_.notify_all();
  return started;
}

void DeviceExecutor::update_resident(std::span<const int> ids, grad::Reducer& gradients,
                                     const UpdateScalars& scalars,
                                     std::vector<StartedUpdate>& started) {
  std::vector<UpdateTask> tasks;
  std::int64_t numel = 0;
  std::vector<Pending> batches;
  const auto launch = [&] {
    const device::StreamSpan span(update_, "update");
    batches.push_back(kernels_.start_updates(rule_, tasks, update_));
    for (std::size_t i = started.size() - tasks.size(); i < started.size(); ++i) {
      started[i].done = batches.back();
    }
    tasks.clear();
    numel = 0;
  };
  for (const int id : ids) {
    const shard::Param& param = params_[id];
    if (states_.streams(id) || !gradients.has_gradient(id)) {
      continue;
    }
    const grad::ShardGradient gradient = scalars.on_device != nullptr
                                             ? gradients.ordered_gradient(id)
                                             : gradients.shard_gradient(id);
    TESSERA_INVARIANT(!gradient.is_on_host, "the gradient of parameter '", param.name(),
                      "' is on the host, its states are on the device");
    const Pending may_change = params_.before_overwrite(id);
    if (!may_change.done() && !tasks.empty()) {
      launch();  // what may change does
    }
    update_.wait(may_change);
    UpdateTask task = make_task(id, gradient, scalars);
    std::size_t next = 0;
    if (is_own_master(param.layout().dtype())) {
      task.span.master = reinterpret_cast<float*>(param.shard());
    } else {
      task.span.master = states_.tensor(id, next++);
      task.span.parameter = param.shard();
      task.span.parameter_dtype = param.layout().dtype();
    }
    for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
      task.span.states[i] = states_.tensor(id, next++);
    }
    tasks.push_back(task);
    started.push_back({id, {}});
    numel += task.span.numel;
    if (numel >= kBatchNumel) {
      launch();
    }
  }
  if (!tasks.empty()) {
    launch();
  }
  resident_ = Pending::all(std::move(batches));
}

UpdateTask DeviceExecutor::make_task(int id, const grad::ShardGradient& gradient,
                                     const UpdateScalars& scalars) const {
  const shard::Param& param = params_[id];
  TESSERA_INVARIANT(gradient.numel == param.range().numel, "gradient of ", param.name(), " has ",
                    gradient.numel, " elements on this rank, its shard ", param.range().numel);
  UpdateTask task;
  task.scalars = scalars;
  task.scalars.step = states_.num_updates(id) + 1;
  task.scalars.weight_decay_scale = param.spec().weight_decay_scale;
  task.span.gradient = gradient.values;
  task.span.gradient_dtype = gradient.dtype;
  task.span.numel = gradient.numel;
  return task;
}

DeviceExecutor::Item DeviceExecutor::make_item(int id, grad::Reducer& gradients,
                                               const UpdateScalars& scalars,
                                               std::vector<StartedUpdate>& started) {
  const shard::Param& param = params_[id];
  const DType dtype = param.layout().dtype();
  Item item;
  item.param = id;
  item.done = std::make_shared<device::HandedOver>();
  item.keeps = !gradients.has_gradient(id);
  started.push_back({id, Pending(item.done), {}, !item.keeps});
  if (item.keeps) {
    return item;
  }
  const grad::ShardGradient gradient = gradients.shard_gradient(id);
  item.task = make_task(id, gradient, scalars);
  if (gradient.is_on_host && gradient.numel > 0) {
    const std::size_t staged_bytes = gradient.later.empty() && gradient.dtype == DType::kFloat32
                                         ? 0
                                         : 2 * bytes_of(gradient.dtype);
    TESSERA_INVARIANT(slot_gradient_bytes_ >= sizeof(float) + staged_bytes,
                      "slots have no room for the gradient of parameter '", param.name(),
                      "', which is on the host");
    item.copies.push_back(gradient.values);
    item.is_joined = gradient.low != nullptr;
    if (item.is_joined) {
      item.copies.push_back(gradient.low);
    }
    item.copies.insert(item.copies.end(), gradient.later.begin(), gradient.later.end());
    item.copy_dtype = gradient.dtype;
    item.copies_ready = gradient.ready;
    stats_.gradients_h2d_bytes +=
        item.copies.size() * static_cast<std::size_t>(gradient.numel) * bytes_of(gradient.dtype);
  }
  item.takes_over = param.is_on_host() && !is_own_master(dtype) && gradient.dtype == dtype &&
                    !gradient.is_on_host;
  if (item.takes_over) {
    item.made = std::make_shared<device::HandedOver>();
    started.back().copy = {static_cast<const std::byte*>(gradient.values), Pending(item.made)};
  }
  return item;
}

// On the caller's thread: what it hands over is known, when it moves is not.
void DeviceExecutor::count_bytes(const Piece& piece) {
  const shard::Param& param = params_[piece.param];
  const std::uint64_t states = states_bytes(piece);
  const std::uint64_t parameter =
      param.is_on_host()
          ? static_cast<std::uint64_t>(piece.states.numel) * bytes_of(param.layout().dtype())
          : 0;
  stats_.states_h2d_bytes += states;
  stats_.states_d2h_bytes += states;
  stats_.parameters_h2d_bytes += is_own_master(param.layout().dtype()) ? parameter : 0;
  stats_.parameters_d2h_bytes += parameter;
}

OptimizerStats DeviceExecutor::take_stats() { return std::exchange(stats_, {}); }

// --- the thread: see [Note: who hands pieces over] ---

void DeviceExecutor::hand_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !items_.empty() || can_go_ahead() || is_stopping_; });
    Item item;
    const bool has_item = !items_.empty();
    if (has_item) {
      item = std::move(items_.front());
      items_.pop_front();
    } else if (!can_go_ahead()) {
      return;
    }
    is_busy_ = true;
    std::exception_ptr error;
    try {
      if (has_item) {
        const std::exception_ptr before = failure_;
        lock.unlock();
        if (before) {
          std::rethrow_exception(before);
        }
        hand_over_item(item);
      } else {
        Piece& piece = pieces_[next_ahead_++];
        if (piece.slot == nullptr) {
          piece.slot = slots_.take();
          lock.unlock();
          start_h2d(piece);
        } else {
          lock.unlock();
        }
      }
    } catch (...) {
      error = std::current_exception();
      for (const auto& handed_over : {item.made, item.done}) {
        if (handed_over && handed_over->is_open()) {
          handed_over->fail(error);
        }
      }
    }
    lock.lock();
    failure_ = failure_ ? failure_ : error;
    goes_ahead_ = goes_ahead_ && !error;
    is_busy_ = false;
    changed_.notify_all();
  }
}

bool DeviceExecutor::can_go_ahead() const {
  return goes_ahead_ && next_ahead_ < pieces_.size() &&
         (pieces_[next_ahead_].slot != nullptr || slots_.num_free() > 0);
}

void DeviceExecutor::hand_over_item(const Item& item) {
  const PieceRange& range = ranges_[static_cast<std::size_t>(item.param)];
  for (std::size_t i = 0; i < range.count; ++i) {
    Piece& piece = pieces_[range.first + i];
    if (piece.slot == nullptr) {
      piece.slot = take_slot();
      start_h2d(piece);
    }
    if (!item.copies.empty()) {
      bring_gradient(piece, item);
    }
    if (i == 0) {
      // What went to a slot was only read. Waited for here: nothing else is held up on the streams.
      params_.before_overwrite(item.param).wait();
    }
    update_piece(piece, item, i + 1 == range.count);
  }
}

// Own slots are free, with a D2H copy under way at most, or have pieces that were sent ahead. Lent
// ones may be wanted back.
UpdateSlot* DeviceExecutor::take_slot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (UpdateSlot* const slot = slots_.take()) {
    return slot;
  }
  const auto last = std::find_if(pieces_.rbegin(), pieces_.rend(), [](const Piece& piece) {
    return piece.slot != nullptr && !piece.slot->is_lent;
  });
  TESSERA_INVARIANT(last != pieces_.rend(), "there is no slot for an update");
  slots_.put_back(*std::exchange(last->slot, nullptr));
  return slots_.take();
}

// In a slot: the tensors as on the host, then the parameter.
std::byte* DeviceExecutor::parameter_of(const Piece& piece) const {
  const shard::Param& param = params_[piece.param];
  const std::size_t tensors = states_.num_tensors(piece.param);
  return param.is_on_host()
             ? piece.slot->data +
                   tensors * static_cast<std::size_t>(states_.slot_numel()) * sizeof(float)
             : param.shard() +
                   static_cast<std::size_t>(piece.states.begin) * bytes_of(param.layout().dtype());
}

float* DeviceExecutor::gradient_sum_of(const Piece& piece) const {
  const shard::Param& param = params_[piece.param];
  return reinterpret_cast<float*>(
      piece.slot->data +
      static_cast<std::size_t>(states_.slot_numel()) *
          (states_.num_tensors(piece.param) * sizeof(float) + bytes_of(param.layout().dtype())));
}

void DeviceExecutor::limit_copies_h2d() {
  for (; copies_h2d_.size() >= kMostCopiesH2d; copies_h2d_.pop_front()) {
    copies_h2d_.front().wait();
  }
}

// See [Note: gradients of several micro-batches].
void DeviceExecutor::bring_gradient(const Piece& piece, const Item& item) {
  const std::size_t element = bytes_of(item.copy_dtype);
  float* const sum = gradient_sum_of(piece);
  auto* const staged = reinterpret_cast<std::byte*>(sum + states_.slot_numel());
  std::array<Pending, 2> added;
  item.copies_ready.wait();
  for (std::size_t i = 0; i < item.copies.size(); ++i) {
    const auto* const from = static_cast<const std::byte*>(item.copies[i]) +
                             static_cast<std::size_t>(piece.states.begin) * element;
    const std::size_t numel = static_cast<std::size_t>(states_.slot_numel());
    // What needs no conversion goes to its place.
    const bool is_sum = i == 0 && item.copy_dtype == DType::kFloat32;
    std::byte* const to =
        is_sum ? reinterpret_cast<std::byte*>(sum) : staged + i % 2 * numel * element;
    limit_copies_h2d();
    read_.wait(added[i % 2]);
    copies_h2d_.push_back(device_.start_copy(
        to, from, static_cast<std::size_t>(piece.states.numel) * element, read_));
    update_.wait(copies_h2d_.back());
    if (is_sum || (i == 0 && item.is_joined)) {
      continue;
    }
    if (i == 1 && item.is_joined) {
      added.fill(kernels_.start_join(sum, staged, to, piece.states.numel, update_));
    } else if (i == 0) {
      added[0] = kernels_.start_widen(sum, to, item.copy_dtype, piece.states.numel, update_);
    } else {
      added[i % 2] = kernels_.start_add(sum, to, item.copy_dtype, piece.states.numel, update_);
    }
  }
}

void DeviceExecutor::start_h2d(const Piece& piece) {
  UpdateSlot& slot = *piece.slot;
  const shard::Param& param = params_[piece.param];
  slot.free.wait();
  piece.d2h.wait();
  limit_copies_h2d();
  if (const std::size_t bytes = states_bytes(piece); bytes > 0) {
    slot.h2d = device_.start_copy(slot.data, states_.memory(piece.param) + piece.states.offset,
                                  bytes, read_);
  }
  if (is_own_master(param.layout().dtype()) && param.is_on_host()) {
    const auto begin = static_cast<std::size_t>(piece.states.begin);
    slot.h2d =
        device_.start_copy(parameter_of(piece), param.shard() + begin * sizeof(float),
                           static_cast<std::size_t>(piece.states.numel) * sizeof(float), read_);
  }
  copies_h2d_.push_back(slot.h2d);
}

UpdateSpan DeviceExecutor::span_of(const Piece& piece, const Item& item) const {
  const DType dtype = params_[piece.param].layout().dtype();
  const auto begin = static_cast<std::size_t>(piece.states.begin);
  UpdateSpan span = item.task.span;
  const std::byte* gradient = nullptr;
  if (!item.copies.empty()) {
    span.gradient = gradient_sum_of(piece);
    span.gradient_dtype = DType::kFloat32;
  } else if (!item.keeps) {
    gradient = static_cast<const std::byte*>(span.gradient) + begin * bytes_of(span.gradient_dtype);
    span.gradient = gradient;
  }
  span.numel = piece.states.numel;
  std::size_t next = 0;
  const auto next_tensor = [&] {
    const std::size_t number = next++;
    return states_.are_resident(piece.param)
               ? states_.tensor(piece.param, number) + begin
               : reinterpret_cast<float*>(piece.slot->data + number * piece.states.tensor_bytes);
  };
  // A gradient's memory is its reducer's, and written to.
  std::byte* const values =
      item.takes_over ? const_cast<std::byte*>(gradient) : parameter_of(piece);
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

void DeviceExecutor::update_piece(Piece& piece, const Item& item, bool is_last) {
  const shard::Param& param = params_[piece.param];
  update_.wait(piece.slot->h2d);
  const UpdateSpan span = span_of(piece, item);
  Pending updated = item.keeps ? start_parameter(kernels_, span, update_)
                               : kernels_.start_update(rule_, item.task.scalars, span, update_);
  if (is_last && item.made) {
    item.made->hand_over(updated);  // those before it come before it on their stream
  }
  if (param.is_on_host()) {
    const std::size_t element = bytes_of(param.layout().dtype());
    const void* const from = is_own_master(param.layout().dtype()) ? span.master : span.parameter;
    write_.wait(updated);
    updated =
        device_.start_copy(param.shard() + static_cast<std::size_t>(piece.states.begin) * element,
                           from, static_cast<std::size_t>(piece.states.numel) * element, write_);
  }
  piece.d2h = updated;
  if (const std::size_t bytes = states_bytes(piece); bytes > 0) {
    write_.wait(updated);
    piece.d2h = device_.start_copy(states_.memory(piece.param) + piece.states.offset,
                                   piece.slot->data, bytes, write_);
  }
  if (is_last) {
    item.done->hand_over(updated);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_.leave(*std::exchange(piece.slot, nullptr), piece.d2h);
  (param.is_on_host() ? last_parameter_ : last_update_) = updated;
  states_written_[static_cast<std::size_t>(piece.param)] =
      piece.d2h;  // those before it are earlier
}

// --- waiting ---

void DeviceExecutor::wait_handed_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty() && !is_busy_; });
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void DeviceExecutor::wait() {
  wait_handed_over();
  std::vector<Pending> last = {resident_};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last.push_back(last_update_);
    last.push_back(last_parameter_);
  }
  Pending::all(std::move(last)).wait();
}

void DeviceExecutor::wait_all() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    goes_ahead_ = false;
  }
  wait();
  for (const Piece& piece : pieces_) {
    piece.d2h.wait();
  }
  read_.synchronize();
}

device::Pending DeviceExecutor::states_written(int id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return states_written_[static_cast<std::size_t>(id)];
}

}  // namespace tessera::optim
