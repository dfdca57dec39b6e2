// From byte budgets to a place for every shard, and to the sizes of everything that is allocated.
// Pure: nothing is allocated, and the same input gives the same plan on every machine with pages of
// the same size.
//
// One rank is planned; all are alike up to what does not divide. On a device whose memory is the
// host's (CPU), `device` and `host` are one memory, and the smaller of both budgets bounds it. What
// follows is about such a device.
//
// Without a budget and without a wish everything is in memory, as large as the options say. With a
// budget, what must be in memory comes first: the arena of gathered parameters (at least the
// largest unit; in a group of one, parameters in memory are used where they lie and need none), the
// buckets of reductions, the staging of the network's calls (none in a group of one), the buffers
// of I/O at their smallest. Then the first of these that fits:
//   everything in memory, no NVMe and no buffers;
//   only optimizer states leave memory; gradient shards, too; parameters, too.
// Of the rest, one half goes to speed until that has what it can use (one half of it to the buffers
// of the optimizer, a quarter to those of parameters, an eighth to those of gradients, what is left
// to a second unit in the arena), and the other keeps shards in memory by benefit per byte: small
// parameters (up to kSmallParamBytes); parameters in the order of use; gradient shards; optimizer
// states in the order of use. Shard by shard: a later one that fits stays where an earlier one did
// not. So a larger budget never puts more bytes on NVMe.
//
// On a device with memory of its own (CUDA), `device` and `host` are two budgets; cuda_placement.h
// says by which rules.
//
// What autograd holds besides (activations, and the full gradient of one parameter at a time; on
// CUDA those that are still on their way, too) is torch's: it is stated, and not part of the
// budgets.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tessera/comm/staging.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"

namespace tessera {
class Config;
}

namespace tessera::planner {

inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
// Of full parameters: kept in memory first, since each costs a request and saves few bytes.
inline constexpr std::int64_t kSmallParamBytes = std::int64_t{256} << 10;

struct ParamShape {
  std::string name;
  std::int64_t numel = 0;
  bool trainable = true;
  bool dynamic = false;
};

// What a step works on; made from a model's shapes (before it exists) or from an engine's tables.
struct ModelShapes {
  std::vector<ParamShape> params;       // by id: in the order of registration, which is that of use
  std::vector<std::vector<int>> units;  // ids that each needs, own and external, ascending
  std::vector<std::string> unit_names;  // for messages; may be empty
  DType dtype = DType::kFloat32;
};

enum class Wish : std::uint8_t { kAuto, kDevice, kHost, kNvme };

struct PlacementOptions {
  int num_ranks = 1;
  bool on_cuda = false;
  bool has_nvme = false;  // there are directories for it
  std::int64_t device_bytes = kUnlimited;
  std::int64_t host_bytes = kUnlimited;
  std::int64_t nvme_bytes = kUnlimited;
  Wish parameters = Wish::kAuto;
  Wish optimizer = Wish::kAuto;
  std::int64_t parameters_host_bytes = kUnlimited;  // stay in memory where parameters is kNvme
  int num_states = 2;                               // fp32 tensors per parameter besides the master
  DType wire_dtype = DType::kFloat32;               // of reductions
  std::int64_t bucket_bytes = std::int64_t{64} << 20;      // of reductions, at most
  bool is_bucket_given = false;                            // exactly that, not at most
  std::int64_t pack_below_bytes = std::int64_t{64} << 10;  // smaller shards are gathered together
  comm::CallMemory call_memory = comm::CallMemory::kReached;  // of the groups (Group::call_memory)
  std::int64_t live_limit_bytes = std::int64_t{2} << 30;
  bool is_live_limit_given = false;                        // else CUDA may hold more
  std::int64_t sub_group_bytes = std::int64_t{256} << 20;  // of fp32 masters, at most
  // 0: chosen here.
  int parameter_buffers = 0;
  std::int64_t parameter_buffer_bytes = 0;
  int optimizer_buffers = 0;
  // CUDA: of the update of states in host memory, what the processor does; negative: chosen here.
  double cpu_share = -1;
  bool verify = false;  // checksums of what is on NVMe are kept in memory

  // num_ranks, budgets, places and buffers as the config says; types by option precision. Throws
  // ConfigError for contradictions: a tier without a path, a place that its budget forbids.
  static PlacementOptions from(const Config& config, int num_ranks, bool on_cuda);
  // Of the memory that everything is planned in, on CUDA of the device's; kUnlimited: there is
  // none.
  std::int64_t memory_bytes() const;
};

enum class Place : std::uint8_t { kDevice, kHost, kNvme };

struct ShardPlaces {  // of one parameter's shard on this rank
  Place parameter = Place::kDevice;
  Place gradient = Place::kDevice;
  Place states = Place::kDevice;  // and the master, where it is not the parameter itself
  // CUDA: the update runs there, and states that live elsewhere come to it. Else the processor
  // updates, and the gradient goes to host memory.
  bool device_update = false;

  bool operator==(const ShardPlaces&) const = default;
};

// One line of the ledger: what will be charged when everything has been allocated.
struct LedgerLine {
  Tier tier = Tier::kDevice;
  Role role = Role::kOther;
  std::int64_t bytes = 0;
};

// Of NVMe, per step.
struct StepBytes {
  // Of the update: states, and the stored parameters of which they are the master's (fp32).
  std::int64_t states_read = 0;
  std::int64_t states_written = 0;
  std::int64_t parameters_read = 0;  // at most, by forward and backward
  // Of them, what the first forward is handed by the update as a rule, and does not read.
  std::int64_t parameters_from_update = 0;
  std::int64_t parameters_written = 0;  // by the update, where the master is another tensor
  std::int64_t gradients_read = 0;
  std::int64_t gradients_written = 0;

