#include "tessera/comm/call_queue.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::comm {

CallQueue::CallQueue(Backend& backend, Watch& watch, std::vector<int> world_ranks)
    : backend_(backend), watch_(watch), world_ranks_(std::move(world_ranks)) {
  // From the first moment on, not from the first call: a rank that never calls anything must be
  // seen to be alive.
  worker_ = std::thread([this] { work(); });
}

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

Pending CallQueue::start(QueuedCall prepared) {
  auto call = std::make_unique<QueuedCall>(std::move(prepared));
  call->num_network_left = static_cast<std::size_t>(std::count_if(
      call->phases.begin(), call->phases.end(), [](const Phase& phase) { return phase.network; }));
  const Pending result(call->completion);
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      return Pending::failed(poison_);
    }
    watch_.started(call->call.tag, call->text);
    calls_.push_back(std::move(call));
    launch_followers();
  }
  changed_.notify_all();
  return result;
}

void CallQueue::start_tags(QueuedCall& call) {
  call.tags = std::make_shared<std::vector<CallTag>>(static_cast<std::size_t>(backend_.size()));
  CallTag* own = &(*call.tags)[static_cast<std::size_t>(backend_.rank())];
  *own = call.call.tag;
  const GatherBytes part{own, call.tags->data(), sizeof(CallTag)};
  Call exchange = call.call;
  exchange.keep_alive = call.tags;
  call.tags_exchanged = backend_.start_all_gather({&part, 1}, exchange);
}

// A failure to launch is the failure of the phase: the worker meets it when it waits.
// REQUIRES: mutex_ is held, and call.ready is done.
void CallQueue::launch_next_phase(QueuedCall& call) {
  const Phase& phase = call.phases[call.num_launched++];
  call.num_network_left -= phase.network ? 1 : 0;
  try {
    if (call.num_launched == 1) {
      call.ready.wait();
      if (!backend_.compares_tags()) {
        start_tags(call);
      }
    }
    call.current = phase.launch();
  } catch (...) {
    call.current = Pending::failed(std::current_exception());
  }
}

// Launches the first phase of every call whose turn has come and whose input is ready.
// REQUIRES: mutex_ is held.
void CallQueue::launch_followers() {
  for (const auto& call : calls_) {
    if (call->num_launched == 0) {
      if (!call->ready.done()) {
        return;
      }
      launch_next_phase(*call);
    }
    if (call->num_network_left > 0) {
      return;
    }
  }
}

void CallQueue::work() {
  while (true) {
    QueuedCall* call = nullptr;
    {
      std::unique_lock lock(mutex_);
      const auto has_work = [this] { return closing_ || !calls_.empty(); };
      if (!watch_.has_board()) {
        changed_.wait(lock, has_work);
      } else if (!changed_.wait_for(lock, watch_.beat_interval(), has_work)) {
        lock.unlock();
        watch_.idle();
        continue;
      }
      if (calls_.empty()) {
        return;
      }
      call = calls_.front().get();
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
    std::unique_ptr<QueuedCall> finished;
    {
      const std::lock_guard lock(mutex_);
      finished = std::move(calls_.front());
      calls_.pop_front();
    }
    finished->completion->succeed();
  }
}

void CallQueue::finish(QueuedCall& call) {
  watch_.await(call.ready, call.call.tag, call.text);
  {
    const std::lock_guard lock(mutex_);
    if (call.num_launched == 0) {
      launch_next_phase(call);
    }
  }
  watch_.await(call.tags_exchanged, call.call.tag, call.text);
  compare_tags(call);
  while (true) {
    watch_.await(call.current, call.call.tag, call.text);
    const bool last = call.num_launched == call.phases.size();
    if (!last && !call.phases[call.num_launched].network) {
      // Local work does not hold up the launches of other calls: it runs outside the lock.
      const Phase* local = nullptr;
      {
        const std::lock_guard lock(mutex_);
        local = &call.phases[call.num_launched++];
      }
      call.current = local->launch();
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (last) {
      launch_followers();
      return;
    }
    launch_next_phase(call);
    launch_followers();
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

void CallQueue::poison(std::exception_ptr error, const std::string& reason) {
  std::deque<std::unique_ptr<QueuedCall>> lost;
  {
    const std::lock_guard lock(mutex_);
    poison_ = error;
    lost.swap(calls_);
  }
  // First the network, then the owners of the memory: nobody may touch it after they know.
  backend_.abort(reason);
  for (const auto& call : lost) {
    call->completion->fail(error);
  }
}

}  // namespace tessera::comm
