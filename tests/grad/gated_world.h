// Doubles for tests of when a reducer waits: a network whose reductions end when a test lets them,
// and a device that sees its reduce stream wait, and lets go of what it waits for. So a test knows
// that a rank has waited, and for what, without any clock.
//
// Threads: GatedBackend's methods from any thread; a WaitCounter on its rank's thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/core/error.h"
#include "tessera/device/device.h"

namespace tessera::grad {

// Opened one after the other, or all at once with those that come later.
class Gates {
 public:
  device::Pending gate(std::size_t index) {
    const std::lock_guard lock(mutex_);
    return device::Pending(at(index));
  }
  void open_next() {
    const std::lock_guard lock(mutex_);
    if (!all_open_) {
      at(num_open_++)->succeed();
    }
  }
  void open_all() {
    const std::lock_guard lock(mutex_);
    while (!all_open_ && num_open_ < gates_.size()) {
      gates_[num_open_++]->succeed();
    }
    all_open_ = true;
  }

 private:
  const std::shared_ptr<device::Completion>& at(std::size_t index) {
    while (gates_.size() <= index) {
      gates_.push_back(std::make_shared<device::Completion>());
      if (all_open_) {
        gates_.back()->succeed();
      }
    }
    return gates_[index];
  }

  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<device::Completion>> gates_;
  std::size_t num_open_ = 0;
  bool all_open_ = false;
};

// The n-th all-to-all of this rank, of which a reduction is made, ends behind the n-th gate.
class GatedBackend final : public comm::Backend {
 public:
  GatedBackend(std::unique_ptr<comm::Backend> inner, std::shared_ptr<Gates> gates)
      : inner_(std::move(inner)), gates_(std::move(gates)) {}

  // Returns when `num_calls` reductions have been met by all ranks. One that was never started is a
  // failure after `limit`, not a hang.
  void await_met(std::size_t num_calls, std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (num_met() < num_calls) {
      TESSERA_CHECK(std::chrono::steady_clock::now() < end, CommError, "rank ", rank(), ": ",
                    num_met(), " of ", num_calls, " reductions were met after ", limit.count(),
                    " s");
      std::this_thread::yield();
    }
  }
  std::size_t num_met() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    while (count < met_.size() && *met_[count]) {
      ++count;
    }
    return count;
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool compares_tags() const override { return inner_->compares_tags(); }
  comm::Pending start_all_gather(std::span<const comm::GatherBytes> parts,
                                 const comm::Call& call) override {
    return inner_->start_all_gather(parts, call);
  }
  comm::Pending start_all_to_all(const comm::PieceBytes& pieces, const comm::Call& call) override {
    const comm::Pending arrival = inner_->start_all_to_all(pieces, call);
    const std::lock_guard lock(mutex_);
    met_.push_back(call.met);
    return comm::Pending::all({arrival, gates_->gate(met_.size() - 1)});
  }
  comm::Pending start_broadcast(void* data, std::size_t bytes, int root,
                                const comm::Call& call) override {
    return inner_->start_broadcast(data, bytes, root, call);
  }
  std::unique_ptr<comm::Backend> split(std::span<const int> ranks,
                                       const std::string& name) override {
    return inner_->split(ranks, name);
  }
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return inner_->broadcast_sent_bytes(bytes, root);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  const std::unique_ptr<comm::Backend> inner_;
  const std::shared_ptr<Gates> gates_;
  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<std::atomic<bool>>> met_;  // by call
};

// A CPU device whose reduce stream opens the next gate when it must wait, and counts that.
class WaitCounter final : public device::Device {
 public:
  WaitCounter(std::unique_ptr<device::Device> inner, std::shared_ptr<Gates> gates)
      : inner_(std::move(inner)),
        reduce_(inner_->stream(device::StreamKind::kReduce), std::move(gates)) {}

  int num_waits() const { return reduce_.num_waits(); }

  std::string name() const override { return inner_->name(); }
  device::Stream& stream(device::StreamKind kind) override {
    return kind == device::StreamKind::kReduce ? reduce_ : inner_->stream(kind);
  }
  device::Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return inner_->allocate(tier, bytes, role, alignment);
  }
  device::Pending start_copy(void* to, const void* from, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_copy(to, from, bytes, inner_->stream(stream.kind()));
  }
  device::Pending start_fill(void* to, std::uint8_t value, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_fill(to, value, bytes, inner_->stream(stream.kind()));
  }
  device::MemoryInfo memory_info() const override { return inner_->memory_info(); }

 private:
  class ReduceStream final : public device::Stream {
   public:
    ReduceStream(device::Stream& inner, std::shared_ptr<Gates> gates)
        : inner_(inner), gates_(std::move(gates)) {}

    int num_waits() const { return num_waits_; }
    device::StreamKind kind() const override { return inner_.kind(); }
    device::Pending record() override { return inner_.record(); }
    void wait(const device::Pending& pending) override {
      if (!pending.done()) {
        ++num_waits_;
        gates_->open_next();
      }
      inner_.wait(pending);
    }
    device::Pending enqueue(std::function<void()> work) override {
      return inner_.enqueue(std::move(work));
    }
    void synchronize() override { inner_.synchronize(); }

   private:
    device::Stream& inner_;
    const std::shared_ptr<Gates> gates_;
    int num_waits_ = 0;
  };

  const std::unique_ptr<device::Device> inner_;
  ReduceStream reduce_;
};

}  // namespace tessera::grad
