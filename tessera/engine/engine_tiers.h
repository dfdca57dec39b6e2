// Internal to engine: what an engine keeps outside of its device's memory, and the plan behind it.
//
// Nothing is here unless the config asks for it: a budget, a place or a directory for NVMe. Then
// every shard gets its places from the planner, once the shapes of the model are known: at
// construction if they are given, else when the model is complete. Until then shards stay in memory
// as long as they fit into the budget, and are stored from there on; they move when the plan is
// made.
//
// On a device with memory of its own shards live there, in pinned memory of the host, or on NVMe,
// and the update is shared between processor and device as planned.
//
// One store per role (parameters, gradients, states), each with scratch files of its own.
//
// Order of collectives: with NVMe, construction broadcasts the name of the run and meets once.
//
// Threads: as Engine. It outlives the coordinator, the reducer and the optimizer of its engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/coordinator/coordinator.h"
#include "tessera/coordinator/shard_feed.h"
#include "tessera/engine/runtime.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/optimizer.h"
#include "tessera/planner/placement.h"
#include "tessera/shard/param.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/file_store.h"

namespace tessera::engine {

class MemoryLender;

// Bytes of one role that were read from and written to NVMe.
struct RoleIo {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
};
struct TierIo {
  RoleIo parameters;
  RoleIo gradients;
  RoleIo states;
  coordinator::FeedStats feed;
  // Of the thread that updates: data had not come; buffers had not come back; it computed.
  double update_read_wait_s = 0;
  double update_lease_wait_s = 0;
  double update_s = 0;
  double lent_wait_s = 0;  // of forwards, for memory that was lent to the update
  // Of the optimizer, between the host and a device with memory of its own.
  std::uint64_t link_up_bytes = 0;
  std::uint64_t link_down_bytes = 0;
};

class EngineTiers {
 public:
  // Throws ConfigError for what cannot be had, before anything is allocated or written.
  EngineTiers(Runtime& runtime, comm::Group& group, shard::ParamTable& params,
              const std::optional<planner::ModelShapes>& shapes);
  ~EngineTiers();
  EngineTiers(const EngineTiers&) = delete;
  EngineTiers& operator=(const EngineTiers&) = delete;

  // The config asks for a plan.
  bool is_planned() const { return is_planned_; }
  bool uses_nvme() const { return placement_ && placement_->uses_nvme; }
  // Null: nobody asked for a plan, or it is not made yet.
  const planner::Placement* placement() const { return placement_ ? &*placement_ : nullptr; }

  // --- building ---
  // Where the shard of the next parameter lives from the start.
  Tier tier_of_next(const shard::Layout& layout) const;
  // A parameter has been added; it has no values yet.
  void add(const shard::Param& param);
  // This rank's elements [begin, begin + numel) of a stored shard; begin is a multiple of
  // shard::kShardStep.
  void write(const shard::Param& param, std::int64_t begin, std::int64_t numel,
             const void* elements);

  // --- the model is complete ---
  // Makes the plan, unless it is made, and moves shards to where it wants them. Throws ConfigError
  // if the model is not the one whose shapes were given.
  void settle(const planner::ModelShapes& model);
  coordinator::TierOptions coordinator_options() const;
  // Bounds the scratch of both groups' calls as planned; nothing where nothing is planned.
  void reserve_staging(comm::Group& reductions);
  // The groups may outlive the plan.
  void release_staging(comm::Group& reductions) noexcept;
  // Null: all gradients are in memory.
  grad::GradientTier gradient_tier() const { return {gradient_store_.get(), gradient_pool_.get()}; }
  std::unique_ptr<optim::Optimizer> make_optimizer(const optim::RuleOptions& rule);

  // --- one step (memory_lender.h) ---
  // After the optimizer was told to prepare. `is_last`: the update follows it.
  void begin_backward(bool is_last);
  void end_backward_of(coordinator::UnitId unit);
  void begin_forward_of(coordinator::UnitId unit);

  coordinator::ShardFeed& feed() { return *feed_; }
  void wait_for_feed() noexcept {
    if (feed_) {
      feed_->wait_idle();
    }
  }
  const tier::Store* store(Role role) const;
  // Since the last call.
  TierIo take_io();

 private:
  void make_io();
  std::unique_ptr<tier::FileStore> make_store(const std::string& name, Role role,
                                              std::uint64_t bytes);
  void plan(const planner::ModelShapes& model);
  void make_feed(std::int64_t buffer_bytes);
  void move_shards();
  void move_shard(shard::Param& param, Tier home);
  Tier planned_tier(int id) const;
  Tier io_memory() const;
  void set_placements();
  void make_gradient_tier();
  std::string agree_on_run();

  Runtime& runtime_;
  comm::Group& group_;
  shard::ParamTable& params_;
  const bool is_planned_;
  planner::PlacementOptions options_;
  std::optional<planner::ModelShapes> shapes_;
  std::optional<planner::Placement> placement_;
  std::int64_t shard_bytes_ = 0;  // in memory, while building
  bool reserves_staging_ = false;
  std::unique_ptr<device::Device> host_device_;

  // Where there is NVMe. In the order of dependence.
  std::string run_;
  std::unique_ptr<tier::IoEngine> io_;
  std::unique_ptr<tier::FileStore> parameter_store_;
  std::unique_ptr<tier::FileStore> gradient_store_;
  std::unique_ptr<tier::FileStore> state_store_;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<coordinator::ShardFeed> feed_;
  std::unique_ptr<tier::BufferPool> gradient_pool_;
  std::unique_ptr<tier::BufferPool> optimizer_pool_;
  optim::Optimizer* optimizer_ = nullptr;  // the one that was made last
  std::unique_ptr<MemoryLender> lender_;   // null: its device updates nothing that streams

  TierIo taken_;  // sums of stores at the last take_io()
};

// Whether anything of a config asks for a plan.
bool asks_for_plan(const Config& config);

}  // namespace tessera::engine
