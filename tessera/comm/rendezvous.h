// Who am I, how many are we, and where is the store: answered from environment variables alone.
//
// Launchers are recognised in this order; the first whose variables are there decides:
//   our own launcher  TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_STORE_HOST, TESSERA_STORE_PORT
//   torchrun          RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   mpirun            OMPI_COMM_WORLD_* (Open MPI), PMI_* with MPI_LOCAL* (MPICH, Intel MPI)
//   srun              SLURM_PROCID and its relatives, unless a batch script or an interactive
//                     shell runs us without srun: those also carry SLURM_PROCID=0
// No variables: a world of one, which needs no store.
//
// Nothing is guessed from half a set: partial or contradictory variables are a ConfigError that
// names the variable, its value and the remedy.
//
// Threads: pure functions; process_environment() reads the environment once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tessera::comm {

using Environment = std::map<std::string, std::string>;
Environment process_environment();

enum class RendezvousSource : std::uint8_t { kNone, kTessera, kTorchrun, kMpi, kSlurm };
// "torchrun", "mpirun", ... as messages call it.
std::string_view to_string(RendezvousSource source);

struct Rendezvous {
  RendezvousSource source = RendezvousSource::kNone;
  int rank = 0;
  int world_size = 1;
  // Among the ranks of this host. Where the launcher does not say: all ranks are on this host if
  // the store is, else one rank per host.
  int local_rank = 0;
  int local_world_size = 1;
  // Where the store is. Empty and 0 in a world of one.
  std::string host;
  std::uint16_t port = 0;
  // This process must hold the store: nobody else does.
  bool serves_store = false;
  // Put before every key: torchrun's store outlives a restart and holds keys of its own.
  std::string key_prefix = "tessera/";
  // The prefix holds a secret of this run (kSecretVariable).
  bool has_secret = false;
};

// Our launcher draws one for its ranks; with other launchers the user may give one to all ranks.
// It stands in every key, so that a stranger who reaches the port does not meet our keys by chance
// or by guessing. It is no encryption: docs/security.md.
inline constexpr const char* kSecretVariable = "TESSERA_RUN_SECRET";
// What stands before every key of a run with this secret; empty: none.
std::string key_prefix_with(const std::string& prefix, const std::string& secret);
// What to tell the user about a store that others than this machine can reach; mostly nothing.
std::string trust_warning(const Rendezvous& rendezvous);

Rendezvous find_rendezvous(const Environment& env);

// A name of the loopback address on every machine.
bool is_loopback_name(const std::string& host);

}  // namespace tessera::comm
