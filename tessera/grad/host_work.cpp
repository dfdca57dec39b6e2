#include "tessera/grad/host_work.h"

#include <exception>
#include <utility>

namespace tessera::grad {

HostWork::HostWork(Spans& spans, const char* name)
    : spans_(spans), name_(name), thread_([this] { run(); }) {}

HostWork::~HostWork() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

device::Pending HostWork::start(device::Pending ready, std::function<void()> work) {
  auto done = std::make_shared<device::HandedOver>();
  const std::lock_guard<std::mutex> lock(mutex_);
  items_.push_back({std::move(ready), std::move(work), done});
  changed_.notify_all();
  return device::Pending(std::move(done));
}

void HostWork::drain() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty() && !is_busy_; });
}

void HostWork::run() {
  spans_.name_this_thread(name_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !items_.empty() || is_stopping_; });
    if (items_.empty()) {
      return;
    }
    const Item item = std::move(items_.front());
    items_.pop_front();
    is_busy_ = true;
    lock.unlock();
    try {
      item.ready.wait();
      const SpanScope span(spans_, "sum gradients");
      item.work();
      item.done->hand_over({});
    } catch (...) {
      item.done->fail(std::current_exception());
    }
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace tessera::grad
