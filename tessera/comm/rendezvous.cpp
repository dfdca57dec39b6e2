#include "tessera/comm/rendezvous.h"

#include <unistd.h>

#include <charconv>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <optional>
#include <vector>

#include "tessera/comm/nodelist.h"
#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::uint16_t kTorchDefaultPort = 29500;
// Derived ports lie below Linux's range of ephemeral ports (from 32768), so that no outgoing
// connection happens to hold one.
constexpr std::uint64_t kFirstDerivedPort = 12000;
constexpr std::uint64_t kNumDerivedPorts = 20000;

// A variable that is set. Variables set to nothing count as absent, as in most launchers.
struct Variable {
  std::string name;
  std::string value;
};

std::optional<Variable> find(const Environment& env, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto found = env.find(name);
    if (found != env.end() && !found->second.empty()) return Variable{name, found->second};
  }
  return std::nullopt;
}

std::int64_t checked_number(const Variable& variable, std::int64_t low, std::int64_t high) {
  std::int64_t value = 0;
  const char* end = variable.value.data() + variable.value.size();
  const auto [stop, error] = std::from_chars(variable.value.data(), end, value);
  TESSERA_CHECK(error != std::errc::invalid_argument && stop == end, ConfigError, variable.name,
                "='", variable.value, "' is not a whole number; set it to one from ", low, " to ",
                high, ", or unset it");
  TESSERA_CHECK(error == std::errc() && value >= low && value <= high, ConfigError, variable.name,
                "=", variable.value, " is out of range; set it to a number from ", low, " to ",
                high);
  return value;
}

int to_int(const Variable& variable, int low) {
  return static_cast<int>(checked_number(variable, low, std::numeric_limits<int>::max()));
}

Variable require(const Environment& env, const char* name, const Variable& because,
                 const char* remedy) {
  const std::optional<Variable> found = find(env, {name});
  TESSERA_CHECK(found, ConfigError, because.name, "=", because.value, " is set, but ", name,
                " is not; ", remedy);
  return *found;
}

void check_rank(const char* kind, const Variable& rank, int rank_value,
                const std::string& size_name, int size_value) {
  TESSERA_CHECK(rank_value < size_value, ConfigError, rank.name, "=", rank.value, " is not below ",
                size_name, "=", size_value, "; ", kind, " go from 0 to ", size_value - 1);
}

struct RankAndSize {
  int rank = 0;
  int size = 1;
};

// Both, or neither.
std::optional<RankAndSize> find_rank(const Environment& env, const char* kind,
                                     const char* rank_name, const char* size_name,
                                     const char* remedy) {
  const std::optional<Variable> rank = find(env, {rank_name});
  const std::optional<Variable> size = find(env, {size_name});
  if (!rank && !size) return std::nullopt;
  const Variable& set = rank ? *rank : *size;
  TESSERA_CHECK(rank && size, ConfigError, set.name, "=", set.value, " is set, but ",
                rank ? size_name : rank_name, " is not; ", remedy);
  const RankAndSize found{to_int(*rank, 0), to_int(*size, 1)};
  check_rank(kind, *rank, found.rank, size_name, found.size);
  return found;
}

void set_local_rank(Rendezvous& result, std::optional<RankAndSize> found) {
  if (!found) {
    const bool one_host = is_loopback_name(result.host);
    found = one_host ? RankAndSize{result.rank, result.world_size} : RankAndSize{0, 1};
  }
  TESSERA_CHECK(found->size <= result.world_size, ConfigError, found->size,
                " ranks on this host, but only ", result.world_size,
                " in the world; the launcher's variables contradict each other: unset those that "
                "are left over from an outer launcher");
  result.local_rank = found->rank;
  result.local_world_size = found->size;
}

std::optional<std::uint16_t> find_port(const Environment& env, const char* name) {
  const std::optional<Variable> port = find(env, {name});
  if (!port) return std::nullopt;
  return static_cast<std::uint16_t>(checked_number(*port, 1, 65535));
}

