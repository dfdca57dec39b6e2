// The thread that updates stored shards: read -> update -> write, sub-group by sub-group, in the
// order in which the next forward needs them, or in that in which gradients come.
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
// [Note: the order of updates] What is updated comes in parts: open(), then add(), of which the
// last one closes. A sub-group is updated when all its parameters have come. Where they come during
// backward (expect_early_updates()), sub-groups are read and updated in the order in which they
// were complete the last time, at first in the reverse of registration; one that comes earlier than
// that waits for its turn. Once all have come, those that have a lease already are followed by the
// others in registration order: that is what the next forward waits for.
//
// Invariants:
//  (1) Leases are taken in the order of updates; so the sub-group that is next waits for nothing
//      but writes of those before it.
//  (2) An update ends when all its writes are done; so what is read for the next one is there.
//  (3) After the first failure nothing runs any more: the parameter concerned and all that are not
//      done yet fail with its error, wait() and open() repeat it. Of several failures that have
//      come, the first in the order of updates counts.
//
// Threads: one caller at a time, and a thread of its own. drop_leases(), set_plan() and
// expect_early_updates() are called while that is idle: after wait().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
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
  void expect_early_updates();
  // Pieces of a parameter in the plan.
  int num_pieces(int param) const;
  // Reads what leases allow, for the next update.
  void prepare();
  // An update begins. `gradients` stay until it is done. Throws a failure of before.
  void open(grad::Reducer& gradients);
  // Each parameter that has pieces once, between open() and the call that closes.
  void add(std::vector<std::pair<int, UpdateJob::Item>> items, bool closes = false);
  // In place of the last add(): what is not done fails with `error`, and everything from then on.
  void give_up(std::exception_ptr error);
  // For all updates that are closed. Throws the first failure, every time.
  void wait();
  // The same without waiting.
  void check() const;
  // Forgets what is in leases: whatever is stored may change now.
  void drop_leases();
  TieredStats take_stats();

 private:
  // Guarded by mutex_, but for `job`, which is the thread's.
  struct OpenJob {
    UpdateJob job;
    std::vector<std::pair<int, UpdateJob::Item>> arrived;  // not in `job` yet
    bool is_open = true;
    std::exception_ptr given_up;
  };
  void run();
  void update(OpenJob& open);
  void update_groups(OpenJob& open);
  // The sub-group to update now, with all its parameters.
  UpdateStage& next_stage(OpenJob& open);
  // Waits until all parameters of the sub-group have come. False: the order of the rest has
  // changed.
  bool await(OpenJob& open, std::size_t group);
  void take_arrived(OpenJob& open);
  void order_rest();
  void reset_order();
  void prepare_now();
  void read_ahead();
  // False: there is no lease for the next sub-group.
  bool open_stage(bool may_wait);
  std::optional<tier::Lease> take_lease(std::size_t bytes, bool may_wait);
  void retire_written();
  void retire_oldest();
  void fail(OpenJob* open, std::exception_ptr error);
  // Waits for all that is in flight. The failure of the first sub-group in order, if not `error`.
  std::exception_ptr drain(const std::exception_ptr& error);
  void merge_stats(double lease_wait_s = 0);

  const TieredParts& tiers_;
  const shard::ParamTable& params_;
  SubGroupPlan plan_;
  std::vector<std::vector<std::size_t>> groups_of_param_;  // by id: one entry per piece
  std::size_t num_kept_ = 0;                               // sub-groups of plan_
  bool expects_early_ = false;

  // Of the thread; of the caller while that is idle.
  StageWork work_;
  std::deque<UpdateStage> ahead_;            // read or being read, in the order of updates
  std::deque<UpdateStage> writing_;          // updated, in the same order
  std::map<std::size_t, tier::Lease> kept_;  // by sub-group: as it is stored
  std::vector<std::size_t> order_;           // of the next update, as expected
  std::deque<std::size_t> to_open_;          // sub-groups behind ahead_, in the order of updates
  std::vector<std::size_t> num_missing_;     // pieces that have not come, by sub-group
  std::vector<std::size_t> complete_;        // sub-groups, in the order in which they were
  bool rest_is_ordered_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<std::shared_ptr<OpenJob>> jobs_;
  std::shared_ptr<OpenJob> current_;  // the one that add() speaks of; null: none
  bool must_prepare_ = false;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  TieredStats stats_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
