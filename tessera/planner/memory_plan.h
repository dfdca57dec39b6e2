// A plan of memory: a placement for every shard, the sizes of everything that is allocated, and
// what a step moves. memory_planner.h says how it is made.
//
// The plan is for one rank; ranks differ only by remainders. Autograd's memory (activations, the
// full gradient of one parameter at a time, and on a discrete device full gradients that are still
// being copied) belongs to torch: the plan states it, and no budget includes it.
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
  // How its shards are stored; nullopt: MemoryPlanOptions::stored decides.
  std::optional<shard::StoredFormat> format = {};
};

// Shapes of a model: made before the model exists, or from an engine's tables.
struct ModelShapes {
  std::vector<ParamShape> params;       // by id, in order of registration and use
  std::vector<std::vector<int>> units;  // parameter ids of each unit, own and external, ascending
  std::vector<std::string> unit_names;  // for messages; may be empty
  DType dtype = DType::kFloat32;
};

// What each group of an engine reserves for its calls (Group::reserve_staging), by its name in
// engine::MeshGroups; 0: there is no such group, or its calls take none.
struct GroupStaging {
  std::int64_t all = 0;  // single numbers; used if `gathers` is another group
  std::int64_t gathers = 0;
  std::int64_t phase_across = 0;
  std::int64_t phase_inside = 0;
  std::int64_t secondary = 0;
  std::int64_t reductions = 0;  // the only hop, or the first
  std::int64_t reductions_across = 0;
  std::int64_t all_reductions = 0;  // announcements, where reductions use hops
  std::int64_t agreed = 0;          // dynamic parameters; 0: they use `gathers`
  std::int64_t agreed_across = 0;
  std::int64_t replicas = 0;

  std::int64_t total() const {
    return all + gathers + phase_across + phase_inside + secondary + reductions +
           reductions_across + all_reductions + agreed + agreed_across + replicas;
  }
};

struct MemoryPlanOptions {
  int num_ranks = 1;               // over which parameters are cut
  int num_copies = 1;              // of the model
  int num_secondary_ranks = 1;     // that shard gathered parameters once more (hpZ)
  int num_gather_hosts = 1;        // crossed by a separate phase of gathers; 1: one phase
  int weight_bits = 0;             // bits per element in gathers (qwZ); 0: not quantised
  std::int64_t block_numel = 128;  // elements that share a scale (qwZ)
  bool is_discrete = false;        // device memory is not host memory (CUDA)
  bool has_nvme = false;           // directories were given
  std::int64_t device_bytes = kUnlimited;
  std::int64_t host_bytes = kUnlimited;
  std::int64_t nvme_bytes = kUnlimited;
  bool is_device_given = false;  // a budget was given, perhaps "unlimited"
  bool is_host_given = false;
  // Ranks that share the memory from which a budget was found (memory_budgets.h); 0: it was given,
  // or there is none.
  int num_device_ranks = 0;
  int num_host_ranks = 0;
  std::optional<Tier> parameters;  // kDevice, kHost or kNvme; nullopt: chosen here
  std::optional<Tier> optimizer;
  std::int64_t parameters_host_bytes = kUnlimited;  // kept in memory if parameters is kNvme
  // Largest full bytes of a small parameter. persist.param_bytes, where that is less: what does not
  // stay gathered need not stay on the device either.
  std::int64_t small_param_bytes = kSmallParamBytes;
  int num_states = 2;                  // fp32 tensors per parameter besides the master
  DType wire_dtype = DType::kFloat32;  // of reductions
  std::int64_t bucket_bytes = std::int64_t{64} << 20;  // of reductions, at most
  bool is_bucket_given = false;                        // bucket_bytes is exact, not a maximum
  // Block format of quantised reductions, and hosts in their second hop, as in
  // grad::ReducerOptions.
  std::optional<quant::BlockFormat> gradient_blocks = {};
  int num_reduction_hosts = 1;
  std::int64_t pack_below_bytes = std::int64_t{64} << 10;     // smaller shards are packed
  comm::CallMemory call_memory = comm::CallMemory::kReached;  // Group::call_memory()
  comm::HeldMemory group_memory;                              // per group, Group::held_memory()
  std::int64_t live_limit_bytes = std::int64_t{2} << 30;
  bool is_live_limit_given = false;      // false: one rank on a discrete device may hold more
  bool is_max_inflight_given = false;    // prefetch.max_inflight; false: chosen by the planner
  bool is_reuse_distance_given = false;  // live.reuse_distance_bytes; false: chosen here
  std::int64_t sub_group_bytes = std::int64_t{256} << 20;  // of fp32 masters, at most
  // 0: chosen here.
  int parameter_buffers = 0;
  std::int64_t parameter_buffer_bytes = 0;
  int optimizer_buffers = 0;
  // Discrete device: the CPU's share of the update of states in host memory; negative: chosen by
  // the planner.
  double cpu_share = -1;
  bool verify = false;       // checksums of data on NVMe are kept in memory
  shard::StoredRule stored;  // which frozen parameters are stored as blocks of integers

