// Loads shards from host memory and from NVMe into the memory where they are gathered.
//
//   start_load(...)    copies H2D from host memory; reads from NVMe through the prefetch window, or
//                      in tiles directly from the store, so that a shard may be larger than all
//                      buffers
//   read_ahead(ids)    reads the next shards on NVMe, in the order of use, into the prefetch window
//                      until it is full; none is skipped
//   receive(...)       an update passes on new values that it writes to NVMe: a shard that fits
//                      into the window is loaded from there, without a read
//
// The window is never written back: the store has its contents, or will get them from the update. A
// shard in host memory whose new values the device still has (shard::DeviceCopy) is copied on the
// device, on the gather stream.
//
// Order: loads of one tier run in the order of their calls, which is that of the gathers, on a
// thread for that tier; reads ahead run in the order of the last list. The caller never waits; a
// consumer of a shard from host memory blocks on the host only until its copy is started
// (device/handed_over.h). Nothing here is a collective.
//
// Invariants:
//  (1) A shard is read only when its update and the writes of that update are done.
//  (2) The window holds the newest version of a shard: forget_all() is called between the end of an
//      update and the beginning of the next.
//  (3) A load from NVMe needs two tiles of one size, so that either fits into the memory of the
//      other; it never waits for the window.
//  (4) Shards read ahead that are not on the last list are evicted for shards that are.
//
// [Note: one queue for H2D copies] A GPU's H2D copy engine serves one stream until that stream has
// no ready copies. So optimizer states on a stream of their own could delay parameters that the
// model needs now. Both therefore use the read stream, and a copy is enqueued only when it is
// ready: no copy there waits for anything but the copies before it. Their order affects time, not
// bits.
//
// Threads: receive() from any thread; everything else as Param.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>

#include "tessera/core/placement.h"
#include "tessera/device/device.h"
#include "tessera/device/handed_over.h"
#include "tessera/shard/param.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/buffer_pool.h"

namespace tessera::coordinator {

// Counts of one tier since the last take_stats(), without padding to whole blocks.
struct LoaderStats {
  std::uint64_t loaded_bytes = 0;       // kHost: H2D alone, without copies on the device
  std::uint64_t from_update_bytes = 0;  // of these, passed on by their update; NVMe only
  std::uint64_t read_ahead_bytes = 0;   // of these, read ahead; NVMe only
};

// How a loader divides its buffers.
struct LoaderSizes {
  std::size_t tile_bytes = 0;    // each of two tiles
  std::size_t window_bytes = 0;  // the rest
};
LoaderSizes loader_sizes(std::size_t buffer_bytes);
// The smallest buffers with which a loader from NVMe works.
inline constexpr std::size_t kSmallestLoaderBytes =
    2 * static_cast<std::size_t>(shard::kShardStep) * sizeof(float);

class ShardLoader {
 public:
  // Loads shards from host memory only. Both outlive the loader.
  ShardLoader(shard::ParamTable& params, device::Device& device);
  // Loads shards from NVMe as well. `buffer_bytes`: all memory that it takes, in `tier`. Registers
  // itself as the receiver of updates (ParamTable::pass_on).
  ShardLoader(shard::ParamTable& params, shard::ShardStore& store, device::Device& device,
              Tier tier, std::size_t buffer_bytes);
  // Completes all loads that were started.
  ~ShardLoader();
  ShardLoader(const ShardLoader&) = delete;
  ShardLoader& operator=(const ShardLoader&) = delete;

  // Loads shard_bytes() bytes to `to`, once the shard's update and `ready` are done. `decoded`:
  // memory for shard_numel() elements; a shard that is stored as blocks is then also decoded there,
  // on the gather stream. Null: the gather decodes it. A copy from device memory
  // (shard::DeviceCopy) runs on the gather stream. If its update has not enqueued it yet, it is
  // enqueued later on the stream `late`: kRead where the gather stream may be ordered after the
  // very gather that needs the shard. Failures are those of the update, of `ready`, or IoErrors
  // with the parameter's name.
  [[nodiscard]] device::Pending start_load(const shard::Param& param, std::byte* to,
                                           device::Pending ready, void* decoded = nullptr,
                                           device::StreamKind late = device::StreamKind::kGather);
  // Blocks until all loads have been started, and those from NVMe are done.
  void wait_idle() noexcept;

