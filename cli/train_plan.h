// The flags of `tessera train`, checked, in the words of those who carry them out.
//
// What is an option of the table (batch, precision, learning rate, ...) is in `config` and nowhere
// else, whether a flag, --set or a file gave it; flags win. batch.total and batch.accumulate are
// filled in for the number of ranks.
//
// Includes models, hence torch: for train_*.cpp and inspect_model.cpp only.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/resume.h"
#include "cli/train.h"
#include "cli/train_batch.h"
#include "cli/train_compare.h"
#include "cli/train_memory_plan.h"
#include "models/data.h"
#include "models/gpt.h"
#include "models/gpt_weights.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/config.h"
#include "tessera/engine/memory_planning.h"

namespace tessera::cli {

inline constexpr std::int64_t kMaxSteps = std::int64_t{1} << 40;

// The loss of data that is not trained on.
struct EvalPlan {
  models::DataOptions data;  // its batch: all sequences of one evaluation
  std::int64_t every = 0;    // steps; 0: after the last one only

  bool is_due_after(std::int64_t step, std::int64_t num_steps) const {
    return step + 1 == num_steps || (every > 0 && (step + 1) % every == 0);
  }
};

struct TrainPlan {
  Config config;
  std::string preset;              // or what else the model is called
  std::vector<std::string> notes;  // what the user should know of the model's file, one line each
  models::GptOptions model;
  models::DataOptions data;
  BatchShape batch;
  comm::Mesh mesh;
  std::int64_t frozen_bits = 0;  // of a frozen element that is held as blocks; 0: as others are
  std::uint64_t seed = 0;

  std::int64_t num_epochs = 0;           // 0: steps are counted, not epochs
  std::int64_t sequences_per_epoch = 0;  // those included that fill no batch
  std::optional<EvalPlan> evaluation;

  std::int64_t num_steps = 0;       // that are run
  std::int64_t schedule_steps = 0;  // that the learning rate is laid out for

  int cuda_device = -1;  // this rank's GPU; -1: CPU
  int num_threads = 1;
  bool unsharded = false;
  bool deterministic = false;
  bool verify = false;
  bool stop_on_divergence = false;
  std::optional<double> stop_after_s;
  Against verify_against = Against::kTurns;

  std::int64_t log_every = 0;        // steps; 0: not asked for
  std::optional<double> peak_flops;  // of one rank's device, as a flag gave it
  int ranks_per_gpu = 1;             // above 1 where ranks share GPUs

  std::optional<TrainMemory> memory;  // where there is one
  // Of plan_run_memory(), for the engine.
  std::optional<planner::ModelShapes> shapes;
  std::optional<MemoryPlanning> planning;

  std::optional<CheckpointPlan> checkpoint;
  std::optional<ResumePoint> resume;  // the newest save, as this process sees it
  // On rank 0, while it trains; null: not taken.
  std::shared_ptr<const checkpoint::DirectoryLock> root_lock;

  std::string init;  // where initial values are; empty: they are drawn
  // Opened by whoever makes the model, unless a save has its values; null: they are drawn.
  std::shared_ptr<const models::InitialWeights> weights;

  // Empty: not wanted.
  std::string metrics;
  std::string tensorboard;
  std::string trace;
  std::string save_init;
  std::string save;

  std::int64_t tokens_per_step() const { return batch.total * model.sequence; }
};

// Which data is trained on, how often, and which is evaluated. Looks at the sizes of files where
// epochs or an evaluation need them. REQUIRES: model, batch and seed are set.
void plan_data(const TrainFlags& flags, TrainPlan& plan);

enum class PlanFor : std::uint8_t {
  kTraining,    // here and now: its GPUs must be there
  kInspection,  // of a training somewhere else
};

// Of plan.init, with the model's shape; null: initial values are drawn, or come from a save.
std::shared_ptr<const models::InitialWeights> open_initial_weights(const TrainPlan& plan);

// `place`: this rank's, or any rank's when a plan is made for all of them.
TrainPlan checked_plan(const TrainFlags& flags, const comm::Rendezvous& place,
                       PlanFor purpose = PlanFor::kTraining);

}  // namespace tessera::cli