  // Budgets, tiers and buffers from the config; types from the option precision. Throws ConfigError
  // for contradictions: NVMe without a path, a tier that its budget forbids.
  static MemoryPlanOptions from(const Config& config, int num_ranks, bool is_discrete,
                                int num_copies = 1);
  // The same for a rank of the mesh.
  static MemoryPlanOptions from(const Config& config, const comm::Mesh& mesh, bool is_discrete);
  // The grad::ReducerOptions with buckets of this many bytes.
  grad::ReducerOptions reductions(std::int64_t of_bucket_bytes) const;
  // True if gradients are reduced over ranks; false if autograd's gradients are used as they are.
  bool sends_gradients() const { return num_ranks > 1 || num_copies > 1; }
  // Held by the group of gathers and the group of reductions.
  std::int64_t chunk_bytes() const { return 2 * static_cast<std::int64_t>(group_memory.bytes); }
  // The budget of device memory; on a CPU the smaller of both budgets. kUnlimited: none.
  std::int64_t memory_bytes() const;
};

// One line of the ledger: the bytes charged once everything is allocated.
struct LedgerLine {
  Tier tier = Tier::kDevice;
  Role role = Role::kOther;
  std::int64_t bytes = 0;

  bool operator==(const LedgerLine&) const = default;
};

// NVMe traffic per step.
struct StepBytes {
  // Traffic of the update: states, and parameters on NVMe that are their own masters (fp32).
  std::int64_t states_read = 0;
  std::int64_t states_written = 0;
  std::int64_t parameters_read = 0;  // at most, by forward and backward
  // The part of parameters_read that the first forward usually gets from the update, without a
  // read.
  std::int64_t parameters_from_update = 0;
  std::int64_t parameters_written = 0;  // by the update, where the master is another tensor
  std::int64_t gradients_read = 0;
  std::int64_t gradients_written = 0;

  std::int64_t read() const { return states_read + parameters_read + gradients_read; }
  std::int64_t written() const { return states_written + parameters_written + gradients_written; }
};

// Upper bounds of copies between the host and a discrete device, per step.
struct LinkBytes {
  std::int64_t h2d = 0;
  std::int64_t d2h = 0;
};

