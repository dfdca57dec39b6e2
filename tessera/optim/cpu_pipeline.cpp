#include "tessera/optim/cpu_pipeline.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

using device::Pending;
using device::StreamKind;

// Sub-groups that are read at once, at most: enough for any disk, and whoever needs a parameter
// from there does not wait behind all that leases allow.
constexpr std::ptrdiff_t kMostReadAtOnce = 4;

// Adds the time of `wait` to `total_s`.
template <typename Wait>
void timed(const Clock& clock, double& total_s, const Wait& wait) {
  const std::int64_t start_ns = clock.now_ns();
  wait();
  total_s += static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
}

}  // namespace

CpuPipeline::CpuPipeline(shard::ParamTable& params, const RuleOptions& rule,
                         const OptimizerOptions& options, const OptimizerStates& states)
    : params_(params),
      rule_(rule),
      options_(options),
      states_(states),
      kernels_(options.cpu_kernels()),
      stream_(options.cpu().stream(StreamKind::kWrite)),
      copies_(static_cast<std::size_t>(params.num_params())),
      thread_([this] { run(); }) {}

CpuPipeline::~CpuPipeline() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
  // Reads ahead that nobody will use; a failure of theirs concerns nobody either.
  std::ignore = drain(nullptr);
}

void CpuPipeline::add(int id) {
  if (options_.device.is_discrete() && params_[id].tier() == Tier::kDevice) {
    copies_[static_cast<std::size_t>(id)] =
        options_.device.allocate(Tier::kPinned, params_[id].layout().shard_bytes(), Role::kStaging);
  }
}

const std::byte* CpuPipeline::refresh_copy(int id) {
  const device::Memory& copy = copies_[static_cast<std::size_t>(id)];
  if (copy.data() != nullptr) {
    params_[id].updated().wait();
    options_.device
        .start_copy(copy.data(), params_[id].shard(), params_[id].layout().shard_bytes(),
                    options_.device.stream(StreamKind::kWrite))
        .wait();
  }
  return copy.data();
}

void CpuPipeline::set_plan(SubGroupPlan plan) {
  const std::size_t buffer_bytes =
      options_.buffers == nullptr ? 0 : options_.buffers->capacity_bytes();
  TESSERA_CHECK(plan.max_lease_bytes <= buffer_bytes, ConfigError,
                "the largest sub-group of the optimizer needs ", plan.max_lease_bytes,
                " bytes in one piece, its buffers have ", buffer_bytes,
                "; make sub-groups smaller, or raise the memory budget");
  plan_ = std::move(plan);
  num_kept_ = num_kept_groups(plan_, buffer_bytes);
  num_pieces_.assign(static_cast<std::size_t>(params_.num_params()), 0);
  for (const SubGroup& group : plan_.groups) {
    for (const SubGroupPiece& piece : group.pieces) {
      ++num_pieces_[static_cast<std::size_t>(piece.param)];
    }
  }
  next_ = 0;
}

