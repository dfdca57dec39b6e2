// Updates on the CPU: a thread that takes sub-groups (sub_group.h) through read -> update -> write,
// in the order of registration, which is that of the next forward.
//
//   lease     | states, parameters (on NVMe)   may be read ahead of the gradients
//             | gradients (on NVMe)            read once the update has been started
//   update    | piece by piece; what is in memory in place
//   write     | states, parameters (on NVMe)
//   lease back, when all of it has been written; or kept with what it holds, see num_kept_groups()
//
// While one sub-group is updated, those after it are read and those before it written, as far as
// there are leases. With a single lease it all runs in turn. A sub-group with everything in memory
// has no lease. Beside a discrete device, parameters in its memory have copies in pinned memory,
// which are sent back; gradients come there by themselves.
//
// Between updates, while the model computes, the disk goes on: what the last sub-groups of an
// update have made is written after wait_updated(), and as their leases come back, the first
// sub-groups of the next update are read into them from prepare() on. So the disk has up to twice
// the bytes of the leases to move during a backward.
//
// Invariants:
//  (1) Leases are taken in the order of updates; so the sub-group that is next waits for nothing
//      but writes of those before it.
//  (2) A sub-group is read for the next update when its own writes of the last one are done.
//  (3) A piece is updated as soon as what it needs is ready, and its parameter is fulfilled with
//      its last piece. Padding is never updated: it stays zero in shards, states and whole blocks.
//  (4) After the first failure nothing runs any more: the parameter concerned and all that are not
//      done yet fail with its error; both waits and check() repeat it. Of several failures, the
//      first in the order of updates counts. A write that fails after wait_updated() is told by
//      the next of these, before the next update begins.
//
// Threads: one caller at a time, and a thread of its own. add(), refresh_copy(), set_plan() and
// drop_leases() are called while that is idle: after wait().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tessera/device/handed_over.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/optimizer_options.h"
#include "tessera/optim/optimizer_states.h"
#include "tessera/optim/sub_group.h"

namespace tessera::optim {

class CpuPipeline {
 public:
  // All of it outlives the pipeline.
  CpuPipeline(shard::ParamTable& params, const RuleOptions& rule, const OptimizerOptions& options,
              const OptimizerStates& states);
  // Ends what has been started.
  ~CpuPipeline();
  CpuPipeline(const CpuPipeline&) = delete;
  CpuPipeline& operator=(const CpuPipeline&) = delete;

  // Takes the memory of a parameter's copy, if its shard is in a discrete device's. Once.
  void add(int id);
  // Makes that copy from the shard; null: the CPU works on the shard itself.
  const std::byte* refresh_copy(int id);

  const SubGroupPlan& plan() const { return plan_; }
  // Throws ConfigError if the largest sub-group does not fit into the buffers.
  void set_plan(SubGroupPlan plan);
  // Reads what leases allow, for the next update, also those that are still written from.
  void prepare();
  // `ids`: every parameter of the plan. `gradients` stay until wait_updated().
  std::vector<StartedUpdate> start(std::span<const int> ids, grad::Reducer& gradients,
                                   const UpdateScalars& scalars);
  // Until all updates are made. Throws the first failure, every time.
  void wait_updated();
  // Until all of them are written, too, and nothing more is read ahead.
  void wait();
  // The same without waiting.
  void check() const;
  // Forgets what is in leases: whatever is on NVMe may change now.
  void drop_leases();
  OptimizerStats take_stats();

 private:
  struct Item {
    bool keeps = false;  // no gradient: nothing changes, and the parameter is made again
    UpdateScalars scalars;
    const void* gradient = nullptr;  // null: on NVMe
    DType gradient_dtype = DType::kFloat32;
    const void* low = nullptr;       // ShardGradient::low
    std::vector<const void*> later;  // ShardGradient::later
    device::Pending gradient_ready;
    device::Pending may_start;                 // what reads the shard, and what makes the gradient
    std::byte* shard = nullptr;                // or its copy; null: on NVMe
    std::shared_ptr<device::HandedOver> done;  // null: not updated
    int num_pieces_left = 0;
    bool has_begun = false;
    std::vector<device::Pending> writes;  // of pieces so far that must be read from NVMe
  };
  struct Job {
    grad::Reducer* gradients = nullptr;
    std::vector<Item> items;  // by id
  };
  // A sub-group in memory. Its lease must stay until everything below is done.
  struct Stage {
    std::size_t number = 0;  // of the sub-group in its plan
    const SubGroup* group = nullptr;
    tier::Lease lease;
    device::Pending states_read;
    // By piece; empty: none were started.
    std::vector<device::Pending> parameters_read;
    std::vector<device::Pending> gradients_read;
    std::vector<device::Pending> writes;
  };
  Item make_item(int id, grad::Reducer& gradients, const UpdateScalars& scalars,
                 const device::Pending& may_start);
  // Everything that may read shards or make gradients now.
  device::Pending record_users() const;

  void run();
  // Between updates: one step of writes and, if it `prepares`, of reads ahead. Blocks for one
  // transfer at most. False: there is nothing to wait for.
  bool go_on(bool prepares);
  void update(Job& job);
  void update_groups(Job& job);
  void read_ahead();
  bool may_read_more() const;
  bool is_being_written(std::size_t number) const;
  static device::Pending all_reads(const Stage& stage);
  static bool is_being_read(const Stage& stage);
  // False: there is no lease for the next sub-group, or the last update still writes it.
  bool open_stage(bool may_wait);
  std::optional<tier::Lease> take_lease(std::size_t bytes, bool may_wait);
  void start_reads(Stage& stage);
  void start_gradient_reads(Stage& stage, Job& job);  // once per stage
  void update_stage(Stage& stage, Job& job);
  void wait_to_overwrite(int id);
  UpdateSpan span_of(const Stage& stage, const SubGroupPiece& piece, const Item& item) const;
  void update_piece(const Stage& stage, const SubGroupPiece& piece, const Item& item);
  void finish_piece(Stage& stage, const SubGroupPiece& piece, Item& item);
  void wait_timed(const device::Pending& read);
  void retire_written();
  void retire_oldest();
  void fail(Job* job, std::exception_ptr error);
  // Waits for all that is in flight. The failure of the first sub-group in order, if not `error`.
  std::exception_ptr drain(const std::exception_ptr& error);
  void merge_stats();

  shard::ParamTable& params_;
  const RuleOptions rule_;
  const OptimizerOptions& options_;
  const OptimizerStates& states_;
  Kernels& kernels_;
  device::Stream& stream_;
  // By id: of a shard in a discrete device's memory; new values are made there.
  std::vector<device::Memory> copies_;
  SubGroupPlan plan_;
  std::vector<int> num_pieces_;  // by id
  std::size_t num_kept_ = 0;     // sub-groups of plan_
  OptimizerStats started_;       // of the update that start() makes

  // Of the thread; of the caller while that is idle.
  std::deque<Stage> ahead_;    // read or being read, in the order of updates
  std::deque<Stage> writing_;  // updated, in the same order; also of the update before
  std::map<std::size_t, tier::Lease> kept_;  // by sub-group: as it is on NVMe
  std::size_t next_ = 0;                     // the sub-group behind ahead_
  OptimizerStats work_;                      // since merge_stats()

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Job> jobs_;
  bool must_prepare_ = false;
  bool is_updating_ = false;
  bool is_busy_ = true;  // with that, or between updates, or the thread has not begun
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  OptimizerStats stats_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