// Discrete device: elements of this rank by updater.
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
  std::int64_t memory_budget_bytes = kUnlimited;  // on a discrete device: its own budget
  std::int64_t host_budget_bytes = kUnlimited;    // host memory, with a discrete device
  // The arena of gathered parameters. In a group of one, parameters in memory are not gathered; 0:
  // no parameter is.
  std::int64_t arena_bytes = 0;
  std::int64_t live_limit_bytes = 0;
  // For coordinator::PlanBudgets; 0: the options' values.
  int max_inflight = 0;
  std::int64_t reuse_distance_bytes = 0;
  std::int64_t bucket_bytes = 0;  // of reductions, as passed to the reducer
  // Buffers of I/O, in host memory; 0 where nothing is on NVMe.
  std::int64_t parameter_pool_bytes = 0;  // prefetch window and tiles
  std::int64_t gradient_pool_bytes = 0;
  std::int64_t optimizer_pool_bytes = 0;  // holds num_optimizer_buffers sub-groups
  int num_optimizer_buffers = 0;          // 0: the update touches nothing on NVMe
  std::int64_t sub_group_numel = 0;       // elements of a sub-group, at most; a multiple of 2048
  // Secondary shards (hpZ), as charged. On a CPU all are in device memory.
  std::int64_t secondary_device_bytes = 0;
  std::int64_t secondary_host_bytes = 0;
  std::int64_t encoded_bytes = 0;  // encoded shards for gathers (qwZ), on the device
  // Discrete device: slots for sub-groups whose states stream to it; 0: none stream.
  int num_update_slots = 0;
  std::int64_t update_slot_bytes = 0;
  std::int64_t slot_gradient_bytes = 0;  // per element of a slot (optim::OptimizerOptions)
  // Discrete device: buffers per gradient in host memory, one per micro-batch that is kept there in
  // the wire type (grad/host_copies.h). 0: no gradient is kept so.
  int num_gradient_copies = 0;
  // Discrete device: host threads add up all micro-batches but the last.
  bool adds_gradients_on_host = false;
  // Elements by where their micro-batches add up. With one micro-batch nothing is added.
  AccumulationNumel accumulation;
  // Discrete device, one rank and one micro-batch: gradients on the device stay in autograd's
  // memory.
  bool adopts_gradients = false;
  // Discrete device: gradients on the device have the parameters' type, and updates write new
  // parameters over them.
  bool updates_in_place = false;
  // Discrete device: limit on full gradients that copies, kernels or reductions still read
  // (grad::ReducerParts::most_kept_bytes); 0: there are none.
  std::int64_t kept_gradient_bytes = 0;
  double cpu_share = 0;  // planned; of elements with states in host memory
  // Staging of the groups; 0 in a group of one. The groups charge it to their own ledger: it is
  // part of the budget, but no line of `ledger` here. Pinned where calls pass through copies.
  GroupStaging staging;
  std::int64_t comm_bytes = 0;  // total of `staging`
  Tier comm_tier = Tier::kHost;
  // Memory that the group of gathers and the group of reductions hold for their lifetime
  // (Group::held_memory); charged in the same way.
  std::int64_t chunk_bytes = 0;
  Tier chunk_tier = Tier::kHost;

  std::vector<LedgerLine> ledger;  // by tier and role; lines above zero
  // Torch's memory for full gradients: one parameter at a time, plus kept_gradient_bytes.
  std::int64_t full_gradient_bytes = 0;
  StepBytes step;
  LinkBytes link;
  UpdateNumel update;
  std::int64_t shard_numel = 0;  // sum over this rank's parameters

  // `ledger` with staging and chunks of the groups: the ledger of a run in which groups and engine
  // share one.
  std::vector<LedgerLine> ledger_with_groups() const;
  std::int64_t bytes(Tier tier) const;
  std::int64_t bytes(Tier tier, Role role) const;
  // All tiers but NVMe, and the groups: what the budget bounds.
  std::int64_t memory_bytes() const;
  // The same per budget. Where device and host are one memory, all of it counts as host memory.
  std::int64_t device_memory_bytes() const;
  std::int64_t host_memory_bytes() const;

  // A table for display: bytes per tier and role, and per step.
  std::string text() const;
};

// The extent of a tensor in the NVMe store of a role.
struct PlannedExtent {
  Role role = Role::kShard;  // kShard, kGradient or kOptimizer
  int param = 0;
  std::int64_t begin = 0;  // element of the shard
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::string tensor;  // of kOptimizer: "master", "exp_avg"
};
// All extents, ordered by role and offset. `state_names`: those of the update rule.
std::vector<PlannedExtent> planned_extents(const ModelShapes& model,
                                           const MemoryPlanOptions& options, const MemoryPlan& plan,
                                           const std::vector<std::string>& state_names);

}  // namespace tessera::planner
