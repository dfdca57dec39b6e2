// A plan of memory: a placement for every shard, the sizes of everything that is allocated, and
// what a step moves. memory_planner.h says how it is made.
//
// One rank is planned; all are alike up to what does not divide. What autograd holds besides
// (activations, the full gradient of one parameter at a time, and on a discrete device those that
// are still being copied) is torch's: it is stated, and not part of the budgets.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/comm/staging.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"
#include "tessera/core/placement.h"
#include "tessera/quant/block_codec.h"
#include "tessera/shard/stored_format.h"

namespace tessera {
class Config;
}
namespace tessera::grad {
struct ReducerOptions;
}

namespace tessera::planner {

inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
// Of full parameters: each costs a request and saves few bytes.
inline constexpr std::int64_t kSmallParamBytes = std::int64_t{256} << 10;

struct ParamShape {
  std::string name;
  std::int64_t numel = 0;
  bool trainable = true;
  bool dynamic = false;
  int num_dims = 2;
  // How its shards are stored; nullopt: as MemoryPlanOptions::stored says.
  std::optional<shard::StoredFormat> format = {};
};

// What a step works on; made from a model's shapes (before it exists) or from an engine's tables.
struct ModelShapes {
  std::vector<ParamShape> params;       // by id: in the order of registration, which is that of use
  std::vector<std::vector<int>> units;  // ids that each needs, own and external, ascending
  std::vector<std::string> unit_names;  // for messages; may be empty
  DType dtype = DType::kFloat32;
};

// What each group of an engine reserves for its calls (Group::reserve_staging), by its name in
// engine::MeshGroups; 0: there is no such group, or its calls take none.
struct GroupStaging {
  std::int64_t all = 0;  // single numbers, where `gathers` is another group
  std::int64_t gathers = 0;
  std::int64_t phase_across = 0;
  std::int64_t phase_inside = 0;
  std::int64_t secondary = 0;
  std::int64_t reductions = 0;  // of one hop, or of the first
  std::int64_t reductions_across = 0;
  std::int64_t all_reductions = 0;  // what ranks say there, where reductions go another way
  std::int64_t agreed = 0;          // of dynamic parameters; 0: they pass through `gathers`
  std::int64_t agreed_across = 0;
  std::int64_t replicas = 0;

  std::int64_t total() const {
    return all + gathers + phase_across + phase_inside + secondary + reductions +
           reductions_across + all_reductions + agreed + agreed_across + replicas;
  }
};

struct MemoryPlanOptions {
  int num_ranks = 1;            // that parameters are cut over
  int num_copies = 1;           // of the model
  int num_secondary_ranks = 1;  // that cut what is gathered once more (hpZ)
  int num_gather_hosts = 1;     // that gathers go across in a phase of their own; 1: in one phase
  int weight_bits = 0;          // of what gathers send in place of elements (qwZ); 0: elements
  std::int64_t block_numel = 128;  // that share a scale then
  bool is_discrete = false;        // the device has memory of its own (CUDA)
  bool has_nvme = false;           // there are directories for it
  std::int64_t device_bytes = kUnlimited;
  std::int64_t host_bytes = kUnlimited;
  std::int64_t nvme_bytes = kUnlimited;
  bool is_device_given = false;  // the budget, which may be "unlimited"
  bool is_host_given = false;
  // Ranks that share what a budget was found from (memory_budgets.h); 0: it was given, or none is.
  int num_device_ranks = 0;
  int num_host_ranks = 0;
  std::optional<Tier> parameters;  // kDevice, kHost or kNvme; nullopt: chosen here
  std::optional<Tier> optimizer;
  std::int64_t parameters_host_bytes = kUnlimited;  // stay in memory where parameters is kNvme
  // Full parameters of at most this size are small. persist.param_bytes, where that is less: what
  // does not stay gathered need not stay on the device either.
  std::int64_t small_param_bytes = kSmallParamBytes;
  int num_states = 2;                  // fp32 tensors per parameter besides the master
  DType wire_dtype = DType::kFloat32;  // of reductions
  std::int64_t bucket_bytes = std::int64_t{64} << 20;  // of reductions, at most
  bool is_bucket_given = false;                        // exactly that, not at most
  // Of reductions that are quantised, and hosts that they go across in a second hop, as
  // grad::ReducerOptions.
  std::optional<quant::BlockFormat> gradient_blocks = {};
  int num_reduction_hosts = 1;
  std::int64_t pack_below_bytes = std::int64_t{64} << 10;  // smaller shards are gathered together
  comm::CallMemory call_memory = comm::CallMemory::kReached;  // of the groups (Group::call_memory)
  comm::HeldMemory group_memory;  // of each of them (Group::held_memory)
  std::int64_t live_limit_bytes = std::int64_t{2} << 30;
  bool is_live_limit_given = false;      // else one rank on a discrete device may hold more
  bool is_max_inflight_given = false;    // prefetch.max_inflight, else chosen here
  bool is_reuse_distance_given = false;  // live.reuse_distance_bytes, else chosen here
  std::int64_t sub_group_bytes = std::int64_t{256} << 20;  // of fp32 masters, at most
  // 0: chosen here.
  int parameter_buffers = 0;
  std::int64_t parameter_buffer_bytes = 0;
  int optimizer_buffers = 0;
  // Discrete device: the CPU's share of the update of states in host memory; negative: chosen here.
  double cpu_share = -1;
  bool verify = false;       // checksums of what is on NVMe are kept in memory
  shard::StoredRule stored;  // which frozen parameters are stored as blocks of integers

