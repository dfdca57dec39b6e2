// Brings shards that live in pinned memory of the host to where they are gathered, on a device with
// memory of its own.
//
// A copy must not start before the shard's update is done, nor before the former users of its place
// are. A thread of this feed waits for that and starts the copy then; so the caller goes on, and
// whoever needs the parameter waits on the host for the start of the copy only
// (device/handed_over.h).
//
// [Note: one queue for all that goes up] A GPU has one engine for copies to it, which goes on with
// a stream as long as that has copies that are ready: states that stream to their update (optim's
// device_update.h) would keep parameters waiting that the model needs now. So both are given to the
// read stream, each when it is ready and not before: then its order is that of readiness, and no
// copy in it waits for anything but those before it. Which comes first decides over time, not bits.
//
// A shard whose new values the device still has (shard::DeviceCopy) is not brought up: they are
// copied on the device, on the gather stream, as soon as they are made.
//
// What fixes the order: copies are started in the order of the calls, which is that of the gathers.
// Nothing here is a collective.
//
// Threads: all calls as Param; a thread of its own.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/device/device.h"
#include "tessera/device/handed_over.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

class HostFeed {
 public:
  // `device` outlives the feed.
  explicit HostFeed(device::Device& device);
  // Carries out what was asked for.
  ~HostFeed();
  HostFeed(const HostFeed&) = delete;
  HostFeed& operator=(const HostFeed&) = delete;

  // shard_bytes() bytes at `to`, behind everything that the gather stream has been given so far.
  // Failures are those of the update.
  [[nodiscard]] device::Pending start_bring(const shard::Param& param, std::byte* to);
  // Copies on the device are about to go: what has not begun to read one brings the shard itself,
  // and the reduce stream, behind which their memory is given back, waits for the others.
  // REQUIRES: all of them are made.
  void forget_device_copies();
  // Blocks until all that was asked for has been started.
  void wait_idle() noexcept;
  // Since the last call.
  std::uint64_t take_brought_bytes() { return std::exchange(brought_bytes_, 0); }

 private:
  struct Bring {
    const shard::Param* param = nullptr;
    shard::DeviceCopy copy;  // of the device; none: the shard is brought
    device::Pending updated;
    device::Pending free;  // its place is
    std::byte* to = nullptr;
    std::shared_ptr<device::HandedOver> done;
  };
  void carry_out();
  device::Pending start(const Bring& bring);  // waits for what it may not start before

  device::Device& device_;
  device::Stream& gather_;
  device::Stream& read_;
  std::uint64_t brought_bytes_ = 0;  // of the caller's thread

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Bring> brings_;
  bool is_bringing_ = false;
  bool is_reading_copy_ = false;  // what it brings is on the device
  bool is_closing_ = false;

  std::thread worker_;  // last: it uses everything above
};

}  // namespace tessera::coordinator
