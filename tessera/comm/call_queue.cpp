#include "tessera/comm/call_queue.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// How long a rank waits for the others' words after a mismatch. They are on their way, unless a
// rank is stuck before this call; without them the report has the calls, but not their names.
constexpr std::chrono::seconds kWordsLimit{60};

// How long the work of aborted calls, all together, may stay on its streams before the owners of
// its memory are told all the same: a device that is stuck for a reason of its own is not waited
// for.
constexpr std::chrono::seconds kLeaveLimit{30};

void fail(const QueuedCall& call, const std::exception_ptr& error) {
  if (call.on_stream && call.on_stream->on_stream().is_open()) {
    call.on_stream->on_stream().fail(error);
  }
  for (const CallPart& part : call.parts) {
    for (const auto& owner : part.owners) {
      if (!part.told) {
        owner->fail(error);
      }
    }
  }
  call.completion->fail(error);
}

}  // namespace

// A backend may be the one that enqueues, on a thread of its own.
void StreamCall::wait_enqueued() {
  std::optional<Pending> next = on_stream_.wait_handed_over();
  while (next && next->state() != nullptr) {
    next = next->state()->wait_handed_over();
  }
}

bool HostCall::done() {
  if (ended_->done()) {
    return true;
  }
  if (!on_stream().done()) {
    return false;
  }
  try {
    on_stream().wait();
    return true;
  } catch (...) {  // not before the group says why
    return false;
  }
}

void HostCall::wait() {
  try {
    on_stream().wait();
  } catch (...) {
    ended_->wait();
    throw;
  }
}

bool HostCall::wait_for(std::chrono::nanoseconds limit) {
  const auto start = std::chrono::steady_clock::now();
  try {
    return on_stream().wait_for(limit);
  } catch (...) {
    const auto used = std::chrono::steady_clock::now() - start;
    if (!ended_->wait_for(used < limit ? limit - used : std::chrono::nanoseconds(0))) {
      return false;
    }
    throw;
  }
}

CallQueue::CallQueue(Backend& backend, Staging& staging, Watchdog& watchdog,
                     std::vector<int> world_ranks, Spans* spans)
    : backend_(backend),
      staging_(staging),
      watchdog_(watchdog),
      world_ranks_(std::move(world_ranks)),
      spans_(spans),
      on_streams_(backend.stream_ordered()) {
  launcher_ = std::thread([this] { launch_calls(); });
  if (on_streams_) {
    agreer_ = std::thread([this] { agree_on_calls(); });
  }
  finisher_ = std::thread([this] { finish_calls(); });
}

CallQueue::~CallQueue() { close(); }

void CallQueue::close() {
  if (!finisher_.joinable()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  finisher_.join();
  launcher_.join();
  if (agreer_.joinable()) {
    agreer_.join();
  }
}

Pending CallQueue::pending_of(const QueuedCall& call) {
  return call.on_stream ? Pending(call.on_stream) : Pending(call.completion);
}

Pending CallQueue::start(QueuedCall prepared) {
  const auto call = std::make_shared<QueuedCall>(std::move(prepared));
  if (call->host) {
    add_host_phase(*call);
  }
  call->num_network_left = static_cast<std::size_t>(std::count_if(
      call->phases.begin(), call->phases.end(), [](const Phase& phase) { return phase.network; }));
  bool at_once = false;
  if (on_streams_) {
    call->on_stream = call->host ? std::make_shared<HostCall>(call->completion)
                                 : std::make_shared<StreamCall>(call->completion);
    at_once = call->host ? call->ready.done()
                         : call->call.stream != nullptr &&
                               call->call.stream->can_order_behind(call->ready);
  }
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      fail(*call, poison_);
      return pending_of(*call);
    }
    watchdog_.started(call->call.tag, call->text);
    start_tags(*call);
    to_finish_.push_back(call);
    if (on_streams_) {
      to_agree_.push_back(call);
      at_once = num_unlaunched_++ == 0 && at_once;
    }
    if (at_once) {
      starting_ = true;
    } else {
      to_launch_.push_back(call);
    }
  }
  changed_.notify_all();
  if (at_once) {
    launch_on_stream(*call);
    {
      const std::lock_guard lock(mutex_);
      starting_ = false;
      call->launched = true;
    }
    changed_.notify_all();
  }
  return pending_of(*call);
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

