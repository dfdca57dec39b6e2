#include "tessera/optim/update_pipeline.h"

#include <algorithm>
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
  num_pieces_.assign(static_cast<std::size_t>(params_.num_params()), 0);
  for (const SubGroup& group : plan_.groups) {
    for (const SubGroupPiece& piece : group.pieces) {
      ++num_pieces_[static_cast<std::size_t>(piece.param)];
    }
  }
  next_ = 0;
}

int UpdatePipeline::num_pieces(int param) const {
  return num_pieces_[static_cast<std::size_t>(param)];
}

void UpdatePipeline::prepare() {
  if (plan_.max_lease_bytes == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  must_prepare_ = true;
  changed_.notify_all();
}

void UpdatePipeline::start(UpdateJob job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  must_prepare_ = false;  // the update itself reads ahead
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void UpdatePipeline::wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
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
      UpdateJob job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      update(job);
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

void UpdatePipeline::update(UpdateJob& job) {
  try {
    check();  // a job that was queued behind one that failed
    update_groups(job);
  } catch (...) {
    fail(&job, std::current_exception());
  }
  merge_stats();
}

void UpdatePipeline::update_groups(UpdateJob& job) {
  for (std::size_t i = 0; i < plan_.groups.size(); ++i) {
    retire_written();
    if (ahead_.empty()) {
      open_stage(/*may_wait=*/true);
    }
    read_ahead();
    for (UpdateStage& each : ahead_) {
      work_.start_gradient_reads(each, job);
    }
    UpdateStage& stage = ahead_.front();
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
  next_ = 0;
  if (tiers_.parameters != nullptr) {
    for (int id = 0; id < params_.num_params(); ++id) {
      tiers_.parameters->wait_written(id);  // all are: lets it forget them
    }
  }
}

void UpdatePipeline::read_ahead() {
  while (tiers_.reads_ahead && next_ < plan_.groups.size() && open_stage(/*may_wait=*/false)) {
  }
}

bool UpdatePipeline::open_stage(bool may_wait) {
  UpdateStage stage;
  stage.number = next_;
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
  ++next_;
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

void UpdatePipeline::fail(UpdateJob* job, std::exception_ptr error) {
  error = drain(error);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      failure_ = error;
    }
  }
  if (job != nullptr) {
    for (UpdateJob::Item& item : job->items) {
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
  next_ = 0;
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
