// A discrete device: where shards live and who updates them changes no bit, also where ranks share
// it, so that their calls pass through memory of the host. On the mock device, which is a CPU, the
// reference is the CPU's resident run; on CUDA it is CUDA's own.
#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "models/gpt_shapes.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tessera/device/host_memory.h"
#include "tessera/planner/memory_planner.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

std::vector<Placed> discrete_placements(const DiskDirectory& directory) {
  const Options io = nvme_in(directory);
  const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
  const Options streamed = joined({{"optim.cpu_share", "0"}}, host);
  return {
      {"device", {{"place.parameters", "device"}, {"place.optimizer", "device"}}},
      {"all by the CPU", joined({{"optim.cpu_share", "1"}}, host)},
      {"all by the device", streamed},
      {"all by the device, in small pieces",
       joined({{"optim.sub_group_bytes", "64KiB"}}, streamed)},
      {"half by each", joined({{"optim.cpu_share", "0.5"}}, host)},
      {"optimizer, half by each",
       {{"place.parameters", "device"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
      {"few live parameters", joined({{"live.limit_bytes", "0"}}, host)},
      {"optimizer on NVMe",
       joined({{"place.parameters", "host"}, {"place.optimizer", "nvme"}}, io)},
      {"NVMe", joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, io)},
  };
}

const std::vector<TrainedCase>& discrete_cases() {
  static const std::vector<TrainedCase> cases = {{1, 1},
                                                 {1, 3},
                                                 {2, 1},
                                                 {2, 2},
                                                 {1, 1, "sgd"},
                                                 {1, 1, "lion"},
                                                 {1, 1, "adamw", DType::kBFloat16},
                                                 {1, 5, "adamw", DType::kBFloat16},
                                                 {2, 1, "adamw", DType::kBFloat16},
                                                 {3, 3, "adamw", DType::kBFloat16},
                                                 {4, 1, "lion"},
                                                 {1, 1, "adamw", DType::kFloat16}};
  return cases;
}

// Large enough that most parameters are not small ones, which never leave the device.
RunSettings discrete_settings(const TrainedCase& each) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.dtype = each.dtype;
  settings.model.width = each.dtype == DType::kFloat32 ? 160 : 208;
  settings.model.vocabulary = 661;
  settings.model.sequence = 8;  // products of low precision are slow on most CPUs
  settings.steps = 3;
  settings.batch = static_cast<std::int64_t>(each.ranks) * each.accumulate;
  settings.ranks = each.ranks;
  settings.accumulate = each.accumulate;
  settings.data = "random";
  settings.options = {{"optim.kind", each.kind},
                      {"grad.clip_norm", "0.5"},
                      {"batch.accumulate", std::to_string(each.accumulate)}};
  return settings;
}

// Whether the engine is told the shapes before the model is built, or finds them in it, alternates.
void expect_bits_at_all_places(RunSettings settings, std::size_t case_index,
                               const RunOutcome& resident) {
  const DiskDirectory directory;
  const Options common = settings.options;
  std::vector<Placed> all = discrete_placements(directory);
  if (settings.model.dtype != DType::kFloat32) {  // which are their own masters
    all.push_back(
        {"parameters only", {{"place.parameters", "host"}, {"place.optimizer", "device"}}});
  }
  bool gives_shapes = case_index % 2 == 0;
  for (const Placed& placed :
       places_of_case(all, case_index, {"half by each", "NVMe", "parameters only"})) {
    settings.options = joined(common, placed.options);
    settings.gives_shapes = gives_shapes;
    gives_shapes = !gives_shapes;
    const RunOutcome run = train(settings);
    EXPECT_TRUE(same_bits(run, resident))
        << placed.name << ": " << difference(run, resident).describe();
    ASSERT_TRUE(run.placement.has_value()) << placed.name;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
}

std::string case_name(const ::testing::TestParamInfo<std::size_t>& info) {
  return name_of(discrete_cases()[info.param]);
}

class DiscreteDevice : public ::testing::TestWithParam<std::size_t> {};

TEST_P(DiscreteDevice, GivesTheSameBitsWhereverShardsLiveAndWhoeverUpdates) {
  RunSettings settings = discrete_settings(discrete_cases()[GetParam()]);
  const RunOutcome resident = train(settings);
  settings.device = RunDevice::kMock;
  EXPECT_TRUE(same_bits(train(settings), resident)) << "nothing planned";
  expect_bits_at_all_places(settings, GetParam(), resident);
}

INSTANTIATE_TEST_SUITE_P(Of, DiscreteDevice,
                         ::testing::Range(std::size_t{0}, discrete_cases().size()), case_name);

// A skipped step has no norm that could be compared.
RunOutcome without_norms_of_skipped(RunOutcome run) {
  for (StepResult& step : run.steps) {
    step.grad_norm = step.skipped ? -1 : step.grad_norm;
  }
  return run;
}

// Norm, factor and update of all ranks are enqueued together there.
TEST(DiscreteDeviceRanks, GiveTheSameBitsWhereCallsAreWorkOfStreams) {
  for (const TrainedCase& each :
       {TrainedCase{2, 1, "adamw"}, TrainedCase{3, 2, "adamw", DType::kBFloat16},
        TrainedCase{2, 2, "lion", DType::kFloat16}}) {
    RunSettings settings = discrete_settings(each);
    const bool skips = each.dtype == DType::kFloat16;
    if (skips) {
      settings.options.emplace_back("loss_scale.initial", "67108864");
      settings.options.emplace_back("loss_scale.hysteresis", "1");
      settings.steps = 12;
    }
    const RunOutcome reference = without_norms_of_skipped(train(settings));
    settings.device = RunDevice::kMock;
    settings.calls_on_streams = true;
    const RunOutcome run = without_norms_of_skipped(train(settings));
    for (std::size_t i = 0; i < run.steps.size(); ++i) {
      EXPECT_EQ(run.steps[i].skipped, reference.steps.at(i).skipped) << name_of(each) << ", " << i;
      EXPECT_EQ(run.steps[i].loss_scale, reference.steps.at(i).loss_scale) << name_of(each);
    }
    EXPECT_EQ(run.steps.front().skipped, skips);
    EXPECT_FALSE(run.steps.back().skipped);
    EXPECT_TRUE(same_bits(run, reference))
        << name_of(each) << ": " << difference(run, reference).describe();
  }
}

// The least of host memory with which it trains, and the least that holds some of the gradients; 0:
// none does, beside staging of the network's calls.
struct HostBudgets {
  std::int64_t least = 0;
  std::int64_t more = 0;
  std::int64_t shard_numel = 0;
};

HostBudgets host_budgets(const RunSettings& settings) {
  const planner::ModelShapes shapes = models::planner_shapes(models::gpt_shape(settings.model));
  auto options = planner::MemoryPlanOptions::from(config_of(settings), settings.ranks, true);
  options.call_memory = comm::CallMemory::kReached;  // of ranks that are threads
  options.group_memory = {};
  HostBudgets budgets;
  constexpr std::int64_t kStep = 128 << 10;
  for (options.host_bytes = 16 << 20;; options.host_bytes -= kStep) {
    try {
      const auto plan = planner::plan_memory(shapes, options, settings.accumulate);
      const bool holds_some = plan.bytes(Tier::kPinned, Role::kGradient) > 0;
      const bool holds_all = plan.bytes(Tier::kNvme, Role::kGradient) == 0;
      budgets.more = holds_some && !holds_all ? options.host_bytes : budgets.more;
      budgets.shard_numel = plan.shard_numel;
      budgets.least = options.host_bytes;
    } catch (const ConfigError&) {
      break;
    }
  }
  return budgets;
}

Options gradients_on_nvme(const DiskDirectory& directory) {
  return joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory));
}