  // Replaces the previous list. Shards in memory are skipped.
  void read_ahead(std::span<const int> ids);
  // Receives words [begin, begin + numel) of a shard on NVMe, in order from 0. True: they were
  // taken. A shard in the window is used only once all of it was taken.
  bool receive(int id, std::int64_t begin, std::int64_t numel, const void* values);
  // Drops shards that have changed or are about to. Blocks while one of them is being read.
  void forget(int id);
  void forget_all();
  // Drops what was read ahead, when the order of uses has changed.
  void forget_read_ahead();
  // Call it before device copies (shard::DeviceCopy) are freed. Loads that have not begun to read a
  // copy take the shard from host memory; the reduce stream, after which the memory is freed, waits
  // for the other loads. REQUIRES: all copies are made.
  void forget_device_copies();

  // From outside of a step, on NVMe: words [begin, begin + numel) of the shard, on the host;
  // begin is a multiple of shard::kShardStep, and so is the end unless it is that of range(), or
  // of the shard. Blocks.
  void write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
             const void* elements);
  // All shard_bytes() of it, padding included; also if its parameter has just got memory.
  void read(const shard::Param& param, void* to);

  std::size_t window_bytes() const { return sizes_.window_bytes; }
  LoaderStats take_stats(Tier tier);

 private:
  ShardLoader(shard::ParamTable& params, shard::ShardStore* store, device::Device& device,
              Tier tier, const LoaderSizes& sizes);

  struct Load {
    const shard::Param* param = nullptr;
    Tier tier = Tier::kHost;  // loaded from
    std::byte* to = nullptr;
    void* decoded = nullptr;  // null: it is not
    shard::DeviceCopy copy;   // none: the shard is loaded from its tier
    device::Pending updated;
    device::Pending ready;
    std::shared_ptr<device::HandedOver> done;  // null: not queued
    device::StreamKind late = device::StreamKind::kGather;
  };
  struct Lane {  // the loads of one tier
    std::deque<Load> loads;
    bool is_loading = false;
    bool is_reading_copy = false;  // on the device
    LoaderStats stats;
    std::thread worker;  // from the first load that is queued on

    bool is_idle() const { return loads.empty() && !is_loading; }
  };
  struct Ahead {  // a shard in the window
    tier::Lease lease;
    device::Pending read;
    bool is_update = false;
    std::int64_t num_received = 0;  // elements
    bool is_whole = false;          // or will be, when `read` is done
  };
  struct Wanted {
    const shard::Param* param = nullptr;
    device::Pending updated;
  };

  std::int64_t tile_numel(const shard::Param& param) const;  // of fp32 or narrower
  void carry_out(Lane& lane);
  device::Pending load(const Load& load);  // waits for what it may not start before
  device::Pending load_bytes(const Load& load);
  void load_from_nvme(const Load& load);
  bool load_from_window(const Load& load);
  void load_in_tiles(const shard::Param& param, std::byte* to);
  // The lock is held.
  device::Pending queue(Load load);
  Lane& lane_of(Tier tier) { return tier == Tier::kNvme ? nvme_ : host_; }
  bool is_queued(int id) const;  // on NVMe
  void read_more();
  bool free_one();  // of what was read in vain; false: there is nothing
  // Condition(id, is_update) says which.
  template <typename Condition>
  void forget_if(Condition condition);

  shard::ParamTable& params_;
  shard::ShardStore* const store_;  // null: no shard is on NVMe
  device::Device& device_;
  device::Stream& gather_;
  device::Stream& read_;
  const LoaderSizes sizes_;
  tier::BufferPool tiles_;
  tier::BufferPool window_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  Lane host_;
  Lane nvme_;
  std::map<int, Ahead> ahead_;
  std::deque<Wanted> wanted_;  // of the list, what is still to be read
  std::set<int> listed_;       // all of it
  bool is_closing_ = false;
};

}  // namespace tessera::coordinator
