// Internal to engine: the plan of memory of an engine, and the shards that are moved to where it
// wants them.
//
// Memory is planned once the shapes of the model are known (memory_planning.h): at construction if
// they are given, else when the model is complete. Where nothing asks for a plan and everything
// fits, there is none. Else every shard gets its placement from it. Until then shards stay in
// memory as long as they fit into the budget, and are on NVMe from there on (beside a discrete
// device without a budget: in host memory); they move when the plan is made.
//
// A plan may be for the first step only: then fix_placement() makes another one, behind that step.
//
// Order of collectives: that of memory_planning.h; with NVMe, of NvmeStores behind it.
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

// What is known of an engine's memory before there is a model.
struct EngineMemory {
  std::optional<planner::ModelShapes> shapes;
  StepExpectations step;
  std::optional<MemoryPlanning> planning;  // of these shapes; none: made when they are known
};

struct TierIo {
  RoleIo parameters;
  RoleIo gradients;
  RoleIo states;
  coordinator::LoaderStats loader;
  // Of the thread that updates: it waited for reads; for buffers of writes; it computed.
  double update_read_wait_s = 0;
  double update_lease_wait_s = 0;
  double update_s = 0;
  double lent_wait_s = 0;  // of forwards, for memory that was lent to the update
  // Of the optimizer, between the host and a discrete device.
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
};

class EngineTiers {
 public:
  // Throws ConfigError for what cannot be had, before anything is allocated or written.
  EngineTiers(Runtime& runtime, MeshGroups& mesh, shard::ParamTable& params,
              const EngineMemory& memory);
  ~EngineTiers();
  EngineTiers(const EngineTiers&) = delete;
  EngineTiers& operator=(const EngineTiers&) = delete;

  // The config asks for a plan, or the machine has less than everything takes. Final once the plan
  // could be made.
  bool is_planned() const { return is_planned_; }
  bool uses_nvme() const { return plan_ && plan_->uses_nvme; }
  // Null: nothing is planned, or not yet.
  const planner::MemoryPlan* plan() const { return plan_ ? &*plan_ : nullptr; }

  // --- building ---
  // Of the next parameter, from the start.
  Placement placement_of_next(const shard::Layout& layout) const;
  // A parameter has been added; it has no values yet.
  void add(const shard::Param& param);
  // This rank's words [begin, begin + numel) of a shard on NVMe, as ShardLoader::write() has them;
  // begin is a multiple of shard::kShardStep.
  void write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
             const void* elements);

  // --- the model is complete ---
  // Makes the plan, unless it is made, moves shards to where it wants them, and tells parameters
  // their placement. Throws ConfigError if the model does not fit, or is not the one whose shapes
  // were given.
  void finalize(const planner::ModelShapes& model);
  coordinator::TierOptions coordinator_options() const;
  // Bounds the scratch of gathers and reductions as planned; nothing where nothing is planned.
  void reserve_staging();
  // The groups may outlive the plan.
  void release_staging() noexcept;
  // Null: all gradients are in memory.
  grad::GradientTier gradient_tier() const { return gradients_; }
  // `carried`: of the optimizer before it, which is gone.
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::RuleOptions& rule,
                                                   optim::CarriedStates carried = {});

  // --- behind the first step ---
  // The plan is for that one only.
  bool is_for_first_step() const { return planning_.is_for_first_step; }
  // Collective: makes the plan for all others, with what the first step has taken. True: it is
  // another one, and fix_placement() has to follow.
  bool refine(const planner::ModelShapes& model);
  // The optimizer is about to go: what works with it goes before.
  void release_optimizer();
  // Moves shards to where the plan wants them. REQUIRES: nothing gathers, reduces or updates.
  void fix_placement();

  // --- one step (memory_lender.h) ---
  // After the optimizer was told to prepare. `is_last`: the update follows it.
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
  // Since the last call.
  TierIo take_io();

 private:
  void reserve(const planner::GroupStaging& staging);
  void tell_copies_of_host() const;
  void make_plan(const planner::ModelShapes& model);
  HeldMemory held_memory() const;
  void place_shards();
  // Of parameters in memory, while nothing is planned yet.
  std::int64_t building_bytes() const;
  void make_loader(std::int64_t buffer_bytes);
  void move_shard(shard::Param& param, Tier tier);
  void make_gradient_tier();
  // What a discrete device reads and writes without holding up the host is pinned.
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

  // Where there is NVMe. In the order of dependence.
  std::unique_ptr<NvmeStores> nvme_;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<coordinator::ShardLoader> loader_;
  grad::GradientTier gradients_;           // null: all gradients are in memory
  optim::Optimizer* optimizer_ = nullptr;  // the one that was made last; null: it is gone
  std::unique_ptr<MemoryLender> lender_;   // null: its device updates nothing that streams
};

}  // namespace tessera::engine