bool has_gradients_on_nvme(const RunOutcome& run) {
  return run.placement && run.placement->bytes(Tier::kNvme, Role::kGradient) > 0;
}

// Host memory holds no gradients, or some of them.
void expect_bits_with_gradients_on_nvme(RunSettings settings, const RunOutcome& resident) {
  const DiskDirectory directory;
  settings.options = joined(settings.options, gradients_on_nvme(directory));
  const HostBudgets budgets = host_budgets(settings);
  const Options common = settings.options;
  EXPECT_TRUE(budgets.more > 0 || settings.ranks > 1);
  for (const std::int64_t budget : {budgets.least, budgets.more}) {
    if (budget == 0) {
      continue;
    }
    settings.options = joined(common, {{"memory.host", std::to_string(budget)}});
    settings.gives_shapes = budget == budgets.least;
    const RunOutcome run = train(settings);
    EXPECT_TRUE(same_bits(run, resident)) << budget << ": " << difference(run, resident).describe();
    EXPECT_TRUE(has_gradients_on_nvme(run)) << budget;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "scratch files are left";
}

// Every count of both with either type is a test of the reducer (tests/grad/reducer_nvme_test.cpp).
const std::vector<TrainedCase>& offloaded_cases() {
  static const std::vector<TrainedCase> cases = {
      {1, 1}, {2, 2}, {3, 1}, {1, 3, "adamw", DType::kBFloat16}, {3, 3, "adamw", DType::kBFloat16}};
  return cases;
}

TEST(DiscreteDeviceGradientsOnNvme, GiveTheSameBits) {
  for (const TrainedCase& each : offloaded_cases()) {
    SCOPED_TRACE(name_of(each));
    RunSettings settings = discrete_settings(each);
    const RunOutcome resident = train(settings);
    settings.device = RunDevice::kMock;
    expect_bits_with_gradients_on_nvme(settings, resident);
  }
}

TEST(DiscreteDeviceGradientsOnNvmeOnCuda, GiveTheSameBits) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  for (const TrainedCase& each : offloaded_cases()) {
    if (each.ranks > 1) {
      continue;  // ranks as threads share autograd's one thread per GPU
    }
    SCOPED_TRACE(name_of(each));
    RunSettings settings = discrete_settings(each);
    settings.device = RunDevice::kCuda;
    expect_bits_with_gradients_on_nvme(settings, train(settings));
  }
}

