#include "tessera/coordinator/host_feed.h"

#include <exception>

namespace tessera::coordinator {

using device::Pending;

HostFeed::HostFeed(device::Device& device)
    : device_(device),
      gather_(device.stream(device::StreamKind::kGather)),
      read_(device.stream(device::StreamKind::kRead)),
      worker_([this] { carry_out(); }) {}

HostFeed::~HostFeed() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  worker_.join();
}

Pending HostFeed::start_bring(const shard::Param& param, std::byte* to) {
  Bring bring;
  bring.updated = param.updated();
  bring.from = param.shard();
  bring.to = to;
  bring.bytes = param.layout().shard_bytes();
  brought_bytes_ += bring.bytes;
  bring.free = gather_.record();
  const std::lock_guard<std::mutex> lock(mutex_);
  // The worker starts copies without the lock, but none is left when this one is not queued.
  if (brings_.empty() && !is_bringing_ && bring.updated.done() && bring.free.done()) {
    bring.updated.wait();
    return start_copy(bring);
  }
  bring.done = std::make_shared<device::HandedOver>();
  Pending done(bring.done);
  brings_.push_back(std::move(bring));
  changed_.notify_all();
  return done;
}

Pending HostFeed::start_copy(const Bring& bring) {
  return device_.start_copy(bring.to, bring.from, bring.bytes, read_);
}

void HostFeed::carry_out() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !brings_.empty() || is_closing_; });
    if (brings_.empty()) {
      return;
    }
    const Bring bring = std::move(brings_.front());
    brings_.pop_front();
    is_bringing_ = true;
    lock.unlock();
    try {
      bring.updated.wait();
      bring.free.wait();
      bring.done->hand_over(start_copy(bring));
    } catch (...) {
      bring.done->fail(std::current_exception());
    }
    lock.lock();
    is_bringing_ = false;
    changed_.notify_all();
  }
}

void HostFeed::wait_idle() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return brings_.empty() && !is_bringing_; });
}

}  // namespace tessera::coordinator
