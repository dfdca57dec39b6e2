#include "tessera/tier/uring_engine.h"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

// The kernel's rings end at 32768 entries; long before that more in flight makes nothing faster.
constexpr std::uint64_t kMaxInFlight = 4095;
constexpr std::uint64_t kWakeUp = ~std::uint64_t{0};  // user data beside the numbers of slots

std::string setup_reason(int error) {
  switch (error) {
    case ENOSYS:
      return "the kernel has no io_uring";
    case EPERM:
    case EACCES:
      return "io_uring is forbidden here, by a container's seccomp profile or by "
             "kernel.io_uring_disabled";
    case ENOMEM:
      return "io_uring found no locked memory for its ring (ulimit -l)";
    default:
      return "io_uring_queue_init failed: " + system_reason(error);
  }
}

bool has_plain_transfers(io_uring& ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) {
    return false;
  }
  const bool has_both = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                        io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return has_both;
}

// A ring and the event that ends a sleep in it.
class Ring {
 public:
  explicit Ring(std::size_t num_slots) {
    // One entry more, for the wake-up.
    error_ = -io_uring_queue_init(static_cast<unsigned>(num_slots + 1), &ring_, 0);
    is_set_up_ = error_ == 0;
    if (is_set_up_) {
      event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      error_ = event_fd_ < 0 ? errno : 0;
    }
  }
  ~Ring() {
    if (is_set_up_) {
      io_uring_queue_exit(&ring_);
    }
    if (event_fd_ >= 0) {
      ::close(event_fd_);
    }
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int error() const { return error_; }
  io_uring* get() { return &ring_; }
  int event_fd() const { return event_fd_; }

 private:
  io_uring ring_{};
  bool is_set_up_ = false;
  int event_fd_ = -1;
  int error_ = 0;
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(const IoOptions& options, std::unique_ptr<Ring> ring, std::size_t num_slots)
      : ring_(std::move(ring)),
        queue_(
            options.block_bytes, [this] { wake_up(); }, options.spans),
        slots_(num_slots) {
    for (std::size_t i = num_slots; i > 0; --i) {
      free_slots_.push_back(i - 1);
    }
    thread_ = start_io_thread([this] { work(); });
  }
  ~UringEngine() override {
    queue_.close();
    thread_.join();
  }

  std::string_view name() const override { return "uring"; }
  Pending start_read(const IoFile& file, std::uint64_t offset, std::byte* to, std::size_t bytes,
                     std::string what) override {
    return queue_.push_read(file, offset, to, bytes, std::move(what));
  }
  Pending start_write(const IoFile& file, std::uint64_t offset, const std::byte* from,
                      std::size_t bytes, std::string what) override {
    return queue_.push_write(file, offset, from, bytes, std::move(what));
  }
  IoCounts counts() const override { return queue_.counts(); }

 private:
  void wake_up() {
    const std::uint64_t one = 1;
    // It fails only if the counter is full: then the thread has not yet seen earlier ones.
    [[maybe_unused]] const ssize_t written = ::write(ring_->event_fd(), &one, sizeof one);
  }

  // --- the ring's thread ---

  void work();
  void begin_waiting();
  void enqueue(std::size_t slot);
  void watch_wake_up();
  void submit_and_sleep();
  void sleep_beside_a_broken_ring();
  void reap();
  void complete(std::size_t slot, int result);
  void fail_unsubmitted();
  std::size_t num_in_flight() const { return slots_.size() - free_slots_.size(); }

  const std::unique_ptr<Ring> ring_;
  RangeQueue queue_;

  // Only of the ring's thread.
  std::vector<IoRequest> slots_;
  std::vector<std::size_t> free_slots_;
  std::vector<std::uint64_t> unsubmitted_;  // user data in the order of the ring
  bool watches_ = false;                    // the wake-up is in the ring
  int broken_ = 0;                          // the error after which the kernel takes no more

  std::thread thread_;
};

void UringEngine::work() {
  while (true) {
    begin_waiting();
    if (num_in_flight() == 0 && queue_.is_closed() && queue_.sleep_if_empty()) {
      return;
    }
    // With the ring full only a completion makes a difference, and that ends the sleep by itself.
    if (!free_slots_.empty() && !queue_.sleep_if_empty()) {
      continue;
    }
    if (broken_ == 0) {
      submit_and_sleep();
    } else {
      sleep_beside_a_broken_ring();
    }
    reap();
  }
}

void UringEngine::begin_waiting() {
  while (!free_slots_.empty()) {
    std::optional<IoRequest> request = queue_.try_take();
    if (!request) {
      return;
    }
    const std::size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = std::move(*request);
    enqueue(slot);
  }
}

void UringEngine::enqueue(std::size_t slot) {
  if (broken_ != 0) {
    complete(slot, -broken_);
    return;
  }
  // Each slot has one entry at most, and there are more entries than slots.
  io_uring_sqe* const entry = io_uring_get_sqe(ring_->get());
  TESSERA_INVARIANT(entry != nullptr, "no entry for ", num_in_flight(), " requests");
  const IoRequest& request = slots_[slot];
  const auto bytes = static_cast<unsigned>(request.rest_bytes());
  if (request.direction == IoDirection::kRead) {
    io_uring_prep_read(entry, request.fd, request.rest_memory(), bytes, request.rest_offset());
  } else {
    io_uring_prep_write(entry, request.fd, request.rest_memory(), bytes, request.rest_offset());
  }
  entry->user_data = slot;
  unsubmitted_.push_back(slot);
}

void UringEngine::watch_wake_up() {
  io_uring_sqe* const entry = io_uring_get_sqe(ring_->get());
  TESSERA_INVARIANT(entry != nullptr, "no entry for the wake-up");
  io_uring_prep_poll_add(entry, ring_->event_fd(), POLLIN);
  entry->user_data = kWakeUp;
  unsubmitted_.push_back(kWakeUp);
  watches_ = true;
}

void UringEngine::submit_and_sleep() {
  if (!watches_) {
    watch_wake_up();
  }
  const int result = io_uring_submit_and_wait(ring_->get(), 1);
  if (result >= 0) {
    unsubmitted_.erase(unsubmitted_.begin(), unsubmitted_.begin() + result);
    return;
  }
  // A signal, memory that is short for a moment, completions that must be reaped first.
  if (result == -EINTR || result == -EAGAIN || result == -EBUSY) {
    return;
  }
  broken_ = -result;
  fail_unsubmitted();
}

// What the kernel has taken will still complete; what it has not never will.
void UringEngine::fail_unsubmitted() {
  const std::vector<std::uint64_t> never_begun = std::exchange(unsubmitted_, {});
  for (const std::uint64_t slot : never_begun) {
    if (slot != kWakeUp) {
      complete(slot, -broken_);
    }
  }
}

void UringEngine::sleep_beside_a_broken_ring() {
  std::uint64_t count = 0;
  pollfd events[] = {{ring_->event_fd(), POLLIN, 0}, {ring_->get()->ring_fd, POLLIN, 0}};
  if (::poll(events, std::size(events), -1) > 0) {
    [[maybe_unused]] const ssize_t drained = ::read(ring_->event_fd(), &count, sizeof count);
  }
}

void UringEngine::reap() {
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(ring_->get(), &entry) == 0) {
    const std::uint64_t data = entry->user_data;
    const int result = entry->res;
    io_uring_cqe_seen(ring_->get(), entry);
    if (data == kWakeUp) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = ::read(ring_->event_fd(), &count, sizeof count);
      watches_ = false;
    } else {
      complete(data, result);
    }
  }
}

void UringEngine::complete(std::size_t slot, int result) {
  if (queue_.advance(slots_[slot], result)) {
    slots_[slot] = IoRequest();
    free_slots_.push_back(slot);
  } else {
    enqueue(slot);
  }
}

}  // namespace

std::unique_ptr<IoEngine> try_make_uring_engine(const IoOptions& options, std::string& reason) {
  const auto num_slots = static_cast<std::size_t>(
      std::min(kMaxInFlight, static_cast<std::uint64_t>(options.queue_depth) *
                                 static_cast<std::uint64_t>(options.num_threads)));
  auto ring = std::make_unique<Ring>(num_slots);
  if (ring->error() != 0) {
    reason = setup_reason(ring->error());
    return nullptr;
  }
  if (!has_plain_transfers(*ring->get())) {
    reason = "the kernel's io_uring has no plain reads and writes (Linux 5.6 or later has)";
    return nullptr;
  }
  return std::make_unique<UringEngine>(options, std::move(ring), num_slots);
}

}  // namespace tessera::tier