TEST(DiscreteDeviceGradientsOnNvme, GiveTheSameBitsBesideAFrozenBlock) {
  RunSettings settings = discrete_settings({1, 2, "adamw"});
  settings.model.freeze = 1;
  const RunOutcome resident = train(settings);
  settings.device = RunDevice::kMock;
  expect_bits_with_gradients_on_nvme(settings, resident);
}

TEST(DiscreteDeviceGradientsOnNvme,
     TrainWithLessHostMemoryThanTwoBytesPerParameterAndKeepTheBooks) {
  for (const auto& [ranks, accumulate] : {std::pair{1, 3}, {2, 1}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << accumulate << " micro-batches");
    const DiskDirectory directory;
    RunSettings settings = discrete_settings({ranks, accumulate, "adamw", DType::kBFloat16});
    settings.model.width = 320;
    settings.model.vocabulary = 3001;
    settings.device = RunDevice::kMock;
    settings.gives_shapes = true;
    settings.options = joined(settings.options, gradients_on_nvme(directory));
    const HostBudgets budgets = host_budgets(settings);
    if (ranks == 1) {  // else staging of the network's calls is most of it
      EXPECT_LT(budgets.least, 2 * budgets.shard_numel);
    }
    settings.options.emplace_back("memory.host", std::to_string(budgets.least));
    const RunOutcome run = train(settings);
    ASSERT_TRUE(has_gradients_on_nvme(run));
    const planner::MemoryPlan& plan = *run.placement;
    EXPECT_EQ(plan.bytes(Tier::kPinned, Role::kGradient), 0);
    for (const auto& [cell, bytes] : run.peaks) {
      const auto [tier, role] = cell;
      if (tier != Tier::kDevice && role != Role::kOther) {
        EXPECT_EQ(bytes, plan.bytes(tier, role)) << to_string(tier) << " " << to_string(role);
      }
    }
    const auto steps = static_cast<std::uint64_t>(settings.steps);
    EXPECT_EQ(run.io.gradients.written_bytes,
              steps * static_cast<std::uint64_t>(plan.step.gradients_written));
    EXPECT_EQ(run.io.gradients.read_bytes,
              steps * static_cast<std::uint64_t>(plan.step.gradients_read));
    for (std::size_t step = 2; step < run.stats.size(); ++step) {
      EXPECT_EQ(run.stats[step].d2h_bytes, static_cast<std::uint64_t>(plan.link.d2h));
    }
  }
}

