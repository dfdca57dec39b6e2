#include "tessera/coordinator/host_feed.h"

#include <exception>
#include <optional>

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
  bring.param = &param;
  bring.copy = param.device_copy();
  bring.updated = param.updated();
  bring.to = to;
  bring.free = gather_.record();
  const bool is_on_device = bring.copy.values != nullptr;
  brought_bytes_ += is_on_device ? 0 : param.layout().shard_bytes();
  const bool can_start =
      is_on_device ? bring.copy.made.done() : bring.updated.done() && bring.free.done();
  const std::lock_guard<std::mutex> lock(mutex_);
  // The worker starts copies without the lock, but none is left when this one is not queued.
  if (brings_.empty() && !is_bringing_ && can_start) {
    return start(bring);
  }
  bring.done = std::make_shared<device::HandedOver>();
  Pending done(bring.done);
  brings_.push_back(std::move(bring));
  changed_.notify_all();
  return done;
}

Pending HostFeed::start(const Bring& bring) {
  const shard::Layout& layout = bring.param->layout();
  if (bring.copy.values != nullptr) {
    // Behind the former users of its place, as all that the gather stream is given from now on.
    const std::optional<Pending> made = bring.copy.made.state()->wait_handed_over();
    gather_.wait(made ? *made : bring.copy.made);
    const auto numel = static_cast<std::size_t>(bring.param->range().numel);
    return device_.start_copy(bring.to, bring.copy.values, numel * bytes_of(layout.dtype()),
                              gather_);
  }
  bring.updated.wait();
  bring.free.wait();
  return device_.start_copy(bring.to, bring.param->shard(), layout.shard_bytes(), read_);
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
    is_reading_copy_ = bring.copy.values != nullptr;
    lock.unlock();
    try {
      bring.done->hand_over(start(bring));
    } catch (...) {
      bring.done->fail(std::current_exception());
    }
    lock.lock();
    is_bringing_ = false;
    is_reading_copy_ = false;
    changed_.notify_all();
  }
}

void HostFeed::forget_device_copies() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (Bring& bring : brings_) {
    if (bring.copy.values != nullptr) {
      bring.copy = {};
      brought_bytes_ += bring.param->layout().shard_bytes();
    }
  }
  changed_.wait(lock, [this] { return !is_reading_copy_; });
  device_.stream(device::StreamKind::kReduce).wait(gather_.record());
}

void HostFeed::wait_idle() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return brings_.empty() && !is_bringing_; });
}

}  // namespace tessera::coordinator
