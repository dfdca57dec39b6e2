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
#include <optional>
#include <string>

#include "cli/train.h"
#include "cli/train_compare.h"
#include "cli/train_memory_plan.h"
#include "cli/train_ranks.h"
#include "models/data.h"
#include "models/gpt.h"
#include "tessera/core/config.h"

namespace tessera::cli {

struct TrainPlan {
  Config config;
  std::string preset;
  models::GptOptions model;
  models::DataOptions data;
  BatchShape batch;
  std::uint64_t seed = 0;

  std::int64_t num_steps = 0;       // that are run
  std::int64_t schedule_steps = 0;  // that the learning rate is laid out for

  int cuda_device = -1;  // this rank's GPU; -1: CPU
  int num_threads = 1;
  bool unsharded = false;
  bool deterministic = false;
  bool verify = false;
  Against verify_against = Against::kTurns;

  std::int64_t log_every = 0;        // steps; 0: not asked for
  std::optional<double> peak_flops;  // of one rank's device, as a flag gave it
  int ranks_per_gpu = 1;             // above 1 where ranks share GPUs

  std::optional<MemoryPlan> memory;  // where an option asks for one

  // Empty: not wanted.
  std::string metrics;
  std::string tensorboard;
  std::string trace;
  std::string save_init;
  std::string save;

  std::int64_t tokens_per_step() const { return batch.total * model.sequence; }
};

enum class PlanFor : std::uint8_t {
  kTraining,    // here and now: its GPUs must be there
  kInspection,  // of a training somewhere else
};

// `place`: this rank's, or any rank's when a plan is made for all of them.
TrainPlan checked_plan(const TrainFlags& flags, const comm::Rendezvous& place,
                       PlanFor purpose = PlanFor::kTraining);

}  // namespace tessera::cli