// Where tags are exchanged here the backend is given the bytes by who compares them: only then do
// all ranks mean them.
void CallQueue::add_host_phase(QueuedCall& call) {
  HostBytes& host = *call.host;
  if (on_streams_ && !backend_.compares_tags()) {
    host.arrived = std::make_shared<device::Completion>();
    call.phases = {{true, [arrived = host.arrived] { return Pending(arrived); }}};
    return;
  }
  call.phases = {{true, [this, all = host.all, bytes = host.piece_bytes, of = call.call] {
                    return backend_.start_host_gather(all, bytes, of);
                  }}};
}

void CallQueue::gather_host(QueuedCall& call) {
  if (call.host && call.host->arrived) {
    watchdog_.await(backend_.start_host_gather(call.host->all, call.host->piece_bytes, call.call),
                    call.call.tag, call.text);
    call.host->arrived->succeed();
  }
}

void CallQueue::wait_agreed() {
  std::deque<CallPtr> calls;
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      std::rethrow_exception(poison_);
    }
    calls = to_finish_;
  }
  for (const CallPtr& call : calls) {
    bool is_agreed = false;
    if (on_streams_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return poison_ || call->launch_failed ||
               (call->agreed && (call->launched || call->disagreement));
      });
      is_agreed = !poison_ && !call->launch_failed && !call->disagreement;
    }
    if (!is_agreed) {
      call->completion->wait();  // throws, unless it has ended well
      continue;
    }
    try {
      call->on_stream->wait_enqueued();
    } catch (...) {
      call->completion->wait();
      throw;
    }
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
      launching_ = true;
    }
    if (on_streams_) {
      launch_on_stream(*call);
    } else {
      launch(*call);
    }
    std::unique_lock lock(mutex_);
    launching_ = false;
    call->launched = true;
    changed_.notify_all();
    // The next call is launched when this one has nothing left to start.
    changed_.wait(lock,
                  [&] { return poison_ || (call->num_network_left == 0 && !call->launch_failed); });
  }
}

// A failure becomes the call's own: the finisher finds it there, after the calls before it.
void CallQueue::launch(QueuedCall& call) {
  try {
    watchdog_.await(call.ready, call.call.tag, call.text);
    agree(call);
    if (call.staging) {
      staging_.take(*call.staging, call.call.stream);
    }
    call.current = call.phases[call.next_phase++].launch();
  } catch (...) {
    call.current = Pending::failed(std::current_exception());
    // Nothing behind it may start: the ranks do not agree any more.
    return;
  }
  const std::lock_guard lock(mutex_);
  --call.num_network_left;
}

// By the caller where the host does not wait for anything here, else by the launcher.
void CallQueue::launch_on_stream(QueuedCall& call) {
  device::Stream* const stream = call.host ? nullptr : call.call.stream;
  try {
    if (stream == nullptr || !stream->can_order_behind(call.ready)) {
      watchdog_.await(call.ready, call.call.tag, call.text);
    } else if (call.ready.done()) {
      call.ready.wait();  // a failure is the call's own, not its stream's
    } else {
      stream->wait(call.ready);
    }
    if (call.staging) {
      staging_.take(*call.staging, stream);
    }
    for (; call.next_phase < call.phases.size(); ++call.next_phase) {
      call.enqueued = call.phases[call.next_phase].launch();
      if (stream == nullptr && !call.host) {
        watchdog_.await(call.enqueued, call.call.tag, call.text);
      }
    }
    call.current = call.enqueued;
  } catch (...) {
    call.current = Pending::failed(std::current_exception());
    call.on_stream->on_stream().fail(std::current_exception());
    // Nothing behind it may start: it would meet this call on the other ranks.
    const std::lock_guard lock(mutex_);
    call.launch_failed = true;
    return;
  }
  call.on_stream->on_stream().hand_over(call.current);
  const std::lock_guard lock(mutex_);
  call.num_network_left = 0;
  --num_unlaunched_;
}

