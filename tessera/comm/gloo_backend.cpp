#include "tessera/comm/gloo_backend.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/comm/await_ranks.h"
#include "tessera/comm/c10d_store.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// From this size on bytes go straight to their place, in one operation per rank; below it the
// number of operations decides.
constexpr std::size_t kDirectBytes = 32 * 1024;

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

class GlooBackend final : public Backend {
 public:
  using GlooDevice = decltype(c10d::ProcessGroupGloo::createDefaultDevice());
  using GlooDevices = std::vector<GlooDevice>;

  GlooBackend(std::shared_ptr<Store> store, GlooDevices devices, int rank, int size,
              const std::string& name, GlooOptions options)
      : store_(std::move(store)),
        devices_(std::move(devices)),
        rank_(rank),
        size_(size),
        options_(std::move(options)) {
    // The store can name a rank that does not join; Gloo's own connect cannot.
    std::ignore = exchange_at_store(*store_, name, "joined", rank_, size_, "1", options_.timeout,
                                    options_.status.get());
    data_ = connect(name, devices_, options_.num_threads);
    // Tags have connections of their own: they overtake data, and Gloo matches the calls of one
    // process group by their order.
    tags_ = connect(name + "/tags", {devices_.front()}, 1);
  }

  ~GlooBackend() override {
    if (is_aborted_) {
      // Their destructors would wait for calls that may never end. The process is about to.
      std::ignore = data_.release();
      std::ignore = tags_.release();
    }
  }

  std::string_view name() const override { return "gloo"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    std::vector<Pending> works;
    for (const GatherBytes& part : parts) {
      if (part.shard_bytes < kDirectBytes) {
        at::Tensor shard = view(part.shard, part.shard_bytes, call);
        at::Tensor full = view(part.full, part.shard_bytes * static_cast<std::size_t>(size_), call);
        works.push_back(start([&] { return data_->_allgather_base(full, shard); }));
      } else {
        gather_by_broadcasts(part, call, works);
      }
    }
    return works.size() == 1 ? works.front() : Pending::all(std::move(works));
  }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    if (pieces.contiguous() && pieces.piece_bytes < kDirectBytes) {
      const std::size_t bytes = pieces.piece_bytes * static_cast<std::size_t>(size_);
      at::Tensor input = view(pieces.send, bytes, call);
      at::Tensor output = view(pieces.receive, bytes, call);
      std::vector<std::int64_t> equal_pieces;
      return start([&] { return data_->alltoall_base(output, input, equal_pieces, equal_pieces); });
    }
    // A scatter from every rank sends the same bytes, and takes pieces wherever they lie.
    std::vector<Pending> works;
    const auto* send = static_cast<const std::byte*>(pieces.send);
    auto* receive = static_cast<std::byte*>(pieces.receive);
    for (int root = 0; root < size_; ++root) {
      std::vector<at::Tensor> output = {
          view(receive + static_cast<std::size_t>(root) * pieces.receive_stride, pieces.piece_bytes,
               call)};
      std::vector<std::vector<at::Tensor>> input;
      if (root == rank_) {
        input.emplace_back();
        for (int to = 0; to < size_; ++to) {
          input[0].push_back(view(send + static_cast<std::size_t>(to) * pieces.send_stride,
                                  pieces.piece_bytes, call));
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = root;
      works.push_back(start([&] { return data_->scatter(output, input, options); }));
    }
    return Pending::all(std::move(works));
  }

  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    std::vector<at::Tensor> tensors = {view(data, bytes, call)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return start([&] { return data_->broadcast(tensors, options); });
  }

  // An all-to-all in which the pieces for ranks that want nothing are empty. Gloo wants the pieces
  // for different ranks behind each other, hence the copies.
  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte* copies, const Call& call) override {
    const bool receives = wants[static_cast<std::size_t>(rank_)] != 0;
    std::vector<Pending> works;
    for (const GatherBytes& part : parts) {
      const auto piece = static_cast<std::int64_t>(part.shard_bytes);
      std::vector<std::int64_t> sent;
      std::byte* const first_copy = copies;
      for (const std::uint8_t wanted : wants) {
        sent.push_back(wanted != 0 ? piece : 0);
        if (wanted != 0) {
          std::memcpy(copies, part.shard, part.shard_bytes);
          copies += part.shard_bytes;
        }
      }
      std::vector<std::int64_t> received(sent.size(), receives ? piece : 0);
      at::Tensor input = view(first_copy, static_cast<std::size_t>(copies - first_copy), call);
      at::Tensor output =
          receives ? view(part.full, part.shard_bytes * static_cast<std::size_t>(size_), call)
                   : view(first_copy, 0, call);
      works.push_back(start([&] { return data_->alltoall_base(output, input, received, sent); }));
    }
    return Pending::all(std::move(works));
  }

