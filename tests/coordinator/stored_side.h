// The stored parameters of one rank: their store, their feed, and an update that writes them on a
// thread of its own, in the order of registration, and hands them over if it may.
//
// Threads: as RankWorld, which owns it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/tier/store.h"
#include "testing/held_store.h"

namespace tessera::coordinator {

// Which parameters are stored, and how.
struct StoredChoice {
  enum class Kind : std::uint8_t {
    kLate,  // as late as the device is
    kHeld,  // see held_store.h
  };
  std::vector<int> ids = {};  // none: nothing is stored, and there is no feed
  std::size_t buffer_bytes = kSmallestLoaderBytes;
  bool offers = true;  // whether the update hands over what it has written
  Kind kind = Kind::kLate;

  bool has(int id) const;
};

class StoredSide {
 public:
  StoredSide(const StoredChoice& choice, shard::ParamTable& params, device::Device& device);
  // All updates come to their end first.
  ~StoredSide();
  StoredSide(const StoredSide&) = delete;
  StoredSide& operator=(const StoredSide&) = delete;

  ShardLoader& loader() { return *loader_; }
  shard::ShardStore& shards() { return *shards_; }
  // REQUIRES: Kind::kHeld.
  support::HeldStore& held_store() { return *held_store_; }
  std::uint64_t written_bytes() const { return store_->stats().written_bytes; }

  // Counts one update of the parameter, whose shard will be `values`.
  void start_update(shard::Param& param, const std::vector<float>& values);
  // The update of this parameter, and those of the ones behind it, wait.
  void hold_update(int id);
  void release_updates();
  // The same for what the store holds, too: nothing waits for a test any more.
  void release_all();
  // Updates of this parameter fail from now on.
  void fail_update(int id);

 private:
  struct Update {
    const shard::Param* param = nullptr;
    std::byte* values = nullptr;
    std::shared_ptr<device::Completion> done;
  };
  void carry_out();
  void update(const Update& update);

  const StoredChoice choice_;
  device::Device& device_;
  std::deque<device::Memory> sources_;  // of writes, which may be under way until the end
  std::unique_ptr<tier::Store> store_;
  support::HeldStore* held_store_ = nullptr;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<ShardLoader> loader_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Update> updates_;
  std::set<int> held_;
  std::set<int> failing_;
  bool is_closing_ = false;

  std::thread worker_;
};

}  // namespace tessera::coordinator