std::uint16_t derived_port(const std::string& job) {
  const std::uint64_t seed = hash_bytes(job.data(), job.size(), 0);  // the same on every host
  return static_cast<std::uint16_t>(kFirstDerivedPort + seed % kNumDerivedPorts);
}

std::optional<Rendezvous> from_tessera(const Environment& env) {
  constexpr const char* kRemedy =
      "these variables are set by --ranks for the ranks that it starts; unset all TESSERA_*";
  const auto found = find_rank(env, "ranks", "TESSERA_RANK", "TESSERA_WORLD_SIZE", kRemedy);
  if (!found) return std::nullopt;
  const Variable because{"TESSERA_RANK", std::to_string(found->rank)};
  Rendezvous result;
  result.source = RendezvousSource::kTessera;
  result.rank = found->rank;
  result.world_size = found->size;
  result.host = require(env, "TESSERA_STORE_HOST", because, kRemedy).value;
  require(env, "TESSERA_STORE_PORT", because, kRemedy);
  result.port = *find_port(env, "TESSERA_STORE_PORT");
  set_local_rank(result, RankAndSize{result.rank, result.world_size});
  return result;
}

std::optional<Rendezvous> from_torchrun(const Environment& env) {
  const auto found = find_rank(env, "ranks", "RANK", "WORLD_SIZE",
                               "start the program with torchrun, or set both, or unset both");
  if (!found) return std::nullopt;
  Rendezvous result;
  result.source = RendezvousSource::kTorchrun;
  result.rank = found->rank;
  result.world_size = found->size;
  if (result.world_size > 1) {
    const Variable because{"WORLD_SIZE", std::to_string(found->size)};
    constexpr const char* kRemedy =
        "set it to where rank 0 can be reached, or start the program with torchrun";
    result.host = require(env, "MASTER_ADDR", because, kRemedy).value;
    require(env, "MASTER_PORT", because, kRemedy);
    result.port = *find_port(env, "MASTER_PORT");
    const auto agent = find(env, {"TORCHELASTIC_USE_AGENT_STORE"});
    const bool agent_serves =
        agent && (agent->value == "True" || agent->value == "true" || agent->value == "1");
    result.serves_store = result.rank == 0 && !agent_serves;
    if (const auto restart = find(env, {"TORCHELASTIC_RESTART_COUNT"})) {
      result.key_prefix += std::to_string(to_int(*restart, 0)) + "/";
    }
  }
  set_local_rank(result, find_rank(env, "local ranks", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                   "set both, or unset both"));
  return result;
}

// The address of the store where the launcher gives none: only certain if all ranks are here.
void find_mpi_store(const Environment& env, Rendezvous& result) {
  if (result.world_size == 1) return;
  result.serves_store = result.rank == 0;
  if (const auto host = find(env, {"MASTER_ADDR"})) {
    result.host = host->value;
  } else {
    TESSERA_CHECK(result.local_world_size == result.world_size, ConfigError, "mpirun started ",
                  result.world_size, " ranks, ", result.local_world_size,
                  " of them known to be on this host, and MASTER_ADDR is not set; export "
                  "MASTER_ADDR=<host of rank 0> to all ranks (Open MPI: mpirun -x MASTER_ADDR, "
                  "MPICH: mpirun -genv MASTER_ADDR <host>)");
    result.host = "127.0.0.1";
  }
  if (const auto port = find_port(env, "MASTER_PORT")) {
    result.port = *port;
  } else if (const auto job = find(
                 env, {"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"})) {
    result.port = derived_port(job->value);
  } else {
    result.port = kTorchDefaultPort;
  }
}

