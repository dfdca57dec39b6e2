// Internal to grad: what the host does with gradients beside a discrete device, while backward
// runs: a thread that does one piece of work after the other. One adds up what is in memory of the
// host; another, which waits for the disk, moves what is on NVMe.
//
// Threads: start() and drain() as Reducer; work runs on the thread, one at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tessera/core/spans.h"
#include "tessera/device/handed_over.h"

namespace tessera::grad {

class HostWork {
 public:
  // `name`, a literal: of the thread.
  HostWork(Spans& spans, const char* name);
  // Ends what has been started.
  ~HostWork();
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  // Behind `ready` and what was started before. A failure of either is that of the result, and
  // stops nothing behind it.
  device::Pending start(device::Pending ready, std::function<void()> work);
  // Until all is done, whatever has become of it.
  void drain() noexcept;

 private:
  struct Item {
    device::Pending ready;
    std::function<void()> work;
    std::shared_ptr<device::HandedOver> done;
  };
  void run();

  Spans& spans_;
  const char* const name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Item> items_;
  bool is_busy_ = false;
  bool is_stopping_ = false;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::grad
