// What a tiered optimizer works with, and what it reports.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/clock.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/optim/kernels.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/store.h"

namespace tessera::optim {

// What of a parameter's shard is in a store; the rest is in memory. And who updates it.
struct StoredParts {
  bool parameter = false;
  bool gradient = false;
  bool states = false;
  // Where the device has memory of its own: it updates (device_update.h), and nothing is stored.
  bool device_update = false;
  bool states_on_device = false;  // else they come to it for every update
};

// A device with memory of its own, beside the host on which everything else here works.
struct OwnMemoryParts {
  // Both outlive the optimizer; null: there is none.
  device::Device* device = nullptr;
  Kernels* kernels = nullptr;
  // Room for states that come to it.
  int num_slots = 0;
  std::size_t slot_bytes = 0;
};

struct TieredParts {
  // All outlive the optimizer.
  const Clock& clock;
  Spans& spans;
  tier::Store* states = nullptr;            // null: none are stored
  shard::ShardStore* parameters = nullptr;  // null: none are stored
  // One lease of the largest sub-group at least; nobody else takes leases from it. Null: nothing is
  // stored.
  tier::BufferPool* buffers = nullptr;
  // By id; also of those that are frozen, should they be unfrozen.
  std::vector<StoredParts> stored = {};
  OwnMemoryParts own = {};
  std::int64_t sub_group_numel = 0;  // a multiple of shard::kShardStep
  bool reads_ahead = true;           // of the sub-group that is updated
  bool writes_behind = true;         // while the next one is updated
  // New values of a stored parameter, elements [begin, begin + numel) of its shard, before they are
  // written; valid during the call, which comes from the optimizer's thread. True: whoever waits
  // for the update does not read them from the store. Null: nobody wants them.
  std::function<bool(int id, std::int64_t begin, std::int64_t numel, const void* values)>
      on_updated = {};
};

struct TieredStats {
  // Between the host and a device with memory of its own.
  std::uint64_t states_up_bytes = 0;
  std::uint64_t states_down_bytes = 0;
  std::uint64_t parameters_up_bytes = 0;
  std::uint64_t parameters_down_bytes = 0;
  std::uint64_t gradients_down_bytes = 0;

  std::uint64_t states_read_bytes = 0;
  std::uint64_t states_written_bytes = 0;
  // By the update; reads ahead of gathers are not among them.
  std::uint64_t parameters_read_bytes = 0;
  std::uint64_t parameters_written_bytes = 0;
  std::uint64_t gradients_read_bytes = 0;
  // Of the optimizer's thread.
  double read_wait_s = 0;   // data had not come
  double lease_wait_s = 0;  // writes had not given their buffers back
  double update_s = 0;      // it computed
};

}  // namespace tessera::optim