// Nobody updates it; on NVMe it can be unfrozen all the same, as elsewhere it may not be.
TEST(DiscreteDeviceFrozen, GivesTheSameBitsWhereverAFrozenBlockLives) {
  RunSettings settings = discrete_settings({1, 1, "adamw"});
  settings.model.freeze = 1;
  RunOutcome resident = train(settings);
  settings.device = RunDevice::kMock;
  expect_bits_at_all_places(settings, 1, resident);

  settings.device = RunDevice::kCpu;
  settings.unfrozen_from = 2;
  resident = train(settings);
  settings.device = RunDevice::kMock;
  const DiskDirectory directory;
  settings.options = joined(
      settings.options,
      joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory)));
  const RunOutcome run = train(settings);
  EXPECT_TRUE(same_bits(run, resident)) << difference(run, resident).describe();
}

class DiscreteDeviceOnCuda : public ::testing::TestWithParam<std::size_t> {};

TEST_P(DiscreteDeviceOnCuda, GivesTheSameBitsWhereverShardsLiveAndWhoeverUpdates) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  const TrainedCase& each = discrete_cases()[GetParam()];
  if (each.ranks > 1) {
    GTEST_SKIP() << "ranks as threads share autograd's one thread per GPU";
  }
  RunSettings settings = discrete_settings(each);
  settings.device = RunDevice::kCuda;
  expect_bits_at_all_places(settings, kAllPlaces, train(settings));
}

INSTANTIATE_TEST_SUITE_P(Of, DiscreteDeviceOnCuda,
                         ::testing::Range(std::size_t{0}, discrete_cases().size()), case_name);

// fp16 whose first loss scales are too large. What is resident lets the device find the factors of
// a step, and learns afterwards that it was skipped; where it is placed the host finds them first.
RunSettings overflowing() {
  RunSettings settings = discrete_settings({1, 1, "adamw", DType::kFloat16});
  settings.steps = 8;
  settings.options.emplace_back("loss_scale.initial", "4194304");
  settings.options.emplace_back("loss_scale.hysteresis", "1");
  return settings;
}

void expect_same_skips(const RunOutcome& run, const RunOutcome& other) {
  std::size_t num_skipped = 0;
  ASSERT_EQ(run.steps.size(), other.steps.size());
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    EXPECT_EQ(run.steps[i].skipped, other.steps[i].skipped) << "step " << i;
    EXPECT_EQ(run.steps[i].loss, other.steps[i].loss) << "step " << i;
    EXPECT_EQ(run.steps[i].loss_scale, other.steps[i].loss_scale) << "step " << i;
    num_skipped += run.steps[i].skipped ? 1 : 0;
  }
  EXPECT_GT(num_skipped, 0U);
  EXPECT_LT(num_skipped, run.steps.size());
  ASSERT_EQ(run.params.size(), other.params.size());
  ASSERT_EQ(run.states.size(), other.states.size());
  for (std::size_t i = 0; i < run.params.size(); ++i) {
    EXPECT_TRUE(at::equal(run.params[i], other.params[i])) << run.names[i];
  }
  for (std::size_t i = 0; i < run.states.size(); ++i) {
    EXPECT_TRUE(at::equal(run.states[i], other.states[i])) << "states " << i;
  }
}

