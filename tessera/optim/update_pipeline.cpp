#include "tessera/optim/update_pipeline.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

UpdatePipeline::UpdatePipeline(const StageWork::Parts& parts)
    : tiers_(parts.tiers), params_(parts.params), work_(parts), thread_([this] { run(); }) {}

UpdatePipeline::~UpdatePipeline() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
  // Reads ahead that nobody will use; a failure of theirs concerns nobody either.
  std::ignore = drain(nullptr);
}

void UpdatePipeline::set_plan(SubGroupPlan plan) {
  const std::size_t buffer_bytes = tiers_.buffers == nullptr ? 0 : tiers_.buffers->capacity_bytes();
  TESSERA_CHECK(plan.max_lease_bytes <= buffer_bytes, ConfigError,
                "the largest sub-group of the optimizer needs ", plan.max_lease_bytes,
                " bytes in one piece, its buffers have ", buffer_bytes,
                "; make sub-groups smaller, or raise the memory budget");
  plan_ = std::move(plan);
  num_kept_ = num_kept_groups(plan_, buffer_bytes);
  groups_of_param_.assign(static_cast<std::size_t>(params_.num_params()), {});
  for (std::size_t i = 0; i < plan_.groups.size(); ++i) {
    for (const SubGroupPiece& piece : plan_.groups[i].pieces) {
      groups_of_param_[static_cast<std::size_t>(piece.param)].push_back(i);
    }
  }
  reset_order();
}

void UpdatePipeline::expect_early_updates() {
  expects_early_ = true;
  reset_order();
}

// REQUIRES: nothing is in leases ahead of the next update.
void UpdatePipeline::reset_order() {
  order_.resize(plan_.groups.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  if (expects_early_) {
    std::reverse(order_.begin(), order_.end());
  }
  to_open_.assign(order_.begin(), order_.end());
}

int UpdatePipeline::num_pieces(int param) const {
  return static_cast<int>(groups_of_param_[static_cast<std::size_t>(param)].size());
}

void UpdatePipeline::prepare() {
  if (plan_.max_lease_bytes == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  must_prepare_ = true;
  changed_.notify_all();
}

void UpdatePipeline::open(grad::Reducer& gradients) {
  check();
  const std::lock_guard<std::mutex> lock(mutex_);
  TESSERA_INVARIANT(!current_, "an update begins before the one before it has been closed");
  must_prepare_ = false;  // the update itself reads ahead
  current_ = std::make_shared<OpenJob>();
  current_->job.gradients = &gradients;
  current_->job.items.resize(static_cast<std::size_t>(params_.num_params()));
  jobs_.push_back(current_);
  changed_.notify_all();
}

void UpdatePipeline::add(std::vector<std::pair<int, UpdateJob::Item>> items, bool closes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TESSERA_INVARIANT(current_, "parameters of an update that has not begun");
  for (auto& item : items) {
    if (failure_) {
      item.second.done->fail(failure_);
    } else {
      current_->arrived.push_back(std::move(item));
    }
  }
  if (closes) {
    current_->is_open = false;
    current_.reset();
  }
  changed_.notify_all();
}

void UpdatePipeline::give_up(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (current_) {
    current_->is_open = false;
    current_->given_up = std::move(error);
    current_.reset();
    changed_.notify_all();
  }
}

void UpdatePipeline::wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    TESSERA_INVARIANT(!current_, "the end of an update is waited for that still grows");
    changed_.wait(lock, [this] { return jobs_.empty() && !must_prepare_ && !is_busy_; });
  }
  check();
}

void UpdatePipeline::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void UpdatePipeline::drop_leases() {
  const std::exception_ptr error = drain(nullptr);
  if (error) {
    fail(nullptr, error);
    check();
  }
}

TieredStats UpdatePipeline::take_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(stats_, {});
}

