#include "tessera/comm/c10d_gloo.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/await_ranks.h"
#include "tessera/comm/c10d_store.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// Gloo's own limit lies behind ours, so that the message with the names is the first.
constexpr milliseconds kGlooSlack = std::chrono::seconds(30);

// Gloo writes to sockets without MSG_NOSIGNAL: a peer that has gone would end this process by
// SIGPIPE instead of failing the call. Threads inherit what is blocked where they are started, so
// every thread of Gloo's starts inside such a scope.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t sigpipe;
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, &former_);
  }
  ~SigpipeBlocked() { pthread_sigmask(SIG_SETMASK, &former_, nullptr); }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t former_;
};

// c10d's flight recorder is one for the whole process, and notes each process group at its first
// operation before it takes its own lock (seen on torch 2.11). A rank has several groups, each with
// a thread that starts its operations: they start one at a time.
std::mutex& recorder_mutex() {
  static std::mutex mutex;
  return mutex;
}

// One c10d Work as a PendingState.
class GlooPending final : public device::PendingState {
 public:
  explicit GlooPending(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  bool done() override { return work_->isCompleted(); }

  void wait() override {
    try {
      work_->wait();
    } catch (const std::bad_alloc&) {  // ours, and no peer's fault
      throw CommError(no_memory_text(0));
    } catch (const std::exception& error) {
      throw PeerError(c10d_text(error));
    }
  }

  bool wait_for(std::chrono::nanoseconds limit) override {
    if (!work_->isCompleted()) {
      // Zero would mean "no limit" to c10d.
      const auto whole = std::max(std::chrono::ceil<milliseconds>(limit), milliseconds(1));
      try {
        work_->wait(whole);
      } catch (const std::exception&) {
        // Either the limit or a failure of the work; the two look alike, so ask.
        if (!work_->isCompleted()) {
          return false;
        }
      }
    }
    wait();
    return true;
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

GlooDevice make_device(const GlooOptions& options) {
  if (!options.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
  }
  if (!options.bind_host.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(options.bind_host);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

std::vector<GlooDevice> make_gloo_devices(const GlooOptions& options, int num_devices) {
  std::vector<GlooDevice> devices;
  const SigpipeBlocked scope;
  try {
    for (int i = 0; i < num_devices; ++i) {
      devices.push_back(make_device(options));
    }
  } catch (const std::exception& error) {
    throw CommError(detail::concat("Gloo cannot bind to ",
                                   !options.interface.empty()   ? options.interface
                                   : !options.bind_host.empty() ? options.bind_host
                                                                : "the address of this host",
                                   ": ", c10d_text(error),
                                   remedy_of(c10d_text(error)).empty()
                                       ? "; set GLOO_SOCKET_IFNAME to the interface to use"
                                       : remedy_of(c10d_text(error))));
  }
  return devices;
}

GlooPeers joined(GlooPeers peers, const GlooOptions& options) {
  std::ignore = exchange_at_store(*peers.store, peers.name, "joined", peers.rank, peers.size, "1",
                                  options.timeout, options.status.get());
  return peers;
}

GlooLink::GlooLink(const GlooPeers& peers, std::vector<GlooDevice> devices, int num_threads,
                   const GlooOptions& options) {
  const SigpipeBlocked scope;
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout + kGlooSlack);
  gloo->devices = std::move(devices);
  gloo->threads = num_threads;
  try {
    group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>(peers.name, c10d_store(*peers.store)), peers.rank,
        peers.size, gloo);
  } catch (const std::exception& error) {
    throw CommError(detail::concat(
        "group '", peers.name, "': rank ", peers.rank, " cannot connect to the other ",
        peers.size - 1, " ranks over Gloo: ", c10d_text(error),
        remedy_of(c10d_text(error)).empty() && options.bind_host != "127.0.0.1"
            ? detail::concat("; it listens on ",
                             options.interface.empty() ? options.bind_host : options.interface,
                             ": if other hosts cannot reach that, set GLOO_SOCKET_IFNAME to the "
                             "interface between them, on all ranks")
            : remedy_of(c10d_text(error))));
  }
}

GlooLink::~GlooLink() {
  if (is_abandoned_) {
    std::ignore = group_.release();
  }
}

Pending GlooLink::start(const std::function<c10::intrusive_ptr<c10d::Work>()>& operation) {
  const std::lock_guard lock(recorder_mutex());
  return Pending(std::make_shared<GlooPending>(operation()));
}

at::Tensor GlooLink::view(const void* data, std::size_t bytes,
                          const std::shared_ptr<const void>& keep_alive) {
  return at::from_blob(
      const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, [keep_alive](void*) {},
      at::TensorOptions(at::kByte));
}

Pending GlooLink::start_gather(void* all, std::size_t piece_bytes,
                               const std::shared_ptr<const void>& keep_alive) {
  const auto rank = static_cast<std::size_t>(group_->getRank());
  const auto size = static_cast<std::size_t>(group_->getSize());
  at::Tensor own = view(static_cast<std::byte*>(all) + rank * piece_bytes, piece_bytes, keep_alive);
  at::Tensor gathered = view(all, size * piece_bytes, keep_alive);
  return start([&] { return group_->_allgather_base(gathered, own); });
}

}  // namespace tessera::comm
