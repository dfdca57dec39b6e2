// A store in plain memory that a test can hold, let fail, and look at.
//
// It behaves as a disk may: what a read goes to is poison until it is done, and what a write comes
// from is looked at only when it is done. Ranges that are not held are done at once, on the calling
// thread; those that are, on the thread that releases them.
//
// A rule concerns the extents whose name contains some words, from now on, until it is taken back.
//
// Threads: as a store; everything of its own from any thread.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/tier/store.h"

namespace tessera::support {

enum class StoreCall : std::uint8_t { kRead, kWrite };

class HeldStore final : public tier::Store {
 public:
  struct Seen {
    StoreCall call = StoreCall::kRead;
    std::string name;  // of the extent
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };

  explicit HeldStore(std::size_t capacity_bytes)
      : capacity_(tier::whole_blocks(capacity_bytes)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(tier::kBlockBytes, capacity_)),
                std::free) {
    std::memset(memory_.get(), 0, capacity_);
  }
  ~HeldStore() override { release(); }

  void hold(StoreCall call, std::string words) { add_rule(call, std::move(words), false); }
  void fail(StoreCall call, std::string words) { add_rule(call, std::move(words), true); }
  // Only the next of them.
  void fail_once(StoreCall call, std::string words) {
    add_rule(call, std::move(words), true);
    const std::lock_guard lock(mutex_);
    rules_.back().is_once = true;
  }
  void clear_rules() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
  }
  // Takes the rules back, and lets go of all that is held.
  void release() {
    clear_rules();
    while (release_one()) {
    }
  }
  // The oldest that is held; false: there is none.
  bool release_one() {
    Held held;
    {
      const std::lock_guard lock(mutex_);
      if (held_.empty()) {
        return false;
      }
      held = std::move(held_.front());
      held_.pop_front();
    }
    std::memcpy(held.to, held.from, held.bytes);
    held.done->succeed();
    return true;
  }

  std::vector<Seen> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  // Names of the extents that were read since clear_seen(), in order.
  std::vector<std::string> names_read() const {
    std::vector<std::string> names;
    for (const Seen& each : seen()) {
      if (each.call == StoreCall::kRead) {
        names.push_back(each.name);
      }
    }
    return names;
  }
  void clear_seen() {
    const std::lock_guard lock(mutex_);
    seen_.clear();
  }
  // Blocks until so many ranges have been seen since clear_seen().
  void wait_for_seen(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return seen_.size() >= count; });
  }
  std::byte* bytes_at(std::uint64_t offset) { return memory_.get() + offset; }

  Tier tier() const override { return Tier::kNvme; }
  std::uint64_t allocate(std::size_t bytes, std::string name) override {
    const std::uint64_t offset = bytes_;
    const std::size_t rounded = tier::whole_blocks(bytes);
    TESSERA_INVARIANT(offset + rounded <= capacity_, "a test's store of ", capacity_,
                      " bytes is too small");
    extents_.push_back({offset, rounded, std::move(name)});
    bytes_ += rounded;
    return offset;
  }
  std::uint64_t bytes() const override { return bytes_; }
  const std::vector<tier::StoreExtent>& extents() const override { return extents_; }
  std::byte* data() override { return nullptr; }
  tier::Pending start_read(std::uint64_t offset, std::byte* to, std::size_t bytes) override {
    check_store_range(*this, offset, to, bytes);
    if (bytes == 0) {
      return {};
    }
    std::memset(to, 0xff, bytes);
    return start(StoreCall::kRead, offset, to, memory_.get() + offset, bytes);
  }
  tier::Pending start_write(std::uint64_t offset, const std::byte* from,
                            std::size_t bytes) override {
    check_store_range(*this, offset, from, bytes);
    return bytes == 0 ? tier::Pending()
                      : start(StoreCall::kWrite, offset, memory_.get() + offset, from, bytes);
  }
  tier::StoreStats stats() const override {
    tier::StoreStats stats;
    for (const Seen& each : seen()) {
      (each.call == StoreCall::kRead ? stats.read_bytes : stats.written_bytes) += each.bytes;
    }
    return stats;
  }

 private:
  struct Rule {
    StoreCall call = StoreCall::kRead;
    std::string words;
    bool fails = false;
    bool is_once = false;
  };
  struct Held {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    std::shared_ptr<device::Completion> done;
  };

  void add_rule(StoreCall call, std::string words, bool fails) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({call, std::move(words), fails, false});
  }

  tier::Pending start(StoreCall call, std::uint64_t offset, std::byte* to, const std::byte* from,
                      std::size_t bytes) {
    const std::string name = names_in(extents_, offset, bytes);
    const std::lock_guard lock(mutex_);
    seen_.push_back({call, name, offset, bytes});
    changed_.notify_all();
    const auto rule = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& each) {
      return each.call == call && name.find(each.words) != std::string::npos;
    });
    if (rule == rules_.end()) {
      std::memcpy(to, from, bytes);
      return {};
    }
    if (rule->fails) {
      if (rule->is_once) {
        rules_.erase(rule);
      }
      return tier::Pending::failed(std::make_exception_ptr(
          IoError(detail::concat(call == StoreCall::kRead ? "read" : "write", " of ", name,
                                 " fails because a test says so"))));
    }
    held_.push_back({to, from, bytes, std::make_shared<device::Completion>()});
    return tier::Pending(held_.back().done);
  }

  const std::size_t capacity_;
  const std::unique_ptr<std::byte, void (*)(void*)> memory_;
  std::uint64_t bytes_ = 0;
  std::vector<tier::StoreExtent> extents_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::vector<Rule> rules_;
  std::deque<Held> held_;
  std::vector<Seen> seen_;
};

}  // namespace tessera::support