void CallQueue::agree_on_calls() {
  while (true) {
    CallPtr call;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return closing_ || poison_ || !to_agree_.empty(); });
      if (poison_ || to_agree_.empty()) {
        return;
      }
      call = to_agree_.front();
      to_agree_.pop_front();
    }
    try {
      agree(*call);
      gather_host(*call);
    } catch (...) {
      call->disagreement = std::current_exception();
      if (call->host && call->host->arrived) {
        call->host->arrived->fail(call->disagreement);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      call->agreed = true;
    }
    changed_.notify_all();
    if (call->disagreement) {
      // Nothing behind it is agreed on, also if all ranks mean the same there: the finisher ends
      // it.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return poison_ || (closing_ && to_finish_.empty()); });
      return;
    }
  }
}

void CallQueue::agree(QueuedCall& call) {
  watchdog_.await(call.tags_exchanged, call.call.tag, call.text);
  compare_tags(call);
  if (call.tags && call.call.met) {
    *call.call.met = true;
  }
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
        return to_finish_.empty() ? closing_ : is_to_finish(*to_finish_.front());
      };
      if (!watchdog_.has_status_store()) {
        changed_.wait(lock, may_go_on);
      } else if (!changed_.wait_for(lock, watchdog_.heartbeat(), may_go_on)) {
        lock.unlock();
        watchdog_.idle();
        continue;
      }
      if (to_finish_.empty()) {
        return;
      }
      call = to_finish_.front();
      finishing_ = true;
    }
    watchdog_.idle();
    std::exception_ptr failure;
    std::string reason;
    try {
      finish(*call);
    } catch (const std::exception& error) {
      failure = std::current_exception();
      reason = error.what();
      // A lost peer is a consequence: the others shall read the cause.
      if (dynamic_cast<const PeerError*>(&error) == nullptr) {
        watchdog_.post_failure(error);
      }
    }
    const bool is_current = leave_finish(call, failure == nullptr);
    if (failure) {
      poison(failure, reason);
      continue;
    }
    watchdog_.completed(call->call.tag.sequence);
    if (is_current) {
      if (spans_ != nullptr) {
        // The names are literals, so they end in zero.
        // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage)
        spans_->record(to_string(call->call.tag.op).data(), call->start_ns, spans_->now_ns(),
                       call->span);
      }
      call->phases.clear();  // frees memory before the owner is told
      call->parts.clear();
      call->staging.reset();
      call->call.keep_alive.reset();
      call->completion->succeed();
    }
  }
}

// The finisher holds the call's memory no more. False if the call was abandoned meanwhile: it has
// failed already.
bool CallQueue::leave_finish(const CallPtr& call, bool succeeded) {
  bool is_current = false;
  {
    const std::lock_guard lock(mutex_);
    finishing_ = false;
    is_current = !to_finish_.empty() && to_finish_.front() == call;
    if (is_current && succeeded) {
      to_finish_.pop_front();
    }
  }
  changed_.notify_all();
  return is_current;
}

void CallQueue::abandon(const std::string& reason) {
  poison(std::make_exception_ptr(PeerError(reason)), reason);
}

void CallQueue::finish(QueuedCall& call) {
  if (call.disagreement) {
    std::rethrow_exception(call.disagreement);
  }
  watchdog_.await(call.current, call.call.tag, call.text);
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
    watchdog_.await(call.current, call.call.tag, call.text);
  }
  finish_parts(call);
}