void UpdatePipeline::run() {
  tiers_.spans.name_this_thread("optimizer");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !jobs_.empty() || must_prepare_ || is_stopping_; });
    const bool has_failed = failure_ != nullptr;
    is_busy_ = true;
    if (!jobs_.empty()) {
      const std::shared_ptr<OpenJob> open = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      update(*open);
      lock.lock();
    } else if (std::exchange(must_prepare_, false)) {
      if (!has_failed && !is_stopping_) {
        lock.unlock();
        prepare_now();
        lock.lock();
      }
    } else {
      return;
    }
    is_busy_ = false;
    changed_.notify_all();
  }
}

void UpdatePipeline::prepare_now() {
  try {
    read_ahead();
  } catch (...) {
    fail(nullptr, std::current_exception());
  }
  merge_stats();
}

void UpdatePipeline::update(OpenJob& open) {
  try {
    check();  // a job that was queued behind one that failed
    update_groups(open);
  } catch (...) {
    fail(&open, std::current_exception());
  }
  merge_stats();
}

void UpdatePipeline::update_groups(OpenJob& open) {
  UpdateJob& job = open.job;
  num_missing_.clear();
  for (const SubGroup& group : plan_.groups) {
    num_missing_.push_back(group.pieces.size());
  }
  complete_.clear();
  rest_is_ordered_ = false;
  for (std::size_t i = 0; i < plan_.groups.size(); ++i) {
    retire_written();
    UpdateStage& stage = next_stage(open);
    for (UpdateStage& each : ahead_) {
      if (num_missing_[each.number] == 0) {
        work_.start_gradient_reads(each, job);
      }
    }
    work_.update(stage, job);
    work_.start_state_writes(stage);
    writing_.push_back(std::move(stage));
    ahead_.pop_front();
    while (!tiers_.writes_behind && !writing_.empty()) {
      retire_oldest();
    }
  }
  while (!writing_.empty()) {
    retire_oldest();
  }
  if (expects_early_) {
    order_ = complete_;
  }
  to_open_.assign(order_.begin(), order_.end());
  if (tiers_.parameters != nullptr) {
    for (int id = 0; id < params_.num_params(); ++id) {
      tiers_.parameters->wait_written(id);  // all are: lets it forget them
    }
  }
}

UpdateStage& UpdatePipeline::next_stage(OpenJob& open) {
  do {
    if (ahead_.empty()) {
      open_stage(/*may_wait=*/true);
    }
    read_ahead();
  } while (!await(open, ahead_.front().number));
  return ahead_.front();
}

bool UpdatePipeline::await(OpenJob& open, std::size_t group) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    take_arrived(open);
    if (open.given_up) {
      std::rethrow_exception(open.given_up);
    }
    if (!open.is_open && !std::exchange(rest_is_ordered_, true) && expects_early_) {
      lock.unlock();
      order_rest();
      return false;
    }
    if (num_missing_[group] == 0) {
      return true;
    }
    TESSERA_INVARIANT(open.is_open && !is_stopping_, "an update ends, and sub-group ", group,
                      " has not come");
    changed_.wait(lock);
  }
}

void UpdatePipeline::take_arrived(OpenJob& open) {
  for (auto& [id, item] : open.arrived) {
    const auto index = static_cast<std::size_t>(id);
    open.job.items[index] = std::move(item);
    for (const std::size_t group : groups_of_param_[index]) {
      if (--num_missing_[group] == 0) {
        complete_.push_back(group);
      }
    }
  }
  open.arrived.clear();
}

// See [Note: the order of updates]. What has no lease was only noted down.
void UpdatePipeline::order_rest() {
  for (auto stage = ahead_.begin(); stage != ahead_.end();) {
    if (stage->group->lease_bytes == 0) {
      to_open_.push_back(stage->number);
      stage = ahead_.erase(stage);
    } else {
      ++stage;
    }
  }
  std::sort(to_open_.begin(), to_open_.end());
}