TEST(DiscreteDeviceSkips, StepsThatOverflowWithTheSameBits) {
  RunSettings settings = overflowing();
  const RunOutcome on_cpu = train(settings);
  settings.device = RunDevice::kMock;
  expect_same_skips(train(settings), on_cpu);
}

TEST(DiscreteDeviceSkips, StepsWhoseGradientsAreOnNvme) {
  RunSettings settings = overflowing();
  const RunOutcome on_cpu = train(settings);
  settings.device = RunDevice::kMock;
  const DiskDirectory directory;
  settings.options = joined(settings.options, gradients_on_nvme(directory));
  settings.options.emplace_back("memory.host", std::to_string(host_budgets(settings).least));
  const RunOutcome run = train(settings);
  EXPECT_TRUE(has_gradients_on_nvme(run));
  expect_same_skips(run, on_cpu);
}

TEST(DiscreteDeviceSkipsOnCuda, StepsThatOverflowWithTheSameBits) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  RunSettings settings = overflowing();
  settings.device = RunDevice::kCuda;
  const RunOutcome resident = train(settings);
  settings.options.emplace_back("place.parameters", "host");
  settings.options.emplace_back("place.optimizer", "host");
  expect_same_skips(resident, train(settings));
}

std::size_t num_on_device(const planner::MemoryPlan& plan) {
  return static_cast<std::size_t>(
      std::count_if(plan.params.begin(), plan.params.end(), [](const Placement& each) {
        return each.parameter == Tier::kDevice && each.states == Tier::kDevice;
      }));
}

// Nobody gave a number, and the device is too small to hold everything for certain.
TEST(FirstStep, RunsWithShardsInHostMemoryAndFixesPlacementWithTheSameBits) {
  std::size_t index = 0;
  for (const TrainedCase& each : discrete_cases()) {
    if (each.ranks > 2) {
      continue;  // their shards are so small that the device holds them for certain
    }
    RunSettings settings = discrete_settings(each);
    const RunOutcome resident = train(settings);
    const planner::ModelShapes shapes = models::planner_shapes(models::gpt_shape(settings.model));
    const planner::MemoryPlan all = planner::plan_memory(
        shapes, planner::MemoryPlanOptions::from(config_of(settings), each.ranks, true),
        each.accumulate);
    const std::int64_t everything = all.device_memory_bytes() + all.full_gradient_bytes;
    settings.device = RunDevice::kMock;
    // Several ranks have buckets besides, which are smaller where memory is short.
    for (const double part : {2.0, each.ranks > 1 ? 0.3 : 0.8}) {
      settings.gives_shapes = index++ % 2 == 0;
      const auto device_bytes = static_cast<std::int64_t>(part * static_cast<double>(everything));
      settings.device_bytes = static_cast<std::size_t>(device_bytes);
      const RunOutcome run = train(settings);
      const std::string what = name_of(each) + ", " + std::to_string(part) + " of everything";
      EXPECT_TRUE(same_bits(run, resident)) << what << ": " << difference(run, resident).describe();
      ASSERT_TRUE(run.placement.has_value()) << what;
      ASSERT_EQ(run.stats.size(), static_cast<std::size_t>(settings.steps));
      EXPECT_GT(run.stats[0].h2d_bytes, 0U) << what << ": shards are in host memory";
      if (part > 1) {
        EXPECT_EQ(num_on_device(*run.placement), run.placement->params.size()) << what;
        EXPECT_EQ(run.stats[2].gathers.brought_bytes, 0U) << what << ": nothing is any more";
      } else {
        EXPECT_LT(num_on_device(*run.placement), run.placement->params.size()) << what;
        EXPECT_LE(run.placement->device_memory_bytes(), device_bytes) << what;
      }
    }
  }
}