void CpuPipeline::prepare() {
  if (plan_.max_lease_bytes == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  must_prepare_ = true;
  changed_.notify_all();
}

std::vector<StartedUpdate> CpuPipeline::start(std::span<const int> ids, grad::Reducer& gradients,
                                              const UpdateScalars& scalars) {
  gradients.wait();  // those on NVMe are read on another thread
  const Pending may_start = record_users();
  Job job{&gradients, std::vector<Item>(static_cast<std::size_t>(params_.num_params()))};
  std::vector<StartedUpdate> started;
  for (const int id : ids) {
    Item item = make_item(id, gradients, scalars, may_start);
    started.push_back({id, Pending(item.done), {}, !item.keeps});
    if (item.num_pieces_left == 0) {
      item.done->hand_over({});  // a shard without elements
    } else {
      job.items[static_cast<std::size_t>(id)] = std::move(item);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_ += std::exchange(started_, {});
  must_prepare_ = false;  // the update itself reads ahead
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return started;
}

Pending CpuPipeline::record_users() const {
  std::vector<Pending> users;
  for (const StreamKind kind : {StreamKind::kCompute, StreamKind::kGather, StreamKind::kReduce}) {
    users.push_back(options_.device.stream(kind).record());
  }
  return Pending::all(std::move(users));
}

CpuPipeline::Item CpuPipeline::make_item(int id, grad::Reducer& gradients,
                                         const UpdateScalars& scalars, const Pending& may_start) {
  const shard::Param& param = params_[id];
  TESSERA_INVARIANT(gradients.is_on_nvme(id) == (param.placement().gradient == Tier::kNvme),
                    "the gradient of parameter '", param.name(), "' is not where it was planned");
  Item item;
  item.keeps = !gradients.has_gradient(id);
  item.scalars = scalars;
  item.scalars.step = states_.num_updates(id) + 1;
  item.scalars.weight_decay_scale = param.spec().weight_decay_scale;
  item.may_start = may_start;
  if (!item.keeps) {
    const grad::ShardGradient gradient = gradients.shard_gradient(id);
    TESSERA_INVARIANT(gradient.numel == param.range().numel, "gradient of ", param.name(), " has ",
                      gradient.numel, " elements on this rank, its shard ", param.range().numel);
    TESSERA_INVARIANT(gradient.numel == 0 || gradient.is_on_host || gradients.is_on_nvme(id) ||
                          !options_.device.is_discrete(),
                      "the CPU updates parameter '", param.name(),
                      "', whose gradient is on the device");
    item.gradient = gradient.values;
    item.gradient_dtype = gradient.dtype;
    item.low = gradient.low;
    item.later = gradient.later;
    item.gradient_ready = gradient.ready;
  }
  const device::Memory& copy = copies_[static_cast<std::size_t>(id)];
  item.shard = copy.data() != nullptr ? copy.data() : param.shard();
  started_.parameters_h2d_bytes += copy.bytes();
  item.done = std::make_shared<device::HandedOver>();
  item.num_pieces_left = num_pieces_[static_cast<std::size_t>(id)];
  return item;
}

void CpuPipeline::wait_updated() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty() && !is_updating_; });
  }
  check();
}

void CpuPipeline::wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty() && !must_prepare_ && !is_busy_; });
  }
  check();
}

void CpuPipeline::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void CpuPipeline::drop_leases() {
  if (const std::exception_ptr error = drain(nullptr)) {
    fail(nullptr, error);
    check();
  }
}

OptimizerStats CpuPipeline::take_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(stats_, {});
}

void CpuPipeline::run() {
  options_.spans.name_this_thread("optimizer");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    is_busy_ = !writing_.empty();
    changed_.notify_all();
    changed_.wait(lock,
                  [this] { return !jobs_.empty() || must_prepare_ || is_busy_ || is_stopping_; });
    is_busy_ = true;
    if (!jobs_.empty()) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      is_updating_ = true;
      lock.unlock();
      update(job);
      lock.lock();
      is_updating_ = false;
    } else if (is_stopping_) {
      return;
    } else {
      const bool prepares = must_prepare_ && failure_ == nullptr;
      lock.unlock();
      const bool goes_on = go_on(prepares);
      lock.lock();
      must_prepare_ = must_prepare_ && (goes_on || !prepares) && failure_ == nullptr;
    }
  }
}

bool CpuPipeline::go_on(bool prepares) {
  bool goes_on = false;
  try {
    retire_written();
    if (prepares) {
      read_ahead();
    }
    const auto reading = std::find_if(ahead_.begin(), ahead_.end(), is_being_read);
    if (prepares && may_read_more() && reading != ahead_.end()) {
      // Its failure is told when its turn has come.
      device::wait_ignoring_failure(all_reads(*reading));
      goes_on = true;
    } else if (!writing_.empty()) {
      retire_oldest();
      goes_on = true;
    }
  } catch (...) {
    fail(nullptr, std::current_exception());
  }
  merge_stats();
  return goes_on;
}

void CpuPipeline::update(Job& job) {
  try {
    check();  // a job that was queued behind one that failed
    update_groups(job);
  } catch (...) {
    fail(&job, std::current_exception());
  }
  merge_stats();
}

