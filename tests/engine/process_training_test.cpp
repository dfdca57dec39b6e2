// Whole trainings whose ranks are processes: over shm on CPUs, and over ipc on GPUs, which ranks
// may share. A process that has used a GPU has no forks that can, so the test program uses none:
// ranks do it all, and rank 0 trains the reference, too. Processes of a GPU are slow to start, so a
// world runs all cases of its number of ranks.
#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "tests/comm/contract.h"
#include "tests/comm/ipc_network.h"
#include "tests/comm/shm_network.h"
#include "tests/engine/expert_training.h"
#include "tests/engine/rounding_bounds.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/contains.h"

namespace tessera::testing {
namespace {

using comm::ContractRank;

class ProcessTraining : public comm::Contract {
 protected:
  void expect_parity(int num_ranks);
  void expect_divergence_is_named(int diverging_step, const Options& options);

  // Of this rank.
  static int cuda_index(const ContractRank& here) { return comm::gpu_of(here.group.rank()); }
  static at::Device device_of(const ContractRank& here) {
    return GetParam().needs_gpu
               ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_index(here)))
               : at::Device(at::kCPU);
  }
  static RuntimeOptions runtime_options(const ContractRank& here) {
    return {GetParam().needs_gpu ? cuda_index(here) : -1, 1};
  }
};

INSTANTIATE_TEST_SUITE_P(Over, ProcessTraining,
                         ::testing::Values(comm::shm_world("Shm", Role::kOther, 0, true),
                                           comm::ipc_world("CudaIpc", Role::kOther)),
                         comm::world_name);

// Resident first: the others must give its bits.
std::vector<Placed> places(const DiskDirectory& directory) {
  return {{"resident", {}},
          {"host",
           {{"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
          {"nvme", joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}},
                          nvme_in(directory))}};
}

struct TrainingCase {
  const char* name;
  void (*change)(RunSettings&);
};

void have_everything(RunSettings& settings) {
  settings.accumulate = 2;
  settings.model.recompute = true;
  settings.model.tie_head = true;
  settings.model.freeze = 1;
}

constexpr TrainingCase kCases[] = {
    {"plain", [](RunSettings&) {}},
    {"accumulated",
     [](RunSettings& settings) {
       settings.accumulate = 3;
       settings.batch = 36;
     }},
    {"tied", [](RunSettings& settings) { settings.model.tie_head = true; }},
    {"frozen", [](RunSettings& settings) { settings.model.freeze = 1; }},
    {"everything", have_everything},
    {"everything in bf16",
     [](RunSettings& settings) {
       have_everything(settings);
       settings.model.dtype = DType::kBFloat16;
     }},
};

RunSettings settings_of(const TrainingCase& each, const ContractRank& here) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.vocabulary = 67;  // does not divide
  settings.model.sequence = 8;
  if (here.device.is_discrete()) {  // small parameters never leave it
    settings.model.width = 208;
    settings.model.vocabulary = 661;
  }
  settings.steps = 4;   // two are recorded, two follow the plan
  settings.batch = 24;  // of 2, 3 and 4 ranks with 1 and 2 micro-batches; with 3 it is 36
  settings.ranks = here.group.size();
  settings.device = here.device.is_discrete() ? RunDevice::kCuda : RunDevice::kCpu;
  settings.cuda_index = settings.device == RunDevice::kCuda ? comm::gpu_of(here.group.rank()) : 0;
  settings.gives_shapes = true;
  each.change(settings);
  return settings;
}

// One process that takes the ranks' micro-batches in turn: operators see the same shapes, for which
// a GPU may have kernels that add in another order.
RunOutcome train_in_turn(RunSettings settings) {
  settings.accumulate *= settings.ranks;
  settings.ranks = 0;
  return train(settings);
}

void expect_close(const RunOutcome& sharded, const RunOutcome& reference) {
  const Difference off = difference(sharded, reference);
  const ParityBounds bounds = parity_bounds(reference.model);
  EXPECT_LE(off.loss, bounds.step) << off.describe();
  EXPECT_LE(off.norm, bounds.step) << off.describe();
  EXPECT_LE(off.param, bounds.param) << off.describe();
  EXPECT_LE(off.noise, noise_bound(static_cast<std::int64_t>(sharded.steps.size())));
}

// Of all places, and of resident ones against the reference.
void expect_case_holds(const TrainingCase& each, const ContractRank& here,
                       const DiskDirectory& directory, const Options& more = {}) {
  RunSettings settings = settings_of(each, here);
  RunOutcome resident;
  for (const Placed& placed : places(directory)) {
    SCOPED_TRACE(std::string(each.name) + ", " + placed.name);
    settings.options = joined(joined({{"grad.clip_norm", "0.5"},
                                      {"batch.accumulate", std::to_string(settings.accumulate)}},
                                     more),
                              placed.options);
    RunOutcome run = train_in(here.group, settings);
    EXPECT_EQ(run.differs_in_copies, "");
    if (!placed.options.empty()) {
      EXPECT_TRUE(same_bits(run, resident)) << difference(run, resident).describe();
      EXPECT_TRUE(run.placement.has_value());
      continue;
    }
    resident = std::move(run);
    if (here.group.rank() == 0) {
      expect_close(resident, train_in_turn(settings));
    }
  }
}

