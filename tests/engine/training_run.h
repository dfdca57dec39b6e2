// A training run for comparison: the same model, data and seed, sharded over ranks as threads or
// processes, or unsharded by the reference.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "tessera/core/config.h"
#include "tessera/engine/engine.h"

namespace tessera::testing {

// Mistakes that a comparison must find; made on purpose, in the sharded run.
enum class Planted : std::uint8_t {
  kNothing,
  kDoubledGradient,  // of one parameter, in one step
  kParamNotUpdated,  // a norm layer keeps its value
  kSumForMean,       // ranks and micro-batches are added, not averaged
  kStaleGradient,    // one parameter is updated by the gradient of the step before
};

// Where a sharded run computes.
enum class RunDevice : std::uint8_t {
  kCpu,
  kMock,  // testing/mock_device.h, discrete
  kCuda,
};

// What a run does with checkpoints.
struct RunSaves {
  std::string load;                  // before the first step: a save, or a directory of saves
  std::string root;                  // where saves go
  std::vector<std::int64_t> behind;  // after so many steps in all
  bool beside_training = false;      // by start_save()
  SaveOptions options = {};
  LoadOptions load_options = {};
  bool fails = false;  // saves are expected to
};

struct RunSettings {
  models::GptOptions model = models::gpt_preset("tiny");
  int ranks = 1;  // 0: unsharded
  std::int64_t steps = 20;
  std::int64_t batch = 12;  // sequences of all ranks
  int accumulate = 1;
  std::vector<std::pair<std::string, std::string>> options;  // name=value of the config
  std::uint64_t seed = 7;
  std::string data = "demo";
  Planted planted = Planted::kNothing;
  std::int64_t unfrozen_from = -1;  // in sharded runs: the step from which the frozen train, too
  bool gives_shapes = false;        // to the engine, before the model is built
  RunDevice device = RunDevice::kCpu;
  int cuda_index = 0;             // with RunDevice::kCuda
  std::size_t device_bytes = 0;   // of the mock device; 0: the host's
  bool copies_calls = false;      // of groups, through pinned memory, as ranks do that share a GPU
  bool calls_on_streams = false;  // of ranks as threads, as NCCL's are; on the mock device
  RunSaves saves;
  // Stands between the tiers and the disk; null: nothing.
  std::function<std::unique_ptr<tier::IoEngine>(std::unique_ptr<tier::IoEngine>)> wrap_io = {};
};

struct RunOutcome {
  models::GptOptions model;
  std::vector<StepResult> steps;
  std::vector<std::string> names;
  std::vector<at::Tensor> params;  // after the last step, in fp32: master weights of low precision
  std::vector<at::Tensor> states;  // optimizer states after the last step, by parameter
  std::string differs_in_copies;   // a parameter, if copies of the model differ after the last step
  std::vector<EngineStats> stats;  // of rank 0, per step
  engine::TierIo io;               // of rank 0, of all steps and their updates
  // Of rank 0: what became of its saves; of the load, what it said.
  std::vector<SaveOutcome> saved;
  std::optional<LoadResult> loaded;
  // Of rank 0: what was planned, if anything was, and what its books say after the last step.
  std::optional<planner::MemoryPlan> placement;
  std::map<std::pair<Tier, Role>, std::int64_t> peaks;
  std::int64_t comm_peak_bytes = 0;  // scratch of all ranks' groups together
};

// Unsharded on `device`, or sharded over ranks as threads (on CUDA: over one).
RunOutcome train(const RunSettings& settings);
// The part of this rank, a process of its own, in a run over all ranks of `world`. Collective.
// Every rank has the whole outcome, with its own figures of memory and bytes.
RunOutcome train_in(comm::Group& world, const RunSettings& settings);

// Largest relative differences: of losses and norms, and of parameters against their tensor's norm.
// Elements that only noise moves (gpt_noise_elements) are apart, as absolute differences.
struct Difference {
  double loss = 0;
  double norm = 0;
  double param = 0;
  double noise = 0;
  std::string worst_param;
  std::string describe() const;
  double largest() const;
};
Difference difference(const RunOutcome& left, const RunOutcome& right);

// Every bit of losses, norms, parameters and optimizer states.
bool same_bits(const RunOutcome& left, const RunOutcome& right);

Config config_of(const RunSettings& settings);

}  // namespace tessera::testing
