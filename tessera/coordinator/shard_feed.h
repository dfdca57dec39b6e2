// Brings stored shards to where they are gathered: NVMe to host, ahead of the gathers; host to the
// gathered parameter, when its turn comes.
//
//   read_ahead(ids)    the next shards in the order of use are read into a window of memory, as far
//                      as it goes; none is passed over
//   offer(...)         the update hands over new values: a shard that fits into the window is taken
//                      from there, and is not read at all
//   start_bring(...)   the shard gets to its place: from the window, or in tiles from the store, so
//                      that a shard may be larger than all buffers together
//
// What is in the window is never written back: the store has it, or is about to get it.
//
// What fixes the order: brings are carried out in the order of their calls, which is that of the
// gathers; reads ahead in the order of the last list. Nothing here is a collective.
//
// Invariants:
//  (1) A shard is read only when its update and the writes of that update are done.
//  (2) What is in the window is the shard's newest version: forget_all() comes between the end of
//      an update and the beginning of the next.
//  (3) A bring needs two tiles, which are of one size, so that either fits into the place of the
//      other; it never waits for the window.
//  (4) What was read ahead and is not on the last list makes room for what is.
//
// Threads: offer() from any thread; everything else as Param. One thread of its own carries out
// brings.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/shard/param.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/buffer_pool.h"

namespace tessera::coordinator {

// Since the last take_stats(). Shards are counted without their padding to whole blocks.
struct FeedStats {
  std::uint64_t brought_bytes = 0;      // all of them
  std::uint64_t from_update_bytes = 0;  // of them, straight from their update
  std::uint64_t read_ahead_bytes = 0;   // of them, read before they were asked for
};

// How the bytes given to a feed are used.
struct FeedSizes {
  std::size_t tile_bytes = 0;    // two of them
  std::size_t window_bytes = 0;  // the rest
};
FeedSizes feed_sizes(std::size_t buffer_bytes);
// The smallest sum that a feed works with.
inline constexpr std::size_t kSmallestFeedBytes =
    2 * static_cast<std::size_t>(shard::kShardStep) * sizeof(float);

class ShardFeed {
 public:
  // All of it outlives the feed. `buffer_bytes`: of memory of `tier`, all that it takes.
  ShardFeed(shard::ParamTable& params, shard::ShardStore& store, device::Device& device, Tier tier,
            std::size_t buffer_bytes);
  // Carries out what was asked for.
  ~ShardFeed();
  ShardFeed(const ShardFeed&) = delete;
  ShardFeed& operator=(const ShardFeed&) = delete;

  // shard_bytes() bytes at `to`, once the shard's update and `ready` are done. Failures are those
  // of the update, or IoErrors with the parameter's name.
  [[nodiscard]] device::Pending start_bring(const shard::Param& param, std::byte* to,
                                            device::Pending ready);
  // Blocks until all that was started has come to its end.
  void wait_idle() noexcept;
  // Replaces the list of before. Shards in memory are skipped.
  void read_ahead(std::span<const int> ids);
  // Elements [begin, begin + numel) of the shard, beginning with 0 and in order. True: taken; what
  // was taken of a shard counts only once all of it is.
  bool offer(int id, std::int64_t begin, std::int64_t numel, const void* values);
  // Shards that are about to change, or have. Blocks while one is being read.
  void forget(int id);
  void forget_all();
  // What was read ahead in vain: the order of uses has turned out to be another.
  void forget_read_ahead();

  std::size_t window_bytes() const { return sizes_.window_bytes; }

  // From outside of a step: elements [begin, begin + numel) of the shard, on the host; begin is a
  // multiple of shard::kShardStep, and so is the end unless it is that of range(). Blocks.
  void write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
             const void* elements);
  // All shard_bytes() of it, padding included.
  void read(const shard::Param& param, void* to);

  FeedStats take_stats();

 private:
  struct Bring {
    const shard::Param* param = nullptr;
    std::byte* to = nullptr;
    device::Pending updated;
    device::Pending ready;
    std::shared_ptr<device::Completion> done;
  };
  struct Ahead {  // a shard in the window
    tier::Lease lease;
    device::Pending read;
    bool is_update = false;
    std::int64_t num_offered = 0;  // elements
    bool is_whole = false;         // or will be, when `read` is done
  };
  struct Wanted {
    const shard::Param* param = nullptr;
    device::Pending updated;
  };

  std::int64_t tile_numel(const shard::Param& param) const;  // of fp32 or narrower
  void carry_out();
  void bring(const Bring& bring);
  bool take_from_window(const Bring& bring);
  void stream_from_store(const shard::Param& param, std::byte* to);
  // The lock is held.
  void read_more();
  bool let_one_go();  // of what was read in vain; false: there is nothing
  template <typename Condition>
  void forget_if(Condition condition);

  shard::ParamTable& params_;
  shard::ShardStore& store_;
  device::Device& device_;
  device::Stream& copies_;
  const FeedSizes sizes_;
  tier::BufferPool tiles_;
  tier::BufferPool window_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Bring> brings_;
  std::map<int, Ahead> ahead_;
  std::deque<Wanted> wanted_;  // of the list, what is still to be read
  std::set<int> listed_;       // all of it
  FeedStats stats_;
  bool is_bringing_ = false;
  bool is_closing_ = false;

  std::thread worker_;  // last: it uses everything above
};

}  // namespace tessera::coordinator