// A GPU may have other kernels for the plain model, and Adam makes a step of lr of what a rounding
// error is: there the plain model is trained by SGD alone.
void expect_experts_hold(const std::string& kind, const ContractRank& here,
                         const RuntimeOptions& runtime_options, at::Device device,
                         const DiskDirectory& directory) {
  ExpertRun run;
  run.kind = kind;
  run.steps = 5;
  run.width = here.device.is_discrete() ? 264 : 6;  // see settings_of()
  run.device = device;
  ExpertOutcome resident;
  for (const Placed& placed : places(directory)) {
    SCOPED_TRACE("experts by " + kind + ", " + placed.name);
    Config config = config_of(run);
    for (const auto& [name, value] : placed.options) {
      config.apply_flag(name + "=" + value);
    }
    Runtime runtime(config, here.group, runtime_options);
    Engine engine(runtime);
    ExpertOutcome outcome = train_experts(engine, run);
    if (placed.options.empty()) {
      resident = std::move(outcome);
      if (here.group.rank() == 0 && (kind == "sgd" || !here.device.is_discrete())) {
        expect_experts_close(resident.params, train_plain_experts(run, here.group.size()));
      }
      continue;
    }
    for (std::size_t i = 0; i < resident.steps.size(); ++i) {
      EXPECT_EQ(outcome.steps[i].loss, resident.steps[i].loss) << "step " << i;
      EXPECT_EQ(outcome.steps[i].grad_norm, resident.steps[i].grad_norm) << "step " << i;
    }
    for (std::size_t i = 0; i < resident.params.size(); ++i) {
      EXPECT_TRUE(at::equal(outcome.params[i], resident.params[i])) << "parameter " << i;
    }
  }
}