// On a GPU most of whose memory somebody else has.
TEST(FirstStepOnCuda, MeasuresActivationsAndFixesPlacementWithTheSameBits) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  RunSettings settings = discrete_settings({1, 1, "adamw", DType::kBFloat16});
  settings.device = RunDevice::kCuda;
  settings.model.width = 1024;
  settings.model.layers = 8;
  settings.model.vocabulary = 8192;
  const RunOutcome resident = train(settings);
  EXPECT_FALSE(resident.placement.has_value()) << "it is small beside the whole GPU";
  const auto device = device::make_cuda_device({});
  constexpr std::size_t kLeft = std::size_t{5} << 30;
  const device::MemoryInfo info = device->memory_info();
  ASSERT_GT(info.free_bytes, kLeft);
  const device::Memory others =
      device->allocate(Tier::kDevice, info.free_bytes - kLeft, Role::kOther);
  const RunOutcome run = train(settings);
  EXPECT_TRUE(same_bits(run, resident)) << difference(run, resident).describe();
  ASSERT_TRUE(run.placement.has_value());
  EXPECT_GT(run.stats[0].h2d_bytes, 0U) << "shards are in host memory";
  EXPECT_EQ(num_on_device(*run.placement), run.placement->params.size());
  EXPECT_EQ(run.stats[2].h2d_bytes, 0U) << "everything is on the device";
}

TEST(FirstStep, OfASmallModelHasEverythingOnTheDevice) {
  RunSettings settings = discrete_settings({1, 1, "adamw", DType::kBFloat16});
  settings.device = RunDevice::kMock;
  settings.device_bytes = std::size_t{1} << 30;
  const RunOutcome run = train(settings);
  EXPECT_FALSE(run.placement.has_value());
  EXPECT_EQ(run.stats[0].h2d_bytes, 0U);
}

void expect_planned_bytes(RunDevice device, int ranks, int accumulate, const Options& more = {}) {
  SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << accumulate << " micro-batches");
  RunSettings settings = discrete_settings({ranks, accumulate, "adamw", DType::kBFloat16});
  settings.device = device;
  settings.gives_shapes = true;
  // So that calls have staging; the double that copies knows no second group of a rank's own.
  const bool has_replicas =
      !more.empty() && std::string_view(more.front().first) == "shard.group_size";
  settings.copies_calls = !more.empty() && !has_replicas;
  settings.options.insert(settings.options.end(), more.begin(), more.end());
  settings.options.emplace_back("place.parameters", "host");
  settings.options.emplace_back("place.optimizer", "host");
  settings.options.emplace_back("optim.cpu_share", "0.5");
  const RunOutcome run = train(settings);
  ASSERT_TRUE(run.placement.has_value());
  for (const auto& [cell, bytes] : run.peaks) {
    const auto [tier, role] = cell;
    const std::int64_t planned = run.placement->bytes(tier, role);
    const std::string where = std::string(to_string(tier)) + " " + std::string(to_string(role));
    if (role == Role::kOther || (tier == Tier::kDevice && role == Role::kStaging)) {
      EXPECT_LE(bytes, planned + 65536) << where << ": single numbers, such as the norm";
    } else if (tier == Tier::kDevice && role == Role::kGradient &&
               run.placement->adopts_gradients) {
      EXPECT_LE(bytes, planned) << where << ": autograd's memory, held while it is needed";
    } else if (tier == Tier::kDevice && device == RunDevice::kMock) {
      // It is the host's memory after all, in whole pages; no parameter has more than four pieces.
      EXPECT_GE(bytes, planned) << where;
      EXPECT_LE(bytes, planned + static_cast<std::int64_t>(4 * run.placement->params.size() *
                                                           device::page_bytes()))
          << where;
    } else {
      EXPECT_EQ(bytes, planned) << where;
    }
  }
  // In two phases no group has room for exact values, which the test reads at the end.
  if (settings.copies_calls && run.placement->staging.phase_inside == 0) {
    EXPECT_EQ(run.comm_peak_bytes, ranks * run.placement->comm_bytes);
  }
  // The first steps record the order of uses, and what is copied twice.
  ASSERT_GT(run.stats.size(), 2U);
  for (std::size_t step = 2; step < run.stats.size(); ++step) {
    EXPECT_EQ(run.stats[step].h2d_bytes, static_cast<std::uint64_t>(run.placement->link.h2d));
    EXPECT_EQ(run.stats[step].d2h_bytes, static_cast<std::uint64_t>(run.placement->link.d2h));
  }
}

