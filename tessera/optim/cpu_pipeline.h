// Updates on the CPU: a thread that takes sub-groups (sub_group.h) through read -> update -> write,
// in the order of registration, which is the order of the next forward.
//
//   lease     | states, parameters (on NVMe)   may be read ahead of the gradients
//             | gradients (on NVMe)            read once the update has been started
//   update    | piece by piece; in place where data is in memory
//   write     | states, parameters (on NVMe)
//   A lease is released when all of it has been written, or kept with its contents
//   (num_kept_groups()).
//
// While one sub-group is updated, later ones are read and earlier ones written, as far as leases
// are free. With a single lease these run in turn. A sub-group with everything in memory has no
// lease. With a discrete device, parameters in its memory have copies in pinned memory, which are
// copied back after their update; gradients are in host memory already.
//
// Between updates, while the model computes, the disk keeps working: results of the last sub-groups
// are written after wait_updated(), and as their leases are released, the first sub-groups of the
// next update are read into them from prepare() on. So the disk can move up to twice the bytes of
// the leases during a backward.
//
// Invariants:
//  (1) Leases are taken in the order of updates, so the next sub-group waits only for writes of
//      earlier ones.
//  (2) A sub-group is read for the next update when its own writes of the last one are done.
//  (3) A piece is updated as soon as what it needs is ready, and its parameter is fulfilled with
//      its last piece. Padding is never updated: it stays zero in shards, states and whole blocks.
//  (4) After the first failure nothing runs any more: the parameter concerned and all that are not
//      done yet fail with its error; both waits and check() repeat it. Of several failures, the
//      first in the order of updates counts. The next of these calls reports a write that fails
//      after wait_updated(), before the next update begins.
//
// Threads: one caller at a time, and one internal thread. add(), refresh_copy(), set_plan() and
// drop_leases() are called while that thread is idle: after wait().
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
  // All arguments outlive the pipeline.
  CpuPipeline(shard::ParamTable& params, const RuleOptions& rule, const OptimizerOptions& options,
              const OptimizerStates& states);
  // Waits for what was started.
  ~CpuPipeline();
  CpuPipeline(const CpuPipeline&) = delete;
  CpuPipeline& operator=(const CpuPipeline&) = delete;

  // Allocates a parameter's copy, if its shard is in a discrete device's memory. Once.
  void add(int id);
  // Makes that copy from the shard; null: the CPU works on the shard itself.
  const std::byte* refresh_copy(int id);

  const SubGroupPlan& plan() const { return plan_; }
  // Throws ConfigError if the largest sub-group does not fit into the buffers.
  void set_plan(SubGroupPlan plan);
  // Reads ahead for the next update, as far as leases are free or become free when their writes are
  // done.
  void prepare();
  // `ids`: every parameter of the plan. `gradients` stay until wait_updated().
  std::vector<StartedUpdate> start(std::span<const int> ids, grad::Reducer& gradients,
                                   const UpdateScalars& scalars);
  // Blocks until all updates are made. Throws the first failure, every time.
  void wait_updated();
  // The same, and until all results are written and nothing more is read ahead.
  void wait();
  // Throws the first failure, without waiting.
  void check() const;
  // Drops the contents of leases, so that data on NVMe may be changed.
  void drop_leases();
  OptimizerStats take_stats();

 private:
  struct Item {
    bool keeps = false;  // no gradient: states stay, the parameter is made from its master again
    UpdateScalars scalars;
    const void* gradient = nullptr;  // null: on NVMe
    DType gradient_dtype = DType::kFloat32;
    const void* low = nullptr;       // ShardGradient::low
    std::vector<const void*> later;  // ShardGradient::later
    device::Pending gradient_ready;
    device::Pending may_start;   // readers of the shard, and the work that makes the gradient
    std::byte* shard = nullptr;  // or its copy; null: on NVMe
    std::shared_ptr<device::HandedOver> done;  // null: not updated
    int num_pieces_left = 0;
    bool has_begun = false;
    std::vector<device::Pending> writes;  // of earlier pieces that are read from NVMe
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
  // All work that may read shards or make gradients now.
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
  // By id: pinned copies of shards in a discrete device's memory; updates write them.
  std::vector<device::Memory> copies_;
  SubGroupPlan plan_;
  std::vector<int> num_pieces_;  // by id
  std::size_t num_kept_ = 0;     // sub-groups of plan_
  OptimizerStats started_;       // of the update that start() makes

  // Used by the thread; by the caller while that is idle.
  std::deque<Stage> ahead_;    // read or being read, in the order of updates
  std::deque<Stage> writing_;  // updated, in the same order; also of the update before
  std::map<std::size_t, tier::Lease> kept_;  // by sub-group: as it is on NVMe
  std::size_t next_ = 0;                     // the sub-group after ahead_
  OptimizerStats work_;                      // since merge_stats()

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Job> jobs_;
  bool must_prepare_ = false;
  bool is_updating_ = false;
  bool is_busy_ = true;  // an update or a transfer runs, or the thread has not begun
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  OptimizerStats stats_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