void CpuPipeline::update_groups(Job& job) {
  for (std::size_t i = 0; i < plan_.groups.size(); ++i) {
    retire_written();
    if (ahead_.empty()) {
      open_stage(/*may_wait=*/true);
    }
    read_ahead();
    for (Stage& each : ahead_) {
      start_gradient_reads(each, job);
    }
    Stage& stage = ahead_.front();
    update_stage(stage, job);
    writing_.push_back(std::move(stage));
    ahead_.pop_front();
    while (!options_.writes_behind && !writing_.empty()) {
      retire_oldest();
    }
  }
  next_ = 0;  // of the update after this one
}

void CpuPipeline::read_ahead() {
  while (may_read_more() &&
         std::count_if(ahead_.begin(), ahead_.end(), is_being_read) < kMostReadAtOnce &&
         open_stage(/*may_wait=*/false)) {
  }
}

bool CpuPipeline::may_read_more() const {
  return options_.reads_ahead && next_ < plan_.groups.size();
}

bool CpuPipeline::is_being_written(std::size_t number) const {
  return std::any_of(writing_.begin(), writing_.end(),
                     [number](const Stage& stage) { return stage.number == number; });
}

bool CpuPipeline::open_stage(bool may_wait) {
  while (is_being_written(next_)) {  // of the update before
    if (!may_wait) {
      return false;
    }
    retire_oldest();
  }
  Stage stage;
  stage.number = next_;
  stage.group = &plan_.groups[next_];
  const auto kept = kept_.find(next_);
  const bool must_read = kept == kept_.end();
  if (!must_read) {
    stage.lease = std::move(kept->second);
    kept_.erase(kept);
  } else if (stage.group->lease_bytes > 0) {
    std::optional<tier::Lease> lease = take_lease(stage.group->lease_bytes, may_wait);
    if (!lease) {
      return false;
    }
    stage.lease = std::move(*lease);
  }
  ++next_;
  // In place before anything is started: a lease outlives what is in flight.
  ahead_.push_back(std::move(stage));
  if (must_read) {
    start_reads(ahead_.back());
  }
  return true;
}

std::optional<tier::Lease> CpuPipeline::take_lease(std::size_t bytes, bool may_wait) {
  std::optional<tier::Lease> lease = options_.buffers->try_acquire(bytes);
  if (lease || !may_wait) {
    return lease;
  }
  const SpanScope span(options_.spans, "wait for optimizer buffers");
  timed(options_.clock, work_.lease_wait_s, [&] {
    while (!lease && !writing_.empty()) {
      retire_oldest();
      lease = options_.buffers->try_acquire(bytes);
    }
    if (!lease) {
      kept_.clear();
      lease = options_.buffers->acquire(bytes);
    }
  });
  return lease;
}

// States, and parameters that are their own masters.
void CpuPipeline::start_reads(Stage& stage) {
  const SubGroup& group = *stage.group;
  if (group.states_bytes > 0) {
    stage.states_read =
        options_.states->start_read(group.states_offset, stage.lease.data(), group.states_bytes);
    work_.states_read_bytes += group.states_bytes;
  }
  if (!group.parameters_on_nvme()) {
    return;
  }
  for (const SubGroupPiece& piece : group.pieces) {
    const shard::Param& param = params_[piece.param];
    if (is_own_master(param.layout().dtype())) {
      stage.parameters_read.push_back(options_.parameters->start_read(
          param, piece.begin, piece.numel, stage.lease.data() + piece.parameter_in_lease));
      work_.parameters_read_bytes += piece.parameter_bytes;
    } else {
      stage.parameters_read.emplace_back();
    }
  }
}

void CpuPipeline::start_gradient_reads(Stage& stage, Job& job) {
  if (!stage.group->gradients_on_nvme() || !stage.gradients_read.empty()) {
    return;
  }
  for (const SubGroupPiece& piece : stage.group->pieces) {
    stage.gradients_read.push_back(job.gradients->start_read(
        piece.param, piece.begin, piece.numel,
        reinterpret_cast<float*>(stage.lease.data() + piece.gradient_in_lease)));
    work_.gradients_read_bytes += piece.tensor_bytes;
  }
}