TEST(DiscreteDeviceBytes, AreWhatThePlanSays) {
  expect_planned_bytes(RunDevice::kMock, 1, 1);
  expect_planned_bytes(RunDevice::kMock, 1, 3);  // all are kept
  expect_planned_bytes(RunDevice::kMock, 1, 9);  // all but the last are added up before
  expect_planned_bytes(RunDevice::kMock, 2, 1);
  expect_planned_bytes(RunDevice::kMock, 2, 2);
}

TEST(DiscreteDeviceBytes, AreWhatThePlanSaysForReplicas) {
  expect_planned_bytes(RunDevice::kMock, 2, 1, {{"shard.group_size", "1"}});
  expect_planned_bytes(RunDevice::kMock, 2, 3, {{"shard.group_size", "1"}});
  expect_planned_bytes(RunDevice::kMock, 4, 2, {{"shard.group_size", "2"}});
}

TEST(DiscreteDeviceBytes, AreWhatThePlanSaysWhereLessIsSent) {
  const Options hosts = {{"comm.ranks_per_host", "2"}};
  const Options all = joined(
      {{"shard.secondary_group_size", "2"}, {"quant.weights", "true"}, {"quant.gradients", "true"}},
      hosts);
  expect_planned_bytes(RunDevice::kMock, 4, 1, all);
  expect_planned_bytes(RunDevice::kMock, 4, 2, all);
  expect_planned_bytes(
      RunDevice::kMock, 4, 1,
      joined({{"shard.hierarchical_gather", "true"}, {"quant.weights", "true"}}, hosts));
}

TEST(DiscreteDeviceBytesOnCuda, AreWhatThePlanSays) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  expect_planned_bytes(RunDevice::kCuda, 1, 1);
  expect_planned_bytes(RunDevice::kCuda, 1, 3);
  expect_planned_bytes(RunDevice::kCuda, 1, 9);
}

void expect_bits_on_a_shared_device(DType dtype) {
  const DiskDirectory directory;
  const Placed placements[] = {
      {"nothing planned", {}},
      {"on the device", {{"place.parameters", "device"}, {"place.optimizer", "device"}}},
      {"in host memory",
       {{"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}}},
      {"on NVMe",
       joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory))}};
  RunSettings settings = discrete_settings({2, 2, "adamw", dtype});
  const RunOutcome on_cpus = train(settings);
  settings.device = RunDevice::kMock;
  settings.copies_calls = true;
  settings.gives_shapes = true;
  const Options common = settings.options;
  for (const auto& [name, options] : placements) {
    settings.options = joined(common, options);
    const RunOutcome shared = train(settings);
    EXPECT_TRUE(same_bits(shared, on_cpus))
        << name << ": " << difference(shared, on_cpus).describe();
    if (!options.empty()) {
      ASSERT_TRUE(shared.placement.has_value()) << name;
      EXPECT_EQ(shared.placement->comm_tier, Tier::kPinned) << name;
      EXPECT_EQ(shared.comm_peak_bytes, settings.ranks * shared.placement->comm_bytes) << name;
    }
  }
}

TEST(SharedDevice, GivesTheBitsOfCpusWithinThePlannedStaging) {
  expect_bits_on_a_shared_device(DType::kFloat32);
}
TEST(SharedDevice, GivesTheBitsOfCpusWithinThePlannedStagingInBf16) {
  expect_bits_on_a_shared_device(DType::kBFloat16);
}

}  // namespace
}  // namespace tessera::testing
