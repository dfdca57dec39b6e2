// Internal to engine: the memory plan of an engine, and the moves of shards to their planned tiers.
//
// Memory is planned once the shapes of the model are known (memory_planning.h): at construction if
// they are given, else when the model is complete. If no option asks for a plan and everything
// fits, there is none. Otherwise the plan gives every shard its placement. Before it is made,
// shards stay in memory as far as the budget allows, and further ones go to NVMe (with a discrete
// device and no budget: to host memory); they move when the plan is made.
//
// A plan may be for the first step only: then refine() makes another one after that step, and
// fix_placement() carries it out.
//
// Order of collectives: those of memory_planning.h; with NVMe, then those of NvmeStores.
//
// Threads: as Engine. It outlives the coordinator, the reducer and the optimizer of its engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/coordinator/coordinator.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/engine/memory_planning.h"
#include "tessera/engine/mesh_groups.h"
#include "tessera/engine/nvme_stores.h"
#include "tessera/engine/runtime.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/optimizer.h"
#include "tessera/planner/memory_plan.h"
#include "tessera/shard/param.h"
#include "tessera/shard/shard_store.h"

namespace tessera::engine {

class MemoryLender;

// What is known about an engine's memory before there is a model.
struct EngineMemory {
  std::optional<planner::ModelShapes> shapes;
  StepExpectations step;
  std::optional<MemoryPlanning> planning;  // for these shapes; null: made when they are known
};

struct TierIo {
  RoleIo parameters;
  RoleIo gradients;
  RoleIo states;
  coordinator::LoaderStats loader;
  // Times of the update thread: waiting for reads, waiting for write buffers, computing.
  double update_read_wait_s = 0;
  double update_lease_wait_s = 0;
  double update_s = 0;
  double lent_wait_s = 0;  // forwards waiting for memory lent to the update
  // Copies of the optimizer between the host and a discrete device.
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
};

class EngineTiers {
 public:
  // Throws ConfigError for options that cannot be satisfied, before anything is allocated or
  // written.
  EngineTiers(Runtime& runtime, MeshGroups& mesh, shard::ParamTable& params,
              const EngineMemory& memory);
  ~EngineTiers();
  EngineTiers(const EngineTiers&) = delete;
  EngineTiers& operator=(const EngineTiers&) = delete;

  // True if the config asks for a plan, or the machine has less than everything takes. Final once
  // shapes are known.
  bool is_planned() const { return is_planned_; }
  bool uses_nvme() const { return plan_ && plan_->uses_nvme; }
  // Null: no plan, or none yet.
  const planner::MemoryPlan* plan() const { return plan_ ? &*plan_ : nullptr; }

  // --- building --- Placement of the next parameter while the model is built.
  Placement placement_of_next(const shard::Layout& layout) const;
  // A parameter has been added; it has no values yet.
  void add(const shard::Param& param);
  // Writes this rank's words [begin, begin + numel) of a shard on NVMe; begin is a multiple of
  // shard::kShardStep.
  void write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
             const void* elements);

  // --- the model is complete --- Makes the plan if needed, moves shards to their tiers, and sets
  // the placement of parameters. Throws ConfigError if the model does not fit, or is not the one
  // whose shapes were given.
  void finalize(const planner::ModelShapes& model);
  coordinator::TierOptions coordinator_options() const;
  // Bounds the staging of the groups as planned; does nothing without a plan.
  void reserve_staging();
  // Removes these bounds: groups may outlive the plan.
  void release_staging() noexcept;
  // Null: all gradients are in memory.
  grad::GradientTier gradient_tier() const { return gradients_; }
  // `carried`: states of the previous optimizer, which is destroyed.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::RuleOptions& rule,
                                                   optim::CarriedStates carried = {});

  // --- behind the first step --- True if the plan is for the first step only.
  bool is_for_first_step() const { return planning_.is_for_first_step; }
  // Collective: makes the plan for all later steps, with the memory that the first step has used.
  // True: it differs, and fix_placement() must be called.
  bool refine(const planner::ModelShapes& model);
  // Call it before the optimizer is destroyed: destroys what uses it.
  void release_optimizer();
  // Moves shards to their planned tiers. REQUIRES: nothing gathers, reduces or updates.
  void fix_placement();

  // --- one step (memory_lender.h) --- Call it after Optimizer::prepare(). `is_last`: the update
  // follows this backward.
  void begin_backward(bool is_last);
  void end_backward_of(coordinator::UnitId unit);
  void begin_forward_of(coordinator::UnitId unit);

  coordinator::ShardLoader& loader() { return *loader_; }
  void wait_for_loader() noexcept {
    if (loader_) {
      loader_->wait_idle();
    }
  }
  // Null: no shard is on NVMe.
  shard::ShardStore* shards() const { return shards_.get(); }
  const tier::Store* store(Role role) const { return nvme_ ? nvme_->store(role) : nullptr; }
  // Counts since the last call.
  TierIo take_io();

 private:
  void reserve(const planner::GroupStaging& staging);
  void tell_copies_of_host() const;
  void make_plan(const planner::ModelShapes& model);
  HeldMemory held_memory() const;
  void place_shards();
  // Bytes for parameters in memory before there is a plan.
  std::int64_t building_bytes() const;
  void make_loader(std::int64_t buffer_bytes);
  void move_shard(shard::Param& param, Tier tier);
  void make_gradient_tier();
  // Tier of I/O buffers: pinned if a discrete device reads and writes them.
  Tier io_tier() const { return options_.is_discrete ? Tier::kPinned : Tier::kHost; }

  Runtime& runtime_;
  MeshGroups& mesh_;
  comm::Group& group_;  // all ranks
  shard::ParamTable& params_;
  bool is_planned_;
  planner::MemoryPlanOptions options_;
  const EngineMemory memory_;
  MemoryPlanning planning_;
  std::optional<planner::MemoryPlan> plan_;
  std::int64_t shard_bytes_ = 0;  // in memory, while building
  bool reserves_staging_ = false;
  std::unique_ptr<device::Device> host_device_;

  // With NVMe only. In the order of dependence.
  std::unique_ptr<NvmeStores> nvme_;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<coordinator::ShardLoader> loader_;
  grad::GradientTier gradients_;           // null: all gradients are in memory
  optim::Optimizer* optimizer_ = nullptr;  // the one made last; null: destroyed
  std::unique_ptr<MemoryLender> lender_;   // null: no states stream
};

}  // namespace tessera::engine
