#include "tessera/comm/bootstrap.h"

#include <unistd.h>

#include <array>
#include <future>
#include <numeric>
#include <thread>

#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/ipc_backend.h"
#include "tessera/comm/nccl_backend.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/comm/socket_probe.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"
#include "tessera/device/device_cuda.h"

namespace tessera::comm {
namespace {

// What kAuto takes as this rank's host, among those of one machine.
int pretended_host(const Rendezvous& rendezvous, const WorldOptions& options) {
  const bool pretends = options.backend == BackendKind::kAuto && options.ranks_per_host > 0;
  return pretends ? rendezvous.rank / options.ranks_per_host : 0;
}

// NCCL refuses ranks that share a GPU, as those of pretended hosts may.
bool needs_gloo(const Rendezvous& rendezvous, const WorldOptions& options) {
  return options.backend == BackendKind::kAuto && options.ranks_per_host > 0 &&
         options.ranks_per_host < rendezvous.local_world_size &&
         rendezvous.local_world_size > device::num_cuda_devices();
}

void check_hosts(const Rendezvous& rendezvous, const WorldOptions& options) {
  TESSERA_CHECK(
      options.ranks_per_host >= 0 &&
          (options.ranks_per_host == 0 || rendezvous.world_size % options.ranks_per_host == 0),
      ConfigError, "comm.ranks_per_host = ", options.ranks_per_host,
      " (--ranks-per-host) does not divide the ", rendezvous.world_size, " ranks");
}

GlooOptions gloo_options(const Rendezvous& rendezvous, const WorldOptions& options,
                         std::shared_ptr<StatusStore> status) {
  GlooOptions gloo;
  gloo.timeout = options.group.timeout;
  gloo.status = std::move(status);
  gloo.tries_sharing_in_splits = options.backend == BackendKind::kAuto;
  gloo.cuda_device = options.cuda_device;
  gloo.pretended_host = pretended_host(rendezvous, options);
  // The variable that c10d's own users know.
  gloo.interface = process_environment()["GLOO_SOCKET_IFNAME"];
  if (rendezvous.local_world_size == rendezvous.world_size) {
    gloo.bind_host = "127.0.0.1";
  } else {
    // Not what this host's name stands for: on many systems that is loopback.
    gloo.bind_host = address_towards(rendezvous.host, rendezvous.port);
  }
  return gloo;
}

// `note`: why it is not a faster one.
std::unique_ptr<Backend> make_backend(const Rendezvous& rendezvous, const WorldOptions& options,
                                      std::shared_ptr<Store> store, const std::string& name,
                                      std::shared_ptr<StatusStore> status, std::string& note) {
  const bool on_gpu = options.cuda_device >= 0;
  const BackendKind kind = options.backend;
  TESSERA_CHECK(kind != BackendKind::kNccl || on_gpu, ConfigError,
                "comm.backend=nccl needs a GPU per rank, and this rank runs on the CPU; use auto");
  TESSERA_CHECK(kind != BackendKind::kIpc || on_gpu, ConfigError,
                "comm.backend=ipc is for ranks on GPUs, and this rank runs on the CPU; use auto");
  if (kind == BackendKind::kIpc || (kind == BackendKind::kAuto && on_gpu)) {
    IpcOptions ipc;
    ipc.timeout = options.group.timeout;
    ipc.status = status;
    ipc.pretended_host = pretended_host(rendezvous, options);
    std::string why_not;
    if (auto backend = make_ipc_backend(store, rendezvous.rank, rendezvous.world_size,
                                        options.cuda_device, name, ipc, why_not)) {
      return backend;
    }
    TESSERA_CHECK(kind == BackendKind::kAuto, CommError,
                  "comm.backend=ipc: the ranks' GPUs do not share memory: ", why_not,
                  "; comm.backend=auto takes nccl then");
    note = "no shared memory of GPUs: " + why_not;
  }
  if (kind == BackendKind::kNccl ||
      (kind == BackendKind::kAuto && on_gpu && !needs_gloo(rendezvous, options))) {
    return make_nccl_backend(std::move(store), rendezvous.rank, rendezvous.world_size,
                             options.cuda_device, name,
                             gloo_options(rendezvous, options, std::move(status)));
  }
  if (kind == BackendKind::kShm || (kind == BackendKind::kAuto && !on_gpu)) {
    ShmOptions shm;
    shm.timeout = options.group.timeout;
    shm.status = status;
    shm.pretended_host = pretended_host(rendezvous, options);
    std::string why_not;
    if (auto backend =
            make_shm_backend(store, rendezvous.rank, rendezvous.world_size, name, shm, why_not)) {
      return backend;
    }
    TESSERA_CHECK(kind == BackendKind::kAuto, CommError,
                  "comm.backend=shm: the ranks do not share memory: ", why_not,
                  "; comm.backend=auto takes gloo then");
    note = "no shared memory: " + why_not;
  }
  return make_gloo_backend(std::move(store), rendezvous.rank, rendezvous.world_size, name,
                           gloo_options(rendezvous, options, std::move(status)));
}

std::string this_process() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return detail::concat("process ", getpid(), " on ", host.data());
}

std::shared_ptr<StatusStore> connect_status(const Rendezvous& rendezvous, const std::string& prefix,
                                            std::chrono::milliseconds timeout) {
  return std::make_shared<StatusStore>(
      connect_store(rendezvous.host, rendezvous.port, timeout, rendezvous.key_prefix + prefix),
      rendezvous.world_size);
}

// Two processes with one number would wait for the one whose number nobody has.
void claim_rank(Store& store, const Rendezvous& rendezvous, std::chrono::milliseconds timeout) {
  const std::string key = detail::concat("process of rank ", rendezvous.rank);
  const std::string mine = this_process();
  if (store.add(key + ", claims", 1) == 1) {
    store.set(key, mine);
  }
  const std::string first = store.get(key, timeout);
  if (first == mine) {
    return;
  }
  const std::string text = detail::concat("two processes joined as rank ", rendezvous.rank, " of ",
                                          rendezvous.world_size, ": ", first, ", and ", mine,
                                          "; give every process a number of its own (RANK), or "
                                          "start all of them with torchrun, mpirun, "
                                          "srun or tessera --ranks");
  const ConfigError error(text);
  connect_status(rendezvous, "", timeout)->post_failure(rendezvous.rank, error);
  throw error;
}

// Gloo waits for a peer that it has no descriptor for, and does not say so.
void check_open_files(const Rendezvous& rendezvous) {
  constexpr std::uint64_t kOther = 12;   // listeners, threads' events, files of the run
  constexpr std::uint64_t kPerPeer = 6;  // connections of all groups
  const std::uint64_t needed =
      num_open_files() + kOther + kPerPeer * static_cast<std::uint64_t>(rendezvous.world_size - 1);
  raise_open_file_limit(needed);
  TESSERA_CHECK(needed <= open_file_limit(), ConfigError, "a rank of ", rendezvous.world_size,
                " takes ", needed, " open files and connections", open_files_remedy());
}

// Under a limit of address space a thread may find no room for its stack, and c10d hangs or aborts
// where one of its own cannot start: so as many as a rank needs are started once, for nothing.
void check_threads() {
  constexpr int kThreads = 24;
  if (!address_space_limit()) {
    return;
  }
  std::promise<void> enough;
  const std::shared_future<void> over = enough.get_future().share();
  std::vector<std::thread> threads;
  std::string failure;
  try {
    threads.reserve(kThreads);
    while (threads.size() < kThreads) {
      threads.emplace_back([over] { over.wait(); });
    }
  } catch (const std::exception&) {
    failure = detail::concat(no_memory_text(0), "; a rank has about ", kThreads,
                             " threads, each with a stack (ulimit -s)");
  }
  enough.set_value();
  for (std::thread& thread : threads) {
    thread.join();
  }
  TESSERA_CHECK(failure.empty(), CommError, failure);
}

}  // namespace