Pending CpuPipeline::all_reads(const Stage& stage) {
  std::vector<Pending> all = {stage.states_read};
  all.insert(all.end(), stage.parameters_read.begin(), stage.parameters_read.end());
  all.insert(all.end(), stage.gradients_read.begin(), stage.gradients_read.end());
  return Pending::all(std::move(all));
}

bool CpuPipeline::is_being_read(const Stage& stage) { return !all_reads(stage).done(); }

void CpuPipeline::wait_timed(const Pending& read) {
  if (read.state() != nullptr) {
    const SpanScope span(options_.spans, "wait for states");
    timed(options_.clock, work_.read_wait_s, [&] { read.wait(); });
  }
}

// New values on their way to NVMe are in its `writes` when it returns.
void CpuPipeline::update_stage(Stage& stage, Job& job) {
  const SubGroup& group = *stage.group;
  wait_timed(stage.states_read);
  for (std::size_t i = 0; i < group.pieces.size(); ++i) {
    if (!stage.parameters_read.empty()) {
      wait_timed(stage.parameters_read[i]);
    }
    if (!stage.gradients_read.empty()) {
      wait_timed(stage.gradients_read[i]);
    }
    Item& item = job.items[static_cast<std::size_t>(group.pieces[i].param)];
    if (!std::exchange(item.has_begun, true)) {
      wait_to_overwrite(group.pieces[i].param);
    }
    item.may_start.wait();
    wait_timed(item.gradient_ready);
    update_piece(stage, group.pieces[i], item);
    finish_piece(stage, group.pieces[i], item);
  }
  if (group.states_bytes > 0) {
    stage.writes.push_back(
        options_.states->start_write(group.states_offset, stage.lease.data(), group.states_bytes));
    work_.states_written_bytes += group.states_bytes;
  }
}

void CpuPipeline::wait_to_overwrite(int id) {
  const Pending may_change = params_.before_overwrite(id);
  if (may_change.state() != nullptr) {
    const SpanScope span(options_.spans, "wait for a save");
    may_change.wait();
  }
}

UpdateSpan CpuPipeline::span_of(const Stage& stage, const SubGroupPiece& piece,
                                const Item& item) const {
  const SubGroup& group = *stage.group;
  const shard::Param& param = params_[piece.param];
  const DType dtype = param.layout().dtype();
  const auto begin = static_cast<std::size_t>(piece.begin);
  std::byte* const lease = stage.lease.data();
  std::byte* const parameter = group.parameters_on_nvme() ? lease + piece.parameter_in_lease
                                                          : item.shard + begin * bytes_of(dtype);
  std::size_t next = 0;
  const auto next_tensor = [&] {
    const std::size_t number = next++;
    return group.states_on_nvme() ? reinterpret_cast<float*>(lease + piece.states_in_lease +
                                                             number * piece.tensor_bytes)
                                  : states_.tensor(piece.param, number) + piece.begin;
  };
  UpdateSpan span;
  span.numel = std::clamp<std::int64_t>(param.range().numel - piece.begin, 0, piece.numel);
  if (is_own_master(dtype)) {
    span.master = reinterpret_cast<float*>(parameter);
  } else {
    span.master = next_tensor();
    span.parameter = parameter;
    span.parameter_dtype = dtype;
  }
  for (std::size_t i = 0; i < state_names(rule_).size(); ++i) {
    span.states[i] = next_tensor();
  }
  if (group.gradients_on_nvme()) {
    span.gradient = lease + piece.gradient_in_lease;
  } else if (item.gradient != nullptr) {
    span.gradient =
        static_cast<const std::byte*>(item.gradient) + begin * bytes_of(item.gradient_dtype);
    span.gradient_dtype = item.gradient_dtype;
  }
  return span;
}

