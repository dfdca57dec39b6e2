// Loads shards from host memory and from NVMe to where they are gathered.
//
//   start_load(...)    H2D from host memory; from NVMe by way of the prefetch window, or in tiles
//                      straight from the store, so that a shard may be larger than all buffers
//   read_ahead(ids)    the next shards on NVMe, in the order of use, are read into the prefetch
//                      window, as far as it goes; none is passed over
//   receive(...)       an update hands over new values on their way to NVMe: a shard that fits into
//                      the window is loaded from there, and is not read at all
//
// What is in the window is never written back: the store has it, or is about to get it. A shard in
// host memory whose new values the device still has (shard::DeviceCopy) is copied on the device, on
// the gather stream.
//
// Order: loads of one tier are carried out in the order of their calls, which is that of the
// gathers, by a thread of that tier; reads ahead in the order of the last list. The caller never
// waits; whoever needs a shard from host memory waits on the host for the start of its copy only
// (device/handed_over.h). Nothing here is a collective.
//
// Invariants:
//  (1) A shard is read only when its update and the writes of that update are done.
//  (2) What is in the window is the shard's newest version: forget_all() comes between the end of
//      an update and the beginning of the next.
//  (3) A load from NVMe needs two tiles, which are of one size, so that either fits where the other
//      was; it never waits for the window.
//  (4) What was read ahead and is not on the last list makes room for what is.
//
// [Note: one queue for H2D copies] A GPU has one engine for H2D copies, which goes on with a stream
// as long as that has copies that are ready: optimizer states that stream to their update would
// keep parameters waiting that the model needs now. So both are given to the read stream, each when
// it is ready and not before: the stream's order is that of readiness, and no copy in it waits for
// anything but those before it. Which comes first decides over time, not bits.
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

// Of one tier, since the last take_stats(); without padding to whole blocks.
struct LoaderStats {
  std::uint64_t loaded_bytes = 0;       // kHost: H2D alone, without copies on the device
  std::uint64_t from_update_bytes = 0;  // of them, straight from their update; NVMe only
  std::uint64_t read_ahead_bytes = 0;   // of them, read before they were asked for; NVMe only
};

// How the buffers of a loader are used.
struct LoaderSizes {
  std::size_t tile_bytes = 0;    // two of them
  std::size_t window_bytes = 0;  // the rest
};
LoaderSizes loader_sizes(std::size_t buffer_bytes);
// The smallest buffers that a loader from NVMe works with.
inline constexpr std::size_t kSmallestLoaderBytes =
    2 * static_cast<std::size_t>(shard::kShardStep) * sizeof(float);

class ShardLoader {
 public:
  // Of shards in host memory. Both outlive the loader.
  ShardLoader(shard::ParamTable& params, device::Device& device);
  // On NVMe as well. `buffer_bytes`: of memory of `tier`, all that it takes. Registers itself as
  // the receiver of updates (ParamTable::pass_on).
  ShardLoader(shard::ParamTable& params, shard::ShardStore& store, device::Device& device,
              Tier tier, std::size_t buffer_bytes);
  // Carries out what was asked for.
  ~ShardLoader();
  ShardLoader(const ShardLoader&) = delete;
  ShardLoader& operator=(const ShardLoader&) = delete;

  // shard_bytes() bytes at `to`, once the shard's update and `ready` are done. `decoded`: memory
  // for shard_numel() elements, which a shard that is stored as blocks is decoded to behind that,
  // on the gather stream; null: whoever gathers it decodes it. `to` is used behind the gather
  // stream where a copy on the device serves. Failures are those of the update, of `ready`, or
  // IoErrors with the parameter's name.
  [[nodiscard]] device::Pending start_load(const shard::Param& param, std::byte* to,
                                           device::Pending ready, void* decoded = nullptr);
  // Blocks until all loads have been started, and those from NVMe are done.
  void wait_idle() noexcept;

  // Replaces the list of before. Shards in memory are skipped.
  void read_ahead(std::span<const int> ids);
  // Words [begin, begin + numel) of a shard on NVMe, beginning with 0 and in order. True: taken;
  // what was taken of a shard counts only once all of it is.
  bool receive(int id, std::int64_t begin, std::int64_t numel, const void* values);
  // Shards that are about to change, or have. Blocks while one is being read.
  void forget(int id);
  void forget_all();
  // What was read ahead in vain: the order of uses has turned out to be another.
  void forget_read_ahead();
  // Copies on the device are about to go: loads that have not begun to read one take the shard from
  // host memory, and the reduce stream, behind which their memory is freed, waits for the others.
  // REQUIRES: all of them are made.
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
    std::shared_ptr<device::HandedOver> done;
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