World join_world(const Rendezvous& rendezvous, const WorldOptions& options) {
  World world;
  world.rendezvous = rendezvous;
  GroupOptions group = options.group;
  std::string name = "world";
  std::unique_ptr<Backend> backend;
  if (rendezvous.world_size == 1) {
    check_hosts(rendezvous, options);
    backend = make_solo_backend(options.group.device);
  } else {
    const std::shared_ptr<Store> store = join_store(rendezvous, options.group.timeout);
    claim_rank(*store, rendezvous, options.group.timeout);
    // A process may join more than once: what each world keeps in the store has its number.
    const std::int64_t number = store->add(detail::concat("worlds of rank ", rendezvous.rank), 1);
    const std::string prefix = number == 1 ? "" : detail::concat("world", number, "/");
    if (number > 1) {
      name = detail::concat("world.", number);
    }
    world.status = connect_status(rendezvous, prefix, options.group.timeout);
    group.status = world.status;
    try {
      check_hosts(rendezvous, options);
      check_open_files(rendezvous);
      check_threads();
      backend = make_backend(rendezvous, options, store, name, world.status, group.backend_note);
    } catch (const PeerError&) {
      throw;
    } catch (const std::exception& error) {
      // Whoever waits for this rank hears at once why it does not join.
      world.status->post_failure(rendezvous.rank, error);
      throw;
    }
  }
  std::vector<int> ranks(static_cast<std::size_t>(rendezvous.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  world.group =
      std::make_unique<Group>(std::move(backend), name, std::move(ranks), std::move(group));
  return world;
}

void tell_before_joining(const Rendezvous& rendezvous, const std::string& failure) noexcept {
  constexpr std::chrono::seconds kLimit{1};
  if (rendezvous.world_size == 1 || rendezvous.serves_store) {
    return;
  }
  try {
    connect_status(rendezvous, "", kLimit)->post_failure(rendezvous.rank, RankFailure{failure});
  } catch (const std::exception&) {
    return;  // they will find out at their time limit
  }
}

}  // namespace tessera::comm