  std::int64_t read() const { return states_read + parameters_read + gradients_read; }
  std::int64_t written() const { return states_written + parameters_written + gradients_written; }
};

// Between the host and a device with memory of its own, per step; at most.
struct LinkBytes {
  std::int64_t h2d = 0;
  std::int64_t d2h = 0;
};

// CUDA: who updates how many elements of this rank.
struct UpdateNumel {
  std::int64_t resident = 0;  // the device, with states that live there
  std::int64_t streamed = 0;  // the device, with states that come to it
  std::int64_t processor = 0;

  std::int64_t all() const { return resident + streamed + processor; }
};

struct Placement {
  std::vector<ShardPlaces> params;  // by id
  bool uses_nvme = false;
  bool on_cuda = false;
  std::int64_t memory_budget_bytes = kUnlimited;  // on CUDA: of the device
  std::int64_t host_budget_bytes = kUnlimited;    // on CUDA
  // Gathered parameters. In a group of one those in memory are not gathered; 0: nothing is.
  std::int64_t arena_bytes = 0;
  std::int64_t live_limit_bytes = 0;
  std::int64_t bucket_bytes = 0;  // of reductions; what the reducer is made with
  // Buffers of I/O, in host memory; 0 where nothing is on NVMe.
  std::int64_t parameter_pool_bytes = 0;  // shards read ahead of their gathers, and tiles
  std::int64_t gradient_pool_bytes = 0;
  std::int64_t optimizer_pool_bytes = 0;  // room for num_optimizer_buffers sub-groups
  int num_optimizer_buffers = 0;          // 0: the update touches nothing that is stored
  std::int64_t sub_group_numel = 0;       // elements of a sub-group, at most; a multiple of 2048
  // CUDA: room on the device for sub-groups whose states come to it; 0: none do.
  int num_update_slots = 0;
  std::int64_t update_slot_bytes = 0;
  // CUDA: gradients that the processor needs go to host memory as they come, in the parameter's
  // type; else, with several ranks or micro-batches, sums go there in fp32 when the step is made.
  bool gradients_leave_early = false;
  // CUDA, one rank: of full gradients that copies to the host or kernels still read, what is kept
  // at most (grad::ReducerParts::most_kept_bytes); 0: there are none.
  std::int64_t kept_gradient_bytes = 0;
  double cpu_share = 0;  // of the elements whose states are in host memory, as planned
  // What the group of gathers and the one of reductions reserve for their calls
  // (Group::reserve_staging); 0 in a group of one. Charged by the groups, to the ledger that they
  // were made with: part of the budget, and no line of the ledger here. Pinned where calls pass
  // through copies.
  std::int64_t gather_staging_bytes = 0;
  std::int64_t reduction_staging_bytes = 0;
  std::int64_t comm_bytes = 0;  // their sum
  Tier comm_tier = Tier::kHost;

  std::vector<LedgerLine> ledger;  // by tier and role, those above zero
  // Torch's, besides: of one parameter at a time, and with kept_gradient_bytes.
  std::int64_t full_gradient_bytes = 0;
  StepBytes step;
  LinkBytes link;                // CUDA
  UpdateNumel update;            // CUDA
  std::int64_t shard_numel = 0;  // of all parameters of this rank

  // The ledger with what the groups reserve: what the books of a run say that has one ledger.
  std::vector<LedgerLine> ledger_with_groups() const;
  std::int64_t bytes(Tier tier) const;
  std::int64_t bytes(Tier tier, Role role) const;
  // Of all tiers but NVMe, and of comm_bytes: what the budget bounds.
  std::int64_t memory_bytes() const;
  // The same by budget, on CUDA. Elsewhere there is one memory, and all of it is the host's.
  std::int64_t device_memory_bytes() const;
  std::int64_t host_memory_bytes() const;
};

// Throws ConfigError, with the arithmetic, if it does not fit.
Placement make_placement(const ModelShapes& model, const PlacementOptions& options,
                         std::int64_t num_micro_batches);

// A piece of a store: what lies where. Offsets are those in the store of its role.
struct PlannedExtent {
  Role role = Role::kShard;  // kShard, kGradient or kOptimizer
  int param = 0;
  std::int64_t begin = 0;  // element of the shard
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::string tensor;  // of kOptimizer: "master", "exp_avg"
};
// In the order of roles and offsets. `state_names`: of the update rule.
std::vector<PlannedExtent> planned_extents(const ModelShapes& model,
                                           const PlacementOptions& options,
                                           const Placement& placement,
                                           const std::vector<std::string>& state_names);

// What this machine can give now, for all ranks on it.
struct MachineLimits {
  std::int64_t memory_available_bytes = kUnlimited;  // of the machine and its control group
  std::int64_t locked_bytes = kUnlimited;            // per process
  struct Directory {
    std::string path;
    std::int64_t free_bytes = 0;
  };
  std::vector<Directory> directories;  // for NVMe; bytes are striped over them

  static MachineLimits of_this_machine(const std::vector<std::string>& directories);
};

// Throws ConfigError, with the arithmetic, if `num_local_ranks` ranks with this placement are more
// than the machine can give.
void check_fits(const Placement& placement, const MachineLimits& limits, int num_local_ranks);

// A table for people: bytes per tier and role, what is between them, bytes per step.
std::string placement_text(const Placement& placement);

}  // namespace tessera::planner