void CallQueue::finish_parts(QueuedCall& call) {
  std::vector<std::size_t> left(call.parts.size());
  std::iota(left.begin(), left.end(), std::size_t{0});
  std::vector<Pending> arrivals = call.arrivals ? *call.arrivals : std::vector<Pending>();
  while (!left.empty()) {
    const auto which =
        static_cast<std::ptrdiff_t>(watchdog_.await_any(arrivals, call.call.tag, call.text));
    CallPart& part = call.parts[left[static_cast<std::size_t>(which)]];
    left.erase(left.begin() + which);
    arrivals.erase(arrivals.begin() + which);
    if (part.unpack) {
      part.unpack();
    }
    {
      const std::lock_guard lock(mutex_);
      if (to_finish_.empty() || to_finish_.front().get() != &call) {
        return;  // abandoned meanwhile: all owners have been told
      }
      part.told = true;
    }
    for (const auto& owner : part.owners) {
      owner->succeed();
    }
  }
}

void CallQueue::compare_tags(const QueuedCall& call) {
  if (!call.tags || tags_agree(*call.tags)) {
    return;
  }
  throw MismatchError(*find_mismatch(*call.tags, exchange_words(call), world_ranks_));
}

// All ranks see the same tags, so all take part; and the network is free for it: each rank has
// launched all calls before this one, and launches none behind it. Calls on streams are launched
// before they are agreed on, so there words go the way of tags (Backend::start_words).
std::vector<CallWords> CallQueue::exchange_words(const QueuedCall& call) {
  const auto slots =
      std::make_shared<std::vector<WordsSlot>>(static_cast<std::size_t>(backend_.size()));
  WordsSlot& own = (*slots)[static_cast<std::size_t>(backend_.rank())];
  const std::string& bytes = call.call.words->bytes();
  own.num_bytes = static_cast<std::uint32_t>(bytes.size());
  std::memcpy(own.bytes.data(), bytes.data(), bytes.size());
  std::vector<CallWords> words;
  try {
    watchdog_.await(backend_.start_words(slots), call.call.tag, call.text, kWordsLimit);
  } catch (const MismatchError&) {
    throw;  // another rank has the words of all, and has told
  } catch (const CommError&) {
    return {};  // a peer may be gone; the mismatch stays the cause
  }
  for (const WordsSlot& slot : *slots) {
    const std::size_t num_bytes = std::min<std::size_t>(slot.num_bytes, slot.bytes.size());
    words.push_back(CallWords::from_bytes(std::string(slot.bytes.data(), num_bytes)));
  }
  return words;
}

// Waits until the device is done with the memory of a call that was enqueued; abort() has ended
// what waited for other ranks.
void CallQueue::leave_stream(const QueuedCall& call, std::chrono::steady_clock::time_point limit) {
  const auto left = limit - std::chrono::steady_clock::now();
  try {
    static_cast<void>(call.enqueued.wait_for(std::max(left, decltype(left)::zero())));
  } catch (...) {  // here only the end matters
  }
}

void CallQueue::poison(const std::exception_ptr& error, const std::string& reason) {
  std::deque<CallPtr> lost;
  std::deque<CallPtr> unagreed;
  {
    const std::lock_guard lock(mutex_);
    if (poison_) {
      return;  // the first failure is the one that counts
    }
    poison_ = error;
    lost.swap(to_finish_);
    to_launch_.clear();
    unagreed.swap(to_agree_);
  }
  watchdog_.stop();
  staging_.stop();
  changed_.notify_all();
  // First the network and this queue's own threads, which pack and unpack, then the owners of the
  // memory: nobody may touch it after they know. What the threads wait for has an end by now.
  backend_.abort(reason);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !starting_ && !launching_ && !finishing_; });
  }
  for (const CallPtr& call : unagreed) {
    if (call->host && call->host->arrived) {
      call->host->arrived->fail(error);
    }
  }
  const auto limit = std::chrono::steady_clock::now() + kLeaveLimit;
  for (const CallPtr& call : lost) {
    leave_stream(*call, limit);
    fail(*call, error);
  }
}

}  // namespace tessera::comm