void UpdatePipeline::read_ahead() {
  while (tiers_.reads_ahead && !to_open_.empty() && open_stage(/*may_wait=*/false)) {
  }
}

bool UpdatePipeline::open_stage(bool may_wait) {
  UpdateStage stage;
  stage.number = to_open_.front();
  stage.group = &plan_.groups[stage.number];
  const auto kept = kept_.find(stage.number);
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
  to_open_.pop_front();
  // In place before anything is started: a lease outlives what is in flight.
  ahead_.push_back(std::move(stage));
  if (must_read) {
    work_.start_reads(ahead_.back());
  }
  return true;
}

std::optional<tier::Lease> UpdatePipeline::take_lease(std::size_t bytes, bool may_wait) {
  std::optional<tier::Lease> lease = tiers_.buffers->try_acquire(bytes);
  if (lease || !may_wait) {
    return lease;
  }
  const SpanScope span(tiers_.spans, "wait for optimizer buffers");
  const std::int64_t start = tiers_.clock.now_ns();
  while (!lease && !writing_.empty()) {
    retire_oldest();
    lease = tiers_.buffers->try_acquire(bytes);
  }
  if (!lease) {
    kept_.clear();
    lease = tiers_.buffers->acquire(bytes);
  }
  merge_stats(static_cast<double>(tiers_.clock.now_ns() - start) * 1e-9);
  return lease;
}

void UpdatePipeline::retire_written() {
  while (!writing_.empty() && device::Pending::all(writing_.front().writes).done()) {
    retire_oldest();
  }
}

void UpdatePipeline::retire_oldest() {
  UpdateStage& stage = writing_.front();
  device::Pending::all(stage.writes).wait();
  if (stage.number < num_kept_ && stage.group->lease_bytes > 0) {
    kept_.emplace(stage.number, std::move(stage.lease));
  }
  writing_.pop_front();
}

void UpdatePipeline::fail(OpenJob* open, std::exception_ptr error) {
  error = drain(error);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      failure_ = error;
    }
    if (open != nullptr) {  // whatever comes later fails in add()
      for (auto& [id, item] : open->arrived) {
        open->job.items[static_cast<std::size_t>(id)] = std::move(item);
      }
      open->arrived.clear();
    }
  }
  if (open != nullptr) {
    for (UpdateJob::Item& item : open->job.items) {
      if (item.done && item.done->is_open()) {
        item.done->fail(error);
      }
    }
  }
}

std::exception_ptr UpdatePipeline::drain(const std::exception_ptr& error) {
  const auto wait_for = [](const UpdateStage& stage) -> std::exception_ptr {
    try {
      device::Pending::all(stage.transfers()).wait();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  };
  // What was updated comes before what failed; what was read ahead comes after it.
  std::exception_ptr of_writes;
  for (const UpdateStage& stage : writing_) {
    const std::exception_ptr failure = wait_for(stage);
    of_writes = of_writes ? of_writes : failure;
  }
  std::exception_ptr of_reads;
  for (const UpdateStage& stage : ahead_) {
    const std::exception_ptr failure = wait_for(stage);
    of_reads = of_reads ? of_reads : failure;
  }
  writing_.clear();
  ahead_.clear();
  kept_.clear();
  to_open_.assign(order_.begin(), order_.end());
  return of_writes ? of_writes : error ? error : of_reads;
}

void UpdatePipeline::merge_stats(double lease_wait_s) {
  const TieredStats since = work_.take_stats();
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.states_read_bytes += since.states_read_bytes;
  stats_.states_written_bytes += since.states_written_bytes;
  stats_.parameters_read_bytes += since.parameters_read_bytes;
  stats_.parameters_written_bytes += since.parameters_written_bytes;
  stats_.gradients_read_bytes += since.gradients_read_bytes;
  stats_.read_wait_s += since.read_wait_s;
  stats_.lease_wait_s += lease_wait_s;
  stats_.update_s += since.update_s;
}

}  // namespace tessera::optim