std::optional<Rendezvous> from_mpi(const Environment& env) {
  constexpr const char* kRemedy = "start the program with mpirun, or unset the variable";
  Rendezvous result;
  result.source = RendezvousSource::kMpi;
  std::optional<RankAndSize> local;
  auto found = find_rank(env, "ranks", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", kRemedy);
  if (found) {
    local = find_rank(env, "local ranks", "OMPI_COMM_WORLD_LOCAL_RANK",
                      "OMPI_COMM_WORLD_LOCAL_SIZE", kRemedy);
  } else {
    found = find_rank(env, "ranks", "PMI_RANK", "PMI_SIZE", kRemedy);
    if (!found) return std::nullopt;
    local = find_rank(env, "local ranks", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", kRemedy);
  }
  result.rank = found->rank;
  result.world_size = found->size;
  set_local_rank(result, local);
  find_mpi_store(env, result);
  // Only now is the host known that decides where nothing else does.
  if (!local) set_local_rank(result, std::nullopt);
  return result;
}

// True if srun started this process as one of its tasks.
bool is_srun_task(const Environment& env) {
  if (!find(env, {"SLURM_PROCID"})) return false;
  const auto step = find(env, {"SLURM_STEP_ID", "SLURM_STEPID"});
  if (!step) {
    // A batch script's own environment has SLURM_PROCID=0 and the task count of the whole job.
    const auto environment = find(env, {"ENVIRONMENT"});
    return !(environment && environment->value == "BATCH");
  }
  // Slurm's own steps (batch, extern, interactive shell) have numbers at the top of 32 bits.
  constexpr std::int64_t kFirstReservedStep = 0xfffffff0;
  return checked_number(*step, 0, 0xffffffff) < kFirstReservedStep;
}

std::optional<RankAndSize> find_slurm_local_rank(const Environment& env, int world_size) {
  const auto local_id = find(env, {"SLURM_LOCALID"});
  if (!local_id) return std::nullopt;
  RankAndSize found{to_int(*local_id, 0), 0};
  const auto tasks = find(env, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (!tasks) {
    const auto nodes = find(env, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"});
    if (!nodes || to_int(*nodes, 1) != 1) return std::nullopt;
    found.size = world_size;
    check_rank("local ranks", *local_id, found.rank, "SLURM_NTASKS", found.size);
    return found;
  }
  const std::vector<int> counts = parse_tasks_per_node(tasks->value);
  const auto node = find(env, {"SLURM_NODEID"});
  const int node_index = node ? to_int(*node, 0) : 0;
  TESSERA_CHECK(static_cast<std::size_t>(node_index) < counts.size(), ConfigError,
                "SLURM_NODEID=", node_index, ", but ", tasks->name, "=", tasks->value,
                " lists only ", counts.size(), " nodes; start the ranks with one srun");
  found.size = counts[static_cast<std::size_t>(node_index)];
  check_rank("local ranks", *local_id, found.rank, tasks->name + " of this node", found.size);
  return found;
}

std::optional<Rendezvous> from_slurm(const Environment& env) {
  if (!is_srun_task(env)) return std::nullopt;
  const Variable rank = *find(env, {"SLURM_PROCID"});
  const auto size = find(env, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"});
  TESSERA_CHECK(size, ConfigError, rank.name, "=", rank.value,
                " is set, but SLURM_NTASKS is not; start the ranks with srun --ntasks=N");
  Rendezvous result;
  result.source = RendezvousSource::kSlurm;
  result.rank = to_int(rank, 0);
  result.world_size = to_int(*size, 1);
  check_rank("ranks", rank, result.rank, size->name, result.world_size);
  if (result.world_size > 1) {
    result.serves_store = result.rank == 0;
    if (const auto host = find(env, {"MASTER_ADDR"})) {
      result.host = host->value;
    } else {
      const auto nodes = find(env, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
      TESSERA_CHECK(nodes, ConfigError, size->name, "=", size->value,
                    " is set, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is; export "
                    "MASTER_ADDR=<host of rank 0>");
      result.host = parse_nodelist(nodes->value).front();
    }
    const auto job = find(env, {"SLURM_JOB_ID", "SLURM_JOBID"});
    const auto step = find(env, {"SLURM_STEP_ID", "SLURM_STEPID"});
    if (const auto port = find_port(env, "MASTER_PORT")) {
      result.port = *port;
    } else {
      TESSERA_CHECK(job, ConfigError, rank.name, "=", rank.value,
                    " is set, but neither SLURM_JOB_ID nor MASTER_PORT is; export MASTER_PORT=<a "
                    "free port on the host of rank 0>");
      // The step too, so that two steps of one job do not meet on one port.
      result.port = derived_port(job->value + "." + (step ? step->value : "0"));
    }
  }
  set_local_rank(result, find_slurm_local_rank(env, result.world_size));
  return result;
}

// srun --mpi=pmi2 sets PMI variables beside its own; Slurm's say more (hosts, job). Under MPICH's
// mpirun inside an allocation they differ, because there Slurm numbers mpirun's own helpers.
bool slurm_and_pmi_agree(const Environment& env) {
  const auto pmi_rank = find(env, {"PMI_RANK"});
  const auto slurm_rank = find(env, {"SLURM_PROCID"});
  if (!pmi_rank || !slurm_rank || find(env, {"MPI_LOCALRANKID"})) return false;
  const auto pmi_size = find(env, {"PMI_SIZE"});
  const auto slurm_size = find(env, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  return pmi_rank->value == slurm_rank->value && pmi_size && slurm_size &&
         pmi_size->value == slurm_size->value;
}

}  // namespace

bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Environment process_environment() {
  Environment env;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const std::size_t equals = text.find('=');
    // The first of two equal names wins, as in getenv.
    if (equals != std::string::npos) env.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return env;
}

std::string_view to_string(RendezvousSource source) {
  switch (source) {
    case RendezvousSource::kNone:
      return "none";
    case RendezvousSource::kTessera:
      return "tessera --ranks";
    case RendezvousSource::kTorchrun:
      return "torchrun";
    case RendezvousSource::kMpi:
      return "mpirun";
    case RendezvousSource::kSlurm:
      return "srun";
  }
  return "unknown";
}

namespace {

Rendezvous find_without_secret(const Environment& env) {
  if (auto found = from_tessera(env)) return *found;
  if (auto found = from_torchrun(env)) return *found;
  if (!slurm_and_pmi_agree(env)) {
    if (auto found = from_mpi(env)) return *found;
  }
  if (auto found = from_slurm(env)) return *found;
  // In an interactive shell of Slurm PMIX_RANK says nothing: that shell is a task of its own kind.
  const auto pmix = find(env, {"PMIX_RANK"});
  TESSERA_CHECK(!pmix || find(env, {"SLURM_PROCID"}), ConfigError, "PMIX_RANK=", pmix->value,
                " is set, but no variable says how many ranks there are; export RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT to every rank, or unset PMIX_RANK to run alone");
  return Rendezvous{};
}

}  // namespace

Rendezvous find_rendezvous(const Environment& env) {
  Rendezvous result = find_without_secret(env);
  if (const auto secret = find(env, {kSecretVariable})) {
    result.key_prefix = key_prefix_with(result.key_prefix, secret->value);
    result.has_secret = true;
  }
  return result;
}

std::string key_prefix_with(const std::string& prefix, const std::string& secret) {
  return secret.empty() ? prefix : prefix + secret + "/";
}

std::string trust_warning(const Rendezvous& rendezvous) {
  if (rendezvous.world_size == 1 || rendezvous.has_secret || is_loopback_name(rendezvous.host)) {
    return "";
  }
  return detail::concat("whoever reaches ", rendezvous.host, ":", rendezvous.port,
                        " can join or disturb this run: use a network that you trust, and give all "
                        "ranks the same ",
                        kSecretVariable, "=$(openssl rand -hex 16); see docs/security.md");
}

}  // namespace tessera::comm