void CpuPipeline::update_piece(const Stage& stage, const SubGroupPiece& piece, const Item& item) {
  UpdateSpan span = span_of(stage, piece, item);
  const auto of_piece = [&](const void* values) -> const void* {
    return static_cast<const std::byte*>(values) +
           static_cast<std::size_t>(piece.begin) * bytes_of(item.gradient_dtype);
  };
  span.low = item.low == nullptr ? nullptr : of_piece(item.low);
  std::vector<const void*> later;
  for (const void* const values : item.later) {
    later.push_back(of_piece(values));
  }
  span.later = later;
  SpanArgs args;
  if (options_.spans.enabled()) {
    args.parameter = options_.spans.intern(params_[piece.param].name());
  }
  const SpanScope scope(options_.spans, "update", args);
  timed(options_.clock, work_.update_s, [&] {
    if (span.numel > 0 && item.keeps) {
      start_parameter(kernels_, span, stream_).wait();
    } else if (span.numel > 0) {
      kernels_.start_update(rule_, item.scalars, span, stream_).wait();
    }
    if (stage.group->parameters_on_nvme()) {
      // A lease holds what its last owner left there.
      const std::size_t used =
          static_cast<std::size_t>(span.numel) * bytes_of(params_[piece.param].layout().dtype());
      std::memset(stage.lease.data() + piece.parameter_in_lease + used, 0,
                  piece.parameter_bytes - used);
    }
  });
}

void CpuPipeline::finish_piece(Stage& stage, const SubGroupPiece& piece, Item& item) {
  const shard::Param& param = params_[piece.param];
  if (stage.group->parameters_on_nvme()) {
    const std::byte* const values = stage.lease.data() + piece.parameter_in_lease;
    const bool is_kept = params_.pass_on(piece.param, piece.begin, piece.numel, values);
    Pending written = options_.parameters->start_write(param, piece.begin, piece.numel, values);
    stage.writes.push_back(written);
    work_.parameters_written_bytes += piece.parameter_bytes;
    if (!is_kept) {
      item.writes.push_back(std::move(written));
    }
  }
  if (--item.num_pieces_left > 0) {
    return;
  }
  if (copies_[static_cast<std::size_t>(piece.param)].data() != nullptr) {
    item.writes.push_back(options_.device.start_copy(param.shard(), item.shard,
                                                     param.layout().shard_bytes(),
                                                     options_.device.stream(StreamKind::kRead)));
  }
  item.done->hand_over(Pending::all(std::move(item.writes)));
}

void CpuPipeline::retire_written() {
  while (!writing_.empty() && Pending::all(writing_.front().writes).done()) {
    retire_oldest();
  }
}

void CpuPipeline::retire_oldest() {
  Stage& stage = writing_.front();
  Pending::all(stage.writes).wait();
  if (stage.number < num_kept_ && stage.group->lease_bytes > 0) {
    kept_.emplace(stage.number, std::move(stage.lease));
  }
  writing_.pop_front();
}

void CpuPipeline::fail(Job* job, std::exception_ptr error) {
  error = drain(error);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      failure_ = error;
    }
  }
  if (job != nullptr) {
    for (Item& item : job->items) {
      if (item.done && item.done->is_open()) {
        item.done->fail(error);
      }
    }
  }
}

std::exception_ptr CpuPipeline::drain(const std::exception_ptr& error) {
  const auto wait_for = [](const std::deque<Stage>& stages) {
    std::exception_ptr first;
    for (const Stage& stage : stages) {
      std::vector<Pending> all = stage.writes;
      all.insert(all.begin(), all_reads(stage));
      try {
        Pending::all(std::move(all)).wait();
      } catch (...) {
        first = first ? first : std::current_exception();
      }
    }
    return first;
  };
  // What was updated comes before what failed; what was read ahead comes after it.
  const std::exception_ptr of_writes = wait_for(writing_);
  const std::exception_ptr of_reads = wait_for(ahead_);
  writing_.clear();
  ahead_.clear();
  kept_.clear();
  next_ = 0;
  return of_writes ? of_writes : error ? error : of_reads;
}

void CpuPipeline::merge_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_ += std::exchange(work_, {});
}

}  // namespace tessera::optim
