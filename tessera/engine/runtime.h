// The environment of engines, one per rank: the ranks of the run, this rank's device and its
// ledger.
//
//   tessera::Runtime runtime(config);            // joins torchrun's, mpirun's, srun's or our own
//   tessera::Engine engine(runtime);             // launcher's ranks, or is a world of one
//
// With trace.path the runtime records spans (trace.ring_spans) and writes them when it ends, also
// while an exception unwinds.
//
// Several engines may share one runtime; ranks then use them in the same order. No globals: ranks
// may be threads of one process.
//
// Threads: construct and destroy on one thread; the parts say what they allow.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/core/clock.h"
#include "tessera/core/config.h"
#include "tessera/core/ledger.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/device/device_cpu.h"
#include "tessera/optim/kernels.h"
#include "tessera/planner/update_split.h"
#include "tessera/tier/io_engine.h"

namespace tessera {

struct RuntimeOptions {
  // This rank's GPU; -1: CPU.
  int cuda_device = -1;
  // Threads of the update on the host; 0: as many as torch uses, and no more than this rank's part
  // of the host's cores; beside a device with memory of its own all cores of that part but two,
  // which feed it.
  int num_update_threads = 0;
  // For tests: what stands in for the CPU, such as the mock device. Null: the CPU itself.
  std::function<std::unique_ptr<device::Device>(device::CpuDeviceOptions)> make_device = {};
  // For tests: what stands between the tiers and the disk. Null: nothing.
  std::function<std::unique_ptr<tier::IoEngine>(std::unique_ptr<tier::IoEngine>)> wrap_io = {};
};

// "run.json" of rank 2 is "run.rank2.json"; rank 0 has the name itself.
std::string file_of_rank(const std::string& path, int rank);

class Runtime {
 public:
  // Collective: joins the ranks of this run. Checks the config first.
  explicit Runtime(Config config, const RuntimeOptions& options = {});
  // For ranks that exist already (threads, another runtime's): borrows the group, which outlives
  // the runtime. Collective.
  Runtime(Config config, comm::Group& world, const RuntimeOptions& options = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  int rank() const;
  int num_ranks() const;
  const Config& config() const;
  comm::Group& group() const;  // all ranks that train a model
  // The same ranks, for reductions. The moment at which a bucket is full differs between ranks that
  // use different parameters, so reductions cannot share one order of calls with gathers.
  comm::Group& reduce_group() const;
  device::Device& device() const;
  bool on_cuda() const { return cuda_device() >= 0; }
  int cuda_device() const;  // -1: CPU
  optim::Kernels& kernels() const;
  // With a discrete device: the CPU as a device, with host memory and its kernels. Otherwise the
  // same as device() and kernels().
  device::Device& host_device() const;
  optim::Kernels& host_kernels() const;
  // Ranks of this run that share this host's cores and memory (device::read_host_id()), and which
  // of them this one is.
  int local_rank() const;
  int num_local_ranks() const;
  // By rank of the group: a name of its host, as it was found, or of the pretended one where
  // comm.ranks_per_host says so, by the rank in the world that was launched.
  const std::vector<std::uint64_t>& hosts() const;
  // Collective over `group`, in the caller's order: what the CPU and the link give to each rank
  // while all of them work, the least of all ranks. Measured once, unless a rank has not yet.
  // `free_host_bytes`: each rank's share, of which a part is taken meanwhile. REQUIRES: on_cuda().
  planner::UpdateRates update_rates(comm::Group& group, std::int64_t free_host_bytes);
  Ledger& ledger() const;
  Spans& spans() const;
  // Writes what trace.path asks for, once; what it meets is logged. The destructor calls it.
  void write_trace() noexcept;
  const Clock& clock() const;
  const Logger& logger() const;
  // Backwards of engines on this runtime that run now.
  std::atomic<int>& num_backwards() const;
  // Where a failure of this rank is posted; null in a world of one.
  const std::shared_ptr<comm::StatusStore>& status() const;
  // A reason why the faster engine cannot be had is logged once.
  std::unique_ptr<tier::IoEngine> make_io_engine(tier::IoOptions options) const;

 private:
  void set_up_ranks();
  void find_local_ranks();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
