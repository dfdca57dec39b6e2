// Checkpoints of a training run: where it goes on, when a save is due, and what is told of it.
//
//   resume()      before the first step: from the newest save that rank 0 sees, or nothing
//   after_step()  every --save-every steps; asynchronous saves are told when they have ended
//   finish()      behind the last step, whatever ended the run: waits for what is on its way, and
//                 saves the step unless that is saved already
//
// A save that fails while training goes on is a warning, and the next one is tried. The last one is
// tried somewhere else (final_save.h): what the run has come to is not lost.
//
// Includes the engine, hence torch: for train_*.cpp only.
//
// Threads: main thread only; what is collective says so.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cli/resume.h"
#include "cli/save_totals.h"
#include "cli/train_plan.h"
#include "models/data.h"
#include "tessera/engine/engine.h"

namespace tessera::cli {

// What determines a run's numbers, with the batch behind `num_done` steps.
RunIdentity run_identity(const TrainPlan& plan, models::TokenSource& data, std::int64_t num_done);

// Before anything is allocated: ConfigError if the run does not go on with these flags and data.
void check_resume(const TrainPlan& plan, models::TokenSource& data);

// Each takes one line; of a rank that does not speak: they do nothing.
struct Tellers {
  std::function<void(const std::string& text)> say;
  std::function<void(const std::string& text)> warn;
};

class Checkpoints {
 public:
  // REQUIRES: plan.checkpoint. All of them outlive this object.
  Checkpoints(const TrainPlan& plan, Engine& engine, models::TokenSource& data, Tellers tellers);

  // Collective: the number of steps that are done.
  std::int64_t resume();
  // Collective. `is_last`: finish() comes next.
  void after_step(std::int64_t step, bool is_last);
  // Collective: waits for a save on its way. With `save` it makes one of this step, if there is
  // none; what it returns is to be told: that it is not where it was wanted.
  std::string finish(std::int64_t step, bool save);

  std::string summary() const { return totals_.text(); }

 private:
  // Collective: whether rank 0 has found a save.
  bool has_agreed_point();
  SaveOptions options_at(std::int64_t step);
  SaveRecord save_now(std::int64_t step, const std::string& root);
  void start_save(std::int64_t step);
  // Of saves beside training that have ended.
  void take_outcomes();
  void add(const SaveOutcome& outcome);
  void add(const SaveRecord& record);

  const TrainPlan& plan_;
  const CheckpointPlan& checkpoint_;
  Engine& engine_;
  models::TokenSource& data_;
  const Tellers tellers_;
  SaveTotals totals_;
  std::int64_t saved_step_ = 0;  // the newest that needs no save: none is made of step 0
  std::optional<SavePrediction> predicted_;  // that was told last
};

}  // namespace tessera::cli
