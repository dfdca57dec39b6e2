#include "tessera/comm/call_queue.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::comm {

CallQueue::CallQueue(Backend& backend, Watch& watch, std::vector<int> world_ranks, Spans* spans)
    : backend_(backend), watch_(watch), world_ranks_(std::move(world_ranks)), spans_(spans) {
  launcher_ = std::thread([this] { launch_calls(); });
  finisher_ = std::thread([this] { finish_calls(); });
}

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  finisher_.join();
  launcher_.join();
}

Pending CallQueue::start(QueuedCall prepared) {
  const auto call = std::make_shared<QueuedCall>(std::move(prepared));
  call->num_network_left = static_cast<std::size_t>(std::count_if(
      call->phases.begin(), call->phases.end(), [](const Phase& phase) { return phase.network; }));
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      return Pending::failed(poison_);
    }
    watch_.started(call->call.tag, call->text);
    start_tags(*call);
    to_launch_.push_back(call);
    to_finish_.push_back(call);
  }
  changed_.notify_all();
  return Pending(call->completion);
}

void CallQueue::start_tags(QueuedCall& call) {
  if (backend_.compares_tags()) {
    return;
  }
  call.tags = std::make_shared<std::vector<CallTag>>(static_cast<std::size_t>(backend_.size()));
  try {
    (*call.tags)[static_cast<std::size_t>(backend_.rank())] = call.call.tag;
    call.tags_exchanged = backend_.start_tags(call.tags);
  } catch (...) {
    call.tags_exchanged = Pending::failed(std::current_exception());
  }
}

void CallQueue::launch_calls() {
  while (true) {
    CallPtr call;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return closing_ || poison_ || !to_launch_.empty(); });
      if (poison_ || to_launch_.empty()) {
        return;
      }
      call = to_launch_.front();
      to_launch_.pop_front();
    }
    launch(*call);
    std::unique_lock lock(mutex_);
    call->launched = true;
    changed_.notify_all();
    // The next call's turn comes when this one has nothing left to start.
    changed_.wait(lock, [&] { return poison_ || call->num_network_left == 0; });
  }
}

// A failure becomes the call's own: the finisher meets it there, after the calls before it.
void CallQueue::launch(QueuedCall& call) {
  try {
    watch_.await(call.ready, call.call.tag, call.text);
    watch_.await(call.tags_exchanged, call.call.tag, call.text);
    compare_tags(call);
    call.current = call.phases[call.next_phase++].launch();
  } catch (...) {
    call.current = Pending::failed(std::current_exception());
    // Nothing behind it may start: the ranks do not agree any more.
    return;
  }
  const std::lock_guard lock(mutex_);
  --call.num_network_left;
}

void CallQueue::finish_calls() {
  if (spans_ != nullptr) {
    spans_->name_this_thread("collectives");
  }
  while (true) {
    CallPtr call;
    {
      std::unique_lock lock(mutex_);
      const auto may_go_on = [this] {
        return to_finish_.empty() ? closing_ : to_finish_.front()->launched;
      };
      if (!watch_.has_board()) {
        changed_.wait(lock, may_go_on);
      } else if (!changed_.wait_for(lock, watch_.beat_interval(), may_go_on)) {
        lock.unlock();
        watch_.idle();
        continue;
      }
      if (to_finish_.empty()) {
        return;
      }
      call = to_finish_.front();
    }
    watch_.idle();
    try {
      finish(*call);
    } catch (const PeerError& error) {
      poison(std::current_exception(), error.what());
      continue;
    } catch (const std::exception& error) {
      watch_.post_failure(error.what());
      poison(std::current_exception(), error.what());
      continue;
    }
    watch_.completed(call->call.tag.sequence);
    if (remove_finished(call)) {
      if (spans_ != nullptr) {
        spans_->record(to_string(call->call.tag.op).data(), call->start_ns, spans_->now_ns(),
                       call->span);
      }
      call->phases.clear();  // lets go of memory before the owner is told
      call->call.keep_alive.reset();
      call->completion->succeed();
    }
  }
}

// False if the call was abandoned meanwhile: it has failed already.
bool CallQueue::remove_finished(const CallPtr& call) {
  const std::lock_guard lock(mutex_);
  if (to_finish_.empty() || to_finish_.front() != call) {
    return false;
  }
  to_finish_.pop_front();
  return true;
}

void CallQueue::abandon(const std::string& reason) {
  poison(std::make_exception_ptr(PeerError(reason)), reason);
}

void CallQueue::finish(QueuedCall& call) {
  watch_.await(call.current, call.call.tag, call.text);
  while (call.next_phase < call.phases.size()) {
    const Phase& phase = call.phases[call.next_phase++];
    call.current = phase.launch();
    if (phase.network) {
      {
        const std::lock_guard lock(mutex_);
        --call.num_network_left;
      }
      changed_.notify_all();
    }
    watch_.await(call.current, call.call.tag, call.text);
  }
}

void CallQueue::compare_tags(const QueuedCall& call) const {
  if (!call.tags) {
    return;
  }
  if (const auto mismatch = find_mismatch(*call.tags, backend_.rank(), world_ranks_)) {
    throw CommError(detail::concat(call.text, ": ", *mismatch));
  }
}

void CallQueue::poison(const std::exception_ptr& error, const std::string& reason) {
  std::deque<CallPtr> lost;
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      return;  // the first failure is the one that counts
    }
    poison_ = error;
    lost.swap(to_finish_);
    to_launch_.clear();
  }
  watch_.stop();
  changed_.notify_all();
  // First the network, then the owners of the memory: nobody may touch it after they know.
  backend_.abort(reason);
  for (const CallPtr& call : lost) {
    call->completion->fail(error);
  }
}

}  // namespace tessera::comm