  // Budgets, tiers and buffers as the config says; types by option precision. Throws ConfigError
  // for contradictions: NVMe without a path, a tier that its budget forbids.
  static MemoryPlanOptions from(const Config& config, int num_ranks, bool is_discrete,
                                int num_copies = 1);
  // Of a rank of the mesh.
  static MemoryPlanOptions from(const Config& config, const comm::Mesh& mesh, bool is_discrete);
  // As grad::ReducerOptions, of buckets of so many bytes.
  grad::ReducerOptions reductions(std::int64_t of_bucket_bytes) const;
  // Gradients are reduced over ranks, and not used as autograd has made them.
  bool sends_gradients() const { return num_ranks > 1 || num_copies > 1; }
  // Of the group of gathers and the one of reductions.
  std::int64_t chunk_bytes() const { return 2 * static_cast<std::int64_t>(group_memory.bytes); }
  // The budget of device memory; of a CPU's one memory the smaller of both. kUnlimited: none.
  std::int64_t memory_bytes() const;
};

// One line of the ledger: what will be charged when everything has been allocated.
struct LedgerLine {
  Tier tier = Tier::kDevice;
  Role role = Role::kOther;
  std::int64_t bytes = 0;

  bool operator==(const LedgerLine&) const = default;
};

// Of NVMe, per step.
struct StepBytes {
  // Of the update: states, and the parameters on NVMe that are their own masters (fp32).
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

// Between the host and a discrete device, per step; at most.
struct LinkBytes {
  std::int64_t h2d = 0;
  std::int64_t d2h = 0;
};

// Discrete device: who updates how many elements of this rank.
struct UpdateNumel {
  std::int64_t resident = 0;  // the device, with states that live there
  std::int64_t streamed = 0;  // the device, with states that are copied to it and back
  std::int64_t cpu = 0;

  std::int64_t all() const { return resident + streamed + cpu; }
};

// Discrete device: of this rank's trained elements, where micro-batches add up.
struct AccumulationNumel {
  std::int64_t device_sums = 0;  // in fp32
  std::int64_t host_copies = 0;  // as they come, up to MemoryPlan::num_gradient_copies
  std::int64_t host_sums = 0;    // in fp32, by threads of the host
  std::int64_t nvme_sums = 0;    // in fp32

