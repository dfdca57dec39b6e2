// The thread that updates stored shards: read -> update -> write, sub-group by sub-group, in the
// order in which the next forward needs them.
//
//   lease     | states, parameters (if stored)   may be read ahead of the gradients
//             | gradients (if stored)            read once the update has been started
//   update    | on the host, piece by piece; what is in memory in place
//   write     | states, parameters (if stored)
//   lease back, when all of it has been written; or kept with what it holds, see num_kept_groups()
//
// While one sub-group is updated, those after it are read and those before it written, as far as
// there are leases: the buffer pool is the only bound. With a single lease it all runs in turn.
//
// Invariants:
//  (1) Leases are taken in the order of updates; so the sub-group that is next waits for nothing
//      but writes of those before it.
//  (2) An update ends when all its writes are done; so what is read for the next one is there.
//  (3) After the first failure nothing runs any more: the parameter concerned and all that are not
//      done yet fail with its error, wait() and check() repeat it. Of several failures that have
//      come, the first in the order of updates counts.
//
// Threads: one caller at a time, and a thread of its own. drop_leases() and set_plan() are called
// while that is idle: after wait().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "tessera/optim/sub_group.h"
#include "tessera/optim/update_stage.h"

namespace tessera::optim {

class UpdatePipeline {
 public:
  explicit UpdatePipeline(const StageWork::Parts& parts);
  // Ends what has been started.
  ~UpdatePipeline();
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  const SubGroupPlan& plan() const { return plan_; }
  // Throws ConfigError if the largest sub-group does not fit into the buffers.
  void set_plan(SubGroupPlan plan);
  // Pieces of a parameter in the plan.
  int num_pieces(int param) const;
  // Reads what leases allow, for the next update.
  void prepare();
  // `job.gradients` stay until it is done.
  void start(UpdateJob job);
  // For all updates. Throws the first failure, every time.
  void wait();
  // The same without waiting.
  void check() const;
  // Forgets what is in leases: whatever is stored may change now.
  void drop_leases();
  TieredStats take_stats();

 private:
  void run();
  void update(UpdateJob& job);
  void update_groups(UpdateJob& job);
  void prepare_now();
  void read_ahead();
  // False: there is no lease for the next sub-group.
  bool open_stage(bool may_wait);
  std::optional<tier::Lease> take_lease(std::size_t bytes, bool may_wait);
  void retire_written();
  void retire_oldest();
  void fail(UpdateJob* job, std::exception_ptr error);
  // Waits for all that is in flight. The failure of the first sub-group in order, if not `error`.
  std::exception_ptr drain(const std::exception_ptr& error);
  void merge_stats(double lease_wait_s = 0);

  const TieredParts& tiers_;
  const shard::ParamTable& params_;
  SubGroupPlan plan_;
  std::vector<int> num_pieces_;  // by id
  std::size_t num_kept_ = 0;     // sub-groups of plan_

  // Of the thread; of the caller while that is idle.
  StageWork work_;
  std::deque<UpdateStage> ahead_;            // read or being read, in the order of updates
  std::deque<UpdateStage> writing_;          // updated, in the same order
  std::map<std::size_t, tier::Lease> kept_;  // by sub-group: as it is stored
  std::size_t next_ = 0;                     // the sub-group behind ahead_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<UpdateJob> jobs_;
  bool must_prepare_ = false;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  TieredStats stats_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
