// A store whose transfers happen when somebody waits for them, the latest moment there is: until
// then a write has not looked at its memory, and a read has left poison in its own. So a lease that
// goes back too early, a read that does not wait for the write before it, and a write that nobody
// waits for show in every run, as wrong bits.
//
// Transfers can be made to fail by number, which counts from 0, reads and writes apart.
//
// Threads: as Store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/tier/store.h"
#include "testing/mock_device.h"

namespace tessera::grad {

class LazyStore final : public tier::Store {
 public:
  void fail_read(std::size_t number) { failing_reads_.insert(number); }
  void fail_write(std::size_t number) { failing_writes_.insert(number); }
  void clear_faults() {
    failing_reads_.clear();
    failing_writes_.clear();
  }
  int num_under_way() const { return num_under_way_; }  // not waited for yet

  Tier tier() const override { return Tier::kNvme; }
  std::uint64_t allocate(std::size_t bytes, std::string name) override {
    const std::uint64_t offset = memory_.size();
    memory_.resize(memory_.size() + tier::whole_blocks(bytes));
    extents_.push_back({offset, tier::whole_blocks(bytes), std::move(name)});
    return offset;
  }
  std::uint64_t bytes() const override { return memory_.size(); }
  const std::vector<tier::StoreExtent>& extents() const override { return extents_; }
  std::byte* data() override { return nullptr; }
  tier::StoreStats stats() const override { return stats_; }

  tier::Pending start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) override {
    check(offset, to, bytes);
    const std::lock_guard lock(mutex_);
    std::memset(to, device::kPoisonByte, bytes);
    stats_.read_bytes += bytes;
    const bool fails = failing_reads_.contains(num_reads_++);
    return later([=, this] {
      TESSERA_CHECK(!fails, IoError, "read of ", bytes, " bytes at offset ", offset, " failed");
      std::memcpy(to, memory_.data() + offset, bytes);
    });
  }
  tier::Pending start_write(std::uint64_t offset, const std::byte* from,
                            std::size_t bytes) override {
    check(offset, from, bytes);
    const std::lock_guard lock(mutex_);
    stats_.written_bytes += bytes;
    const bool fails = failing_writes_.contains(num_writes_++);
    return later([=, this] {
      TESSERA_CHECK(!fails, IoError, "write of ", bytes, " bytes at offset ", offset, " failed");
      std::memcpy(memory_.data() + offset, from, bytes);
    });
  }

 private:
  class LazyState final : public device::PendingState {
   public:
    explicit LazyState(std::function<void()> work) : work_(std::move(work)) {}
    bool done() override {
      const std::lock_guard lock(mutex_);
      return outcome_.has_value();
    }
    void wait() override {
      const std::lock_guard lock(mutex_);
      if (!outcome_) {
        outcome_ = std::exception_ptr();
        try {
          work_();
        } catch (...) {
          outcome_ = std::current_exception();
        }
      }
      if (*outcome_) {
        std::rethrow_exception(*outcome_);
      }
    }
    bool wait_for(std::chrono::nanoseconds /*limit*/) override {
      wait();
      return true;
    }

   private:
    std::mutex mutex_;
    const std::function<void()> work_;
    std::optional<std::exception_ptr> outcome_;  // guarded by mutex_
  };

  tier::Pending later(std::function<void()> work) {
    ++num_under_way_;
    return tier::Pending(std::make_shared<LazyState>([this, work = std::move(work)] {
      --num_under_way_;
      work();
    }));
  }
  void check(std::uint64_t offset, const std::byte* data, std::size_t bytes) const {
    TESSERA_INVARIANT(offset % tier::kBlockBytes == 0 && bytes % tier::kBlockBytes == 0 &&
                          reinterpret_cast<std::uintptr_t>(data) % tier::kBlockBytes == 0 &&
                          offset + bytes <= memory_.size(),
                      bytes, " bytes at ", offset, " of ", memory_.size());
  }

  std::vector<std::byte> memory_;
  std::vector<tier::StoreExtent> extents_;
  std::mutex mutex_;
  // Guarded by mutex_ while transfers are started.
  std::set<std::size_t> failing_reads_;
  std::set<std::size_t> failing_writes_;
  std::size_t num_reads_ = 0;
  std::size_t num_writes_ = 0;
  tier::StoreStats stats_;
  std::atomic<int> num_under_way_{0};
};

}  // namespace tessera::grad
