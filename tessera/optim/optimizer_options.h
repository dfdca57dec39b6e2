// Options and statistics of an optimizer.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/core/clock.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/optim/kernels.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/store.h"

namespace tessera::optim {

// Every object here outlives the optimizer.
struct OptimizerOptions {
  device::Device& device;  // whose streams make gradients and read shards
  Kernels& kernels;        // of it
  const Clock& clock;
  Spans& spans;

  // With a discrete device: the host, for the CPU's share of the update. Null: `device` is the
  // host.
  device::Device* host = nullptr;
  Kernels* host_kernels = nullptr;
  // Slots in a discrete device's memory, through which states in host memory are updated there.
  int num_slots = 0;
  std::size_t slot_bytes = 0;
  // Bytes of a slot per element for gradients in host memory (device_executor.h, [Note: gradients
  // of several micro-batches]); 0: the device needs none.
  std::size_t slot_gradient_bytes = 0;

  // Null where nothing is offloaded to NVMe. The buffers hold at least one lease of the largest
  // sub-group, and only the optimizer takes leases from them.
  tier::Store* states = nullptr;
  shard::ShardStore* parameters = nullptr;
  tier::BufferPool* buffers = nullptr;
  std::int64_t sub_group_numel = std::int64_t{1} << 24;  // a multiple of shard::kShardStep
  bool reads_ahead = true;                               // of the sub-group that is updated
  bool writes_behind = true;                             // while the next one is updated

  device::Device& cpu() const { return host != nullptr ? *host : device; }
  Kernels& cpu_kernels() const { return host_kernels != nullptr ? *host_kernels : kernels; }
};

// An update that an executor has started: Optimizer tells its parameter.
struct StartedUpdate {
  int id = 0;
  device::Pending done;
  shard::DeviceCopy copy = {};
  bool has_gradient = true;  // false: the parameter only moves with its states
};

struct OptimizerStats {
  // Between host and discrete device.
  std::uint64_t states_h2d_bytes = 0;
  std::uint64_t states_d2h_bytes = 0;
  std::uint64_t parameters_h2d_bytes = 0;
  std::uint64_t parameters_d2h_bytes = 0;
  std::uint64_t gradients_h2d_bytes = 0;
  // From and to NVMe, by the update; prefetches of parameters are not among them.
  std::uint64_t states_read_bytes = 0;
  std::uint64_t states_written_bytes = 0;
  std::uint64_t parameters_read_bytes = 0;
  std::uint64_t parameters_written_bytes = 0;
  std::uint64_t gradients_read_bytes = 0;
  // Times of the pipeline's thread.
  double read_wait_s = 0;   // for data
  double lease_wait_s = 0;  // for buffers, which writes still hold
  double update_s = 0;      // computing

  OptimizerStats& operator+=(const OptimizerStats& other);
};

}  // namespace tessera::optim