  bool gather_to_needs_copies() const override { return true; }

  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) override {
    Call call;
    call.keep_alive = tags;
    at::Tensor own = view(&(*tags)[static_cast<std::size_t>(rank_)], sizeof(CallTag), call);
    at::Tensor all = view(tags->data(), tags->size() * sizeof(CallTag), call);
    return start([&] { return tags_->_allgather_base(all, own); });
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    if (ranks.size() == 1) {
      return make_solo_backend();
    }
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank_);
    const auto rank = static_cast<int>(own - ranks.begin());
    const auto size = static_cast<int>(ranks.size());
    if (options_.tries_shm_in_splits) {
      std::string why_not;
      const ShmOptions shm{options_.timeout, options_.status, {}};
      if (auto backend = make_shm_backend(store_, rank, size, name, shm, why_not)) {
        return backend;
      }
    }
    return std::make_unique<GlooBackend>(store_, devices_, rank, size, name, options_);
  }

  // Gloo sends along a binomial tree: in round i the first 2^i ranks (counted from the root) send
  // to the next 2^i.
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    const int from_root = (rank_ + size_ - root) % size_;
    std::size_t num_sends = 0;
    for (int step = 1; step < size_; step *= 2) {
      num_sends += from_root < step && from_root + step < size_ ? 1 : 0;
    }
    return num_sends * bytes;
  }

  void abort(const std::string&) override { is_aborted_ = true; }

 private:
  using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

  // c10d gathers through a flat copy that it allocates per call. A broadcast from every rank sends
  // the same bytes straight into their place, at up to three times the speed.
  void gather_by_broadcasts(const GatherBytes& part, const Call& call,
                            std::vector<Pending>& works) {
    auto* full = static_cast<std::byte*>(part.full);
    std::byte* own = full + static_cast<std::size_t>(rank_) * part.shard_bytes;
    if (own != part.shard) {
      std::memcpy(own, part.shard, part.shard_bytes);
    }
    for (int root = 0; root < size_; ++root) {
      void* slot = full + static_cast<std::size_t>(root) * part.shard_bytes;
      works.push_back(start_broadcast(slot, part.shard_bytes, root, call));
    }
  }

  ProcessGroup connect(const std::string& name, GlooDevices devices, int num_threads) {
    const SigpipeBlocked scope;
    auto gloo = c10d::ProcessGroupGloo::Options::create(options_.timeout + kGlooSlack);
    gloo->devices = std::move(devices);
    gloo->threads = num_threads;
    try {
      return c10::make_intrusive<c10d::ProcessGroupGloo>(
          c10::make_intrusive<c10d::PrefixStore>(name, c10d_store(*store_)), rank_, size_, gloo);
    } catch (const std::exception& error) {
      throw CommError(detail::concat(
          "group '", name, "': rank ", rank_, " cannot connect to the other ", size_ - 1,
          " ranks over Gloo: ", c10d_text(error),
          remedy_of(c10d_text(error)).empty() && options_.bind_host != "127.0.0.1"
              ? detail::concat("; it listens on ",
                               options_.interface.empty() ? options_.bind_host : options_.interface,
                               ": if other hosts cannot reach that, set GLOO_SOCKET_IFNAME to the "
                               "interface between them, on all ranks")
              : remedy_of(c10d_text(error))));
    }
  }

  // Bytes as a tensor that keeps what the call must keep. Gloo never writes to an input.
  static at::Tensor view(const void* data, std::size_t bytes, const Call& call) {
    return at::from_blob(
        const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
        [keep = call.keep_alive](void*) {}, at::TensorOptions(at::kByte));
  }

  template <typename Operation>
  static Pending start(const Operation& operation) {
    const std::lock_guard lock(recorder_mutex());
    return Pending(std::make_shared<GlooPending>(operation()));
  }

  const std::shared_ptr<Store> store_;
  const GlooDevices devices_;
  const int rank_;
  const int size_;
  const GlooOptions options_;
  ProcessGroup data_;
  ProcessGroup tags_;
  std::atomic<bool> is_aborted_{false};
};

GlooBackend::GlooDevice make_device(const GlooOptions& options) {
  if (!options.interface.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(options.interface);
  }
  if (!options.bind_host.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(options.bind_host);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(std::shared_ptr<Store> store, int rank, int size,
                                           const std::string& name, const GlooOptions& options) {
  GlooBackend::GlooDevices devices;
  const SigpipeBlocked scope;
  try {
    for (int i = 0; i < options.num_devices; ++i) {
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
  return std::make_unique<GlooBackend>(std::move(store), std::move(devices), rank, size, name,
                                       options);
}

}  // namespace tessera::comm