  std::int64_t all() const { return device_sums + host_copies + host_sums + nvme_sums; }
};

struct MemoryPlan {
  std::vector<Placement> params;  // by id
  bool uses_nvme = false;
  bool is_discrete = false;
  std::int64_t memory_budget_bytes = kUnlimited;  // of a discrete device: of the device
  std::int64_t host_budget_bytes = kUnlimited;    // beside a discrete device
  // Gathered parameters. In a group of one those in memory are not gathered; 0: nothing is.
  std::int64_t arena_bytes = 0;
  std::int64_t live_limit_bytes = 0;
  // Of gathers (coordinator::PlanBudgets); 0: as the options say.
  int max_inflight = 0;
  std::int64_t reuse_distance_bytes = 0;
  std::int64_t bucket_bytes = 0;  // of reductions; what the reducer is made with
  // Buffers of I/O, in host memory; 0 where nothing is on NVMe.
  std::int64_t parameter_pool_bytes = 0;  // shards read ahead of their gathers, and tiles
  std::int64_t gradient_pool_bytes = 0;
  std::int64_t optimizer_pool_bytes = 0;  // room for num_optimizer_buffers sub-groups
  int num_optimizer_buffers = 0;          // 0: the update touches nothing on NVMe
  std::int64_t sub_group_numel = 0;       // elements of a sub-group, at most; a multiple of 2048
  // Of shards in memory, what is secondary (hpZ), as it is charged. A CPU's is all on the device.
  std::int64_t secondary_device_bytes = 0;
  std::int64_t secondary_host_bytes = 0;
  std::int64_t encoded_bytes = 0;  // and what is encoded for gathers (qwZ), on the device
  // Discrete device: slots for sub-groups whose states are copied to it; 0: none are.
  int num_update_slots = 0;
  std::int64_t update_slot_bytes = 0;
  std::int64_t slot_gradient_bytes = 0;  // of them, per element (optim::OptimizerOptions)
  // Discrete device: gradients in host memory go there as they are reduced, in the wire's type, and
  // have room for so many micro-batches (grad/host_copies.h). 0: none is there so.
  int num_gradient_copies = 0;
  // ...: threads of the host add up all but the last.
  bool adds_gradients_on_host = false;
  // ..., of one micro-batch, too: all are copies then, and nothing is added.
  AccumulationNumel accumulation;
  // ..., one rank and one micro-batch: those on the device are autograd's memory while they last.
  bool adopts_gradients = false;
  // ...: those on the device have the parameters' type, and new parameters are made in their place.
  bool updates_in_place = false;
  // Discrete device: of full gradients that copies, kernels or reductions still read, what is kept
  // at most (grad::ReducerParts::most_kept_bytes); 0: there are none.
  std::int64_t kept_gradient_bytes = 0;
  double cpu_share = 0;  // of the elements whose states are in host memory, as planned
  // Of the groups; 0 in a group of one. Charged by the groups, to the ledger that they were made
  // with: part of the budget, and no line of the ledger here. Pinned where calls pass through
  // copies.
  GroupStaging staging;
  std::int64_t comm_bytes = 0;  // all of it
  Tier comm_tier = Tier::kHost;
  // What the group of gathers and the one of reductions hold besides, as long as they live
  // (Group::held_memory); charged alike.
  std::int64_t chunk_bytes = 0;
  Tier chunk_tier = Tier::kHost;

  std::vector<LedgerLine> ledger;  // by tier and role, those above zero
  // Torch's, besides: of one parameter at a time, and with kept_gradient_bytes.
  std::int64_t full_gradient_bytes = 0;
  StepBytes step;
  LinkBytes link;
  UpdateNumel update;
  std::int64_t shard_numel = 0;  // of all parameters of this rank

  // The ledger with what the groups reserve and hold: what the books of a run say that has one
  // ledger.
  std::vector<LedgerLine> ledger_with_groups() const;
  std::int64_t bytes(Tier tier) const;
  std::int64_t bytes(Tier tier, Role role) const;
  // Of all tiers but NVMe, and of the groups: what the budget bounds.
  std::int64_t memory_bytes() const;
  // The same by budget. Where device and host are one memory, all of it is the host's.
  std::int64_t device_memory_bytes() const;
  std::int64_t host_memory_bytes() const;

  // A table for people: bytes per tier and role, and per step.
  std::string text() const;
};

// What lies where in the store of a role.
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
                                           const MemoryPlanOptions& options, const MemoryPlan& plan,
                                           const std::vector<std::string>& state_names);

}  // namespace tessera::planner