void ProcessTraining::expect_parity(int num_ranks) {
  const DiskDirectory directory;
  run(num_ranks, [&](ContractRank& here) {
    for (const TrainingCase& each : kCases) {
      expect_case_holds(each, here, directory);
    }
    for (const char* const kind : {"sgd", "adamw"}) {
      expect_experts_hold(kind, here, runtime_options(here), device_of(here), directory);
    }
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
}

TEST_P(ProcessTraining, OfTwoRanksEqualsTheReferenceWithTheSameBitsOnEveryTier) {
  expect_parity(2);
}
TEST_P(ProcessTraining, OfThreeRanksEqualsTheReferenceWithTheSameBitsOnEveryTier) {
  expect_parity(3);
}
TEST_P(ProcessTraining, OfFourRanksEqualsTheReferenceWithTheSameBitsOnEveryTier) {
  expect_parity(4);
}

// Two copies of two ranks; the second time on pretended hosts, with gathers in two phases.
TEST_P(ProcessTraining, OfTwoCopiesOnFourRanksEqualsTheReferenceWithTheSameBitsOnEveryTier) {
  const DiskDirectory directory;
  run(4, [&](ContractRank& here) {
    for (const TrainingCase& each : {kCases[0], kCases[4], kCases[5]}) {
      for (const Options& mesh :
           {Options{{"shard.group_size", "2"}, {"mics.check_replicas", "true"}},
            Options{{"shard.group_size", "4"},
                    {"comm.ranks_per_host", "2"},
                    {"shard.hierarchical_gather", "true"}}}) {
        SCOPED_TRACE(mesh.back().first);
        expect_case_holds(each, here, directory, mesh);
      }
    }
  });
}

// --- Gathers and reductions of blocks (qwZ and qgZ), on two hosts of two ranks, which is what they
// are for.

struct QuantisedCase {
  const char* name;
  Options options;
};
const QuantisedCase kQuantised[] = {
    {"int8 weights, int4 gradients in two hops",
     {{"quant.gradient_bits", "4"}, {"shard.hierarchical_gather", "true"}}},
    {"int8 weights, int8 gradients, two copies",
     {{"quant.gradient_bits", "8"}, {"shard.group_size", "2"}, {"mics.check_replicas", "true"}}},
};

// The same ranks as threads on CPUs. A GPU rounds products of matrices elsewhere, by about 1e-6 of
// a gradient: a value that is as near to the border between two codes gets the other one, and its
// weight another step of AdamW where one of the codes is zero. That becomes of about 1e-6 of the
// values in a step, and of more as codes of weights follow, while quantising itself does it to a
// few in a hundred (int8) or a third (int4). An error stands in a tensor by the root of such a
// share, so what rounding has moved is about a hundredth of what quantising has, which a wrong
// code, order of ranks or hop would reach. (A change of lr by 1e-6 moves parameters by 1/140 to
// 1/630 of it, losses by 1e-6 and norms by 4e-5, where quantising moves losses by 1e-3 and norms by
// 8e-4 or more.)
void expect_close_to_cpu(const RunOutcome& found, RunSettings settings, bool is_exact) {
  settings.device = RunDevice::kCpu;
  const RunOutcome on_cpu = train(settings);
  if (is_exact) {
    EXPECT_TRUE(same_bits(found, on_cpu)) << difference(found, on_cpu).describe();
    return;
  }
  for (auto& [name, value] : settings.options) {
    value = name == "quant.weights" || name == "quant.gradients" ? "false" : value;
  }
  const RunOutcome exact = train(settings);
  const Difference off = difference(found, on_cpu);
  const Difference quantised = difference(on_cpu, exact);
  EXPECT_LE(off.loss, 1e-4) << off.describe();
  EXPECT_LE(off.norm, 5e-4) << off.describe();
  EXPECT_LE(off.param, quantised.param / 8) << off.describe() << "; " << quantised.describe();
}

TEST_P(ProcessTraining, OfFourRanksWithQuantisedGathersAndReductionsHasTheBitsOfItsPlaces) {
  const DiskDirectory directory;
  run(4, [&](ContractRank& here) {
    for (const QuantisedCase& each : kQuantised) {
      RunSettings settings = settings_of(kCases[1], here);
      RunOutcome resident;
      for (const Placed& placed : places(directory)) {
        SCOPED_TRACE(std::string(each.name) + ", " + placed.name);
        settings.options = joined(joined({{"grad.clip_norm", "0.5"},
                                          {"batch.accumulate", "2"},
                                          {"comm.ranks_per_host", "2"},
                                          {"quant.weights", "true"},
                                          {"quant.gradients", "true"}},
                                         each.options),
                                  placed.options);
        RunOutcome run = train_in(here.group, settings);
        EXPECT_EQ(run.differs_in_copies, "");
        EXPECT_GT(run.stats.back().grad_quant_error, 0);
        EXPECT_GT(run.stats.back().weight_quant_error, 0);
        if (!placed.options.empty()) {
          EXPECT_TRUE(same_bits(run, resident)) << difference(run, resident).describe();
          continue;
        }
        resident = std::move(run);
        if (here.group.rank() == 0) {
          expect_close_to_cpu(resident, settings, !here.device.is_discrete());
        }
      }
    }
  });
}

// --- Ranks that diverge.

// Of this rank, when its GPU has nothing left to do. By another device than the engine's, whose
// streams may have failed.
std::vector<std::vector<std::byte>> shards_of(const Engine& engine, device::Device& device) {
  if (engine.runtime().on_cuda()) {
    at::detail::getCUDAHooks().deviceSynchronize(
        static_cast<c10::DeviceIndex>(engine.runtime().cuda_device()));
  }
  std::vector<std::vector<std::byte>> shards;
  for (int id = 0; id < engine.num_params(); ++id) {
    const shard::Param& param = engine.param(id);
    auto& shard = shards.emplace_back(param.layout().shard_bytes());
    device
        .start_copy(shard.data(), param.shard(), shard.size(),
                    device.stream(device::StreamKind::kWrite))
        .wait();
  }
  return shards;
}

// Its unit has the sizes of the one that the others run, so nothing but the call's name differs.
void ProcessTraining::expect_divergence_is_named(int diverging_step, const Options& options) {
  const auto failures = run_collecting(3, [&](ContractRank& here) {
    Config config = adam_config(1e-3);
    for (const auto& [name, value] : options) {
      config.apply_flag(name + "=" + value);
    }
    Runtime runtime(config, here.group, runtime_options(here));
    Engine engine(runtime);
    const at::Device device = device_of(here);
    auto left = engine.unit("left", moved_to(device, affine(5, 6, 1)));
    auto right = engine.unit("right", moved_to(device, affine(5, 6, 2)));
    int step = 0;
    std::vector<std::vector<std::byte>> before;
    try {
      for (; step <= diverging_step; ++step) {
        before = shards_of(engine, here.device);
        const bool diverges = here.group.rank() == 2 && step == diverging_step;
        const at::Tensor x = input(4, 5, step).to(device);
        const at::Tensor y = diverges ? right(x) : left(x);
        train_step(engine, y.pow(2).mean() + right(x).mean());
        engine.zero_grad();  // waits for the update
        EXPECT_FALSE(shards_of(engine, here.device) == before)
            << "nothing was learned in step " << step;
      }
    } catch (const std::exception&) {
      EXPECT_EQ(step, diverging_step);
      EXPECT_TRUE(shards_of(engine, here.device) == before) << "parameters changed";
      throw;
    }
  });
  for (const auto& failure : failures) {
    const std::string text = comm::text_of(failure);
    EXPECT_HAS(text, "rank 2");
    EXPECT_HAS(text, "'left");
    EXPECT_EQ(text, comm::text_of(failures.front()));
  }
}

TEST_P(ProcessTraining, NamesARankThatDivergesOnEveryRankAndLeavesParametersAsTheyWere) {
  for (const int step : {0, 99}) {
    SCOPED_TRACE("step " + std::to_string(step));
    // Every use gathers; or what was gathered stays.
    expect_divergence_is_named(step, {{"live.limit_bytes", "0"}, {"persist.param_bytes", "0"}});
    expect_divergence_is_named(step, {});
  }
}

}  // namespace
}  // namespace tessera::testing
