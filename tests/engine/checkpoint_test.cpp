// Saves and loads of whole trainings: what was saved on some ranks is there, to the bit, on any
// other number of ranks, tier and type; training goes on as if it had not been interrupted; and
// what goes wrong leaves the saves of before.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "testing/fault_engine.h"
#include "testing/thread_backend.h"
#include "tests/engine/run_options.h"
#include "tests/engine/training_run.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

using checkpoint::CheckpointReader;

RunSettings small_run(int ranks) {
  RunSettings settings;
  settings.model = models::gpt_preset("micro");
  settings.model.vocabulary = 67;  // does not divide
  settings.model.sequence = 8;
  settings.ranks = ranks;
  settings.batch = 60;  // 1 to 5 ranks
  settings.steps = 2;
  settings.data = "random";
  return settings;
}

RunSettings saving(RunSettings settings, const std::filesystem::path& root,
                   std::vector<std::int64_t> behind) {
  settings.saves.root = root.string();
  settings.saves.behind = std::move(behind);
  return settings;
}

RunSettings loading(RunSettings settings, const std::filesystem::path& from) {
  settings.saves.load = from.string();
  return settings;
}

// Bytes of parameters, masters and states, and the numbers beside them.
::testing::AssertionResult hold_the_same(const std::filesystem::path& left,
                                         const std::filesystem::path& right) {
  const CheckpointReader a(left.string());
  const CheckpointReader b(right.string());
  if (a.manifest().step != b.manifest().step || a.manifest().state != b.manifest().state) {
    return ::testing::AssertionFailure() << "steps or numbers differ";
  }
  if (a.manifest().params.size() != b.manifest().params.size()) {
    return ::testing::AssertionFailure() << "one has more parameters";
  }
  for (const checkpoint::StoredParam& param : a.manifest().params) {
    const checkpoint::StoredParam* const other = b.manifest().find(param.name);
    if (other == nullptr || other->tensors.size() != param.tensors.size() ||
        other->updates != param.updates) {
      return ::testing::AssertionFailure() << param.name << " differs in what it has";
    }
    for (const auto& [kind, tensor] : param.tensors) {
      std::vector<std::byte> bytes[2];
      const auto read = [&](const CheckpointReader& reader, const checkpoint::StoredTensor& from,
                            std::vector<std::byte>& to) {
        reader.read(from, 0, param.numel(), [&](std::int64_t, auto piece) {
          to.insert(to.end(), piece.begin(), piece.end());
        });
      };
      read(a, tensor, bytes[0]);
      read(b, other->tensors.at(kind), bytes[1]);
      if (bytes[0] != bytes[1]) {
        return ::testing::AssertionFailure() << kind << " of " << param.name << " differs";
      }
    }
  }
  return ::testing::AssertionSuccess();
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void expect_loads(const RunSettings& from, int to, const std::filesystem::path& folder) {
  RunSettings settings = from;
  settings.ranks = to;
  const RunOutcome outcome =
      train(saving(loading(settings, folder / "saves"), folder / "again", {2}));
  EXPECT_EQ(outcome.loaded->step, 2);
  EXPECT_EQ(outcome.loaded->num_ranks, from.ranks);
  EXPECT_TRUE(hold_the_same(folder / "saves", folder / "again"))
      << from.ranks << " ranks to " << to;
  std::filesystem::remove_all(folder / "again");
}

TEST(Checkpoint, WhatAnyNumberOfRanksSavesAnyOtherLoads) {
  for (int from = 1; from <= 5; ++from) {
    const MemoryDirectory folder;
    RunSettings settings = small_run(from);
    settings.model.dtype = DType::kBFloat16;
    settings.model.tie_head = true;
    settings.model.freeze = 1;
    train(saving(settings, folder.path() / "saves", {2}));
    for (int to = 1; to <= 5; ++to) {
      expect_loads(settings, to, folder.path());
    }
  }
}

TEST(Checkpoint, ParametersThatAreTheirOwnMastersLoadOnOtherRanks) {
  const MemoryDirectory folder;
  const RunSettings settings = small_run(3);
  train(saving(settings, folder.path() / "saves", {2}));
  expect_loads(settings, 2, folder.path());
  expect_loads(settings, 4, folder.path());
}

struct Continued {
  std::string name;
  RunDevice device = RunDevice::kCpu;
  DType dtype = DType::kFloat32;
  int ranks = 2;
  std::int64_t steps = 12;
  Options options = {};
  bool on_nvme = false;
};

class ContinuedTraining : public ::testing::TestWithParam<Continued> {};

TEST_P(ContinuedTraining, HasTheBitsOfOneThatWasNotInterrupted) {
  const Continued& each = GetParam();
  if (each.device == RunDevice::kCuda && device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  const MemoryDirectory folder;
  const DiskDirectory disk;
  RunSettings settings = small_run(each.ranks);
  settings.device = each.device;
  settings.model.dtype = each.dtype;
  settings.model.tie_head = true;
  settings.accumulate = 2;
  settings.steps = each.steps;
  settings.options = joined({{"grad.clip_norm", "0.5"}, {"loss_scale.window", "3"}}, each.options);
  if (each.on_nvme) {
    settings.options = joined(settings.options, nvme_in(disk));
  }
  const RunOutcome whole = train(settings);
  for (const bool beside_training : {false, true}) {
    RunSettings first = saving(settings, folder.path() / "saves", {4});
    first.saves.beside_training = beside_training;
    // The run that saves goes on, too, and must not notice.
    const RunOutcome saved = train(first);
    ASSERT_EQ(saved.saved.size(), 1U);
    EXPECT_EQ(saved.saved[0].failure, "");
    EXPECT_TRUE(same_bits(saved, whole)) << "saving has changed the run that saves";
    RunOutcome rest = train(loading(settings, folder.path() / "saves"));
    ASSERT_EQ(rest.steps.size(), static_cast<std::size_t>(each.steps - 4));
    // Put before it what it has not run.
    rest.steps.insert(rest.steps.begin(), whole.steps.begin(), whole.steps.begin() + 4);
    EXPECT_TRUE(same_bits(rest, whole)) << (beside_training ? "saved beside" : "saved between");
    for (std::size_t i = 0; i < whole.steps.size(); ++i) {
      EXPECT_EQ(rest.steps[i].loss_scale, whole.steps[i].loss_scale) << "step " << i;
      EXPECT_EQ(rest.steps[i].lr, whole.steps[i].lr);
      EXPECT_EQ(rest.steps[i].step, whole.steps[i].step);
    }
    std::filesystem::remove_all(folder.path() / "saves");
  }
}

const Options kOnNvme = {{"place.parameters", "nvme"},
                         {"place.optimizer", "nvme"},
                         {"optim.sub_group_bytes", "8KiB"},
                         {"nvme.optimizer_buffers", "2"}};
const Options kOnHost = {
    {"place.parameters", "host"}, {"place.optimizer", "host"}, {"optim.cpu_share", "0.5"}};

INSTANTIATE_TEST_SUITE_P(
    On, ContinuedTraining,
    ::testing::Values(Continued{"Cpu", RunDevice::kCpu, DType::kFloat32, 3, 24},
                      Continued{"CpuHalf", RunDevice::kCpu, DType::kFloat16, 2},
                      Continued{"CpuNvme", RunDevice::kCpu, DType::kBFloat16, 2, 10, kOnNvme, true},
                      Continued{"Device", RunDevice::kMock, DType::kBFloat16, 2},
                      Continued{"DeviceHost", RunDevice::kMock, DType::kBFloat16, 2, 10, kOnHost},
                      Continued{"DeviceNvme", RunDevice::kMock, DType::kFloat32, 1, 8, kOnNvme,
                                true}),
    [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(
    OnCuda, ContinuedTraining,
    ::testing::Values(Continued{"Resident", RunDevice::kCuda, DType::kBFloat16, 1, 10},
                      Continued{"Host", RunDevice::kCuda, DType::kBFloat16, 1, 10, kOnHost},
                      Continued{"Nvme", RunDevice::kCuda, DType::kBFloat16, 1, 8, kOnNvme, true}),
    [](const auto& info) { return info.param.name; });

TEST(Checkpoint, ASaveBesideTrainingHasTheValuesOfItsBegin) {
  for (const std::int64_t memory : {0, 40 << 10, 64 << 20}) {
    for (const RunDevice device : {RunDevice::kCpu, RunDevice::kMock}) {
      const MemoryDirectory folder;
      RunSettings settings = small_run(2);
      settings.device = device;
      settings.steps = 8;
      if (device == RunDevice::kMock) {
        settings.options = kOnHost;
      }
      train(saving(settings, folder.path() / "between", {3}));
      RunSettings beside = saving(settings, folder.path() / "beside", {3});
      beside.saves.beside_training = true;
      beside.saves.options.memory_bytes = memory;
      const RunOutcome outcome = train(beside);
      ASSERT_EQ(outcome.saved.size(), 1U);
      EXPECT_EQ(outcome.saved[0].failure, "");
      EXPECT_EQ(outcome.saved[0].step, 3);
      EXPECT_TRUE(hold_the_same(folder.path() / "between", folder.path() / "beside"))
          << memory << " bytes";
    }
  }
}

TEST(Checkpoint, ASaveInAnotherPlaceOrTypeLoads) {
  const MemoryDirectory folder;
  const DiskDirectory disk;
  const auto saved = folder.path() / "saves";
  RunSettings settings = small_run(2);
  settings.model.dtype = DType::kBFloat16;
  train(saving(settings, saved, {2}));
  const auto again = folder.path() / "again";
  for (const RunDevice device : {RunDevice::kCpu, RunDevice::kMock}) {
    for (const bool on_nvme : {false, true}) {
      RunSettings other = settings;
      other.device = device;
      other.options = on_nvme ? joined(kOnNvme, nvme_in(disk)) : kOnHost;
      if (device == RunDevice::kCpu && !on_nvme) {
        other.options = {};
      }
      train(saving(loading(other, saved), again, {2}));
      EXPECT_TRUE(hold_the_same(saved, again)) << static_cast<int>(device) << on_nvme;
      std::filesystem::remove_all(again);
    }
  }
  // Through fp32 and back: masters are what counts, and values are masters, rounded.
  RunSettings wide = settings;
  wide.model.dtype = DType::kFloat32;
  train(saving(loading(wide, saved), folder.path() / "wide", {2}));
  train(saving(loading(settings, folder.path() / "wide"), again, {2}));
  EXPECT_TRUE(hold_the_same(saved, again));
}

TEST(Checkpoint, AFailedWriteLeavesTheSavesOfBeforeAndTheTraining) {
  const MemoryDirectory folder;
  RunSettings settings = small_run(2);
  settings.steps = 4;
  const RunOutcome good = train(settings);
  for (const bool beside_training : {false, true}) {
    RunSettings failing = saving(settings, folder.path(), {1, 3});
    failing.saves.beside_training = beside_training;
    failing.saves.fails = true;
    std::atomic<int> num_engines{0};
    failing.wrap_io = [&](std::unique_ptr<tier::IoEngine> inner) {
      auto engine = std::make_unique<FaultEngine>(std::move(inner));
      if (num_engines++ == 0) {  // one rank's disk
        engine->set_nth(IoCall::kWrite, 0, IoFault::kFail);
      }
      return engine;
    };
    const RunOutcome outcome = train(failing);
    ASSERT_EQ(outcome.saved.size(), 2U);
    EXPECT_EQ(outcome.saved[0].path, "");
    EXPECT_NE(outcome.saved[0].failure.find("injected by a test"), std::string::npos)
        << outcome.saved[0].failure;
    EXPECT_EQ(outcome.saved[1].failure, "");
    EXPECT_TRUE(same_bits(outcome, good));
    ASSERT_EQ(checkpoint::list_saves(folder.path().string()).size(), 1U);
    EXPECT_EQ(checkpoint::list_saves(folder.path().string())[0].step, 3);
    for (const std::string& name : names_in(folder.path())) {
      EXPECT_TRUE(name == ".lock" || name.starts_with("save-")) << name;
    }
    std::filesystem::remove_all(outcome.saved[1].path);
  }
}

TEST(Checkpoint, TheNewestFewStay) {
  const MemoryDirectory folder;
  RunSettings settings = saving(small_run(2), folder.path(), {1, 2, 3, 4});
  settings.steps = 4;
  settings.saves.options.keep = 2;
  settings.saves.options.user = {{"data", "7"}};
  train(settings);
  const auto saves = checkpoint::list_saves(folder.path().string());
  ASSERT_EQ(saves.size(), 2U);
  EXPECT_EQ(saves[0].step, 3);
  EXPECT_EQ(saves[1].step, 4);
  for (const std::string& name : names_in(folder.path())) {
    EXPECT_TRUE(name == ".lock" || name.starts_with("save-"))
        << name << ": what was replaced goes before the engine does";
  }
  settings = loading(small_run(1), folder.path());
  settings.steps = 4;
  const RunOutcome outcome = train(settings);
  EXPECT_EQ(outcome.loaded->user, (std::map<std::string, std::string>{{"data", "7"}}));
}

std::string failure_of(const RunSettings& settings) {
  try {
    train(settings);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Checkpoint, OfAnotherModelIsRefusedByNameUnlessPartsWillDo) {
  const MemoryDirectory folder;
  train(saving(small_run(2), folder.path(), {2}));
  RunSettings other = loading(small_run(2), folder.path());
  other.model.layers += 1;
  other.model.vocabulary = 71;
  const std::string text = failure_of(other);
  for (const char* const part : {"tokens.weight", "shape [67", "[71", "--partial"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  other.saves.load_options.partial = true;
  other.steps = 3;
  const RunOutcome outcome = train(other);
  EXPECT_FALSE(outcome.loaded->notes.empty());
  EXPECT_EQ(outcome.steps.size(), 1U);
}

std::vector<std::vector<float>> masters_of(Engine& engine) {
  std::vector<std::vector<float>> masters;
  for (int id = 0; id < engine.num_params(); ++id) {
    const std::span<float> master = engine.optimizer().state(id, "master");
    masters.emplace_back(master.begin(), master.end());
  }
  return masters;
}

// In bf16 its values are others than in fp32, which masters begin with.
struct ThirdsImpl : torch::nn::Module {
  explicit ThirdsImpl(float first) {
    weight = register_parameter("weight", at::arange(1, 36, at::kFloat).view({5, 7}) / 3 + first);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

TEST(Checkpoint, WhatALoadRefusesOrLeavesOutHasTheStatesOfANewModel) {
  const MemoryDirectory folder;
  Config config;
  config.apply_flag("precision=bf16");
  config.apply_flag("log.level=error");
  comm::run_ranks(2, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    Engine saved(runtime);
    const auto saved_unit = saved.unit("kept", std::make_shared<ThirdsImpl>(1));
    const std::vector<std::vector<float>> masters = masters_of(saved);
    saved.save(folder.path().string());
    LoadOptions options;
    for (const bool partial : {false, true}) {
      options.partial = partial;
      Engine engine(runtime);
      const auto kept = engine.unit("kept", std::make_shared<ThirdsImpl>(2));
      const auto added = engine.unit("added", std::make_shared<ThirdsImpl>(3));
      Engine fresh(runtime);
      const auto fresh_kept = fresh.unit("kept", std::make_shared<ThirdsImpl>(2));
      const auto fresh_added = fresh.unit("added", std::make_shared<ThirdsImpl>(3));
      std::vector<std::vector<float>> expected = masters_of(fresh);
      if (partial) {
        engine.load(folder.path().string(), options);
        expected[0] = masters[0];
      } else {
        EXPECT_THROW(engine.load(folder.path().string(), options), ConfigError);
      }
      EXPECT_EQ(masters_of(engine), expected) << partial;
      if (group.rank() == 0) {
        EXPECT_EQ(expected[1][0], 1.0F / 3 + 3) << "not what bf16 makes of it";
      }
    }
  });
}

TEST(Checkpoint, OfAnotherOptimizerIsRefusedByTheNamesOfStates) {
  const MemoryDirectory folder;
  train(saving(small_run(1), folder.path(), {2}));
  RunSettings other = loading(small_run(2), folder.path());
  other.options = {{"optim.kind", "sgd"}, {"optim.momentum", "0.5"}};
  const std::string text = failure_of(other);
  EXPECT_NE(text.find("momentum of"), std::string::npos) << text;
}

void flip_a_bit(const std::filesystem::path& file, std::uint64_t offset) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(offset));
  const char byte = static_cast<char>(stream.get() ^ 4);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.put(byte);
}

// Of this process, in bytes; null: the system does not say.
std::optional<std::int64_t> resident_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) {
      return std::stoll(line.substr(field.size() + 1)) * 1024;
    }
  }
  return std::nullopt;
}

// What `work` takes at its peak beyond what is there.
template <typename Work>
std::int64_t peak_bytes_of(const Work& work) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak is what there is now
  const std::int64_t before = *resident_bytes("VmRSS");
  work();
  return *resident_bytes("VmHWM") - before;
}

TEST(Checkpoint, ASaveAndALoadTakeOneStagingBufferPerRankWhateverTheSize) {
  if (!resident_bytes("VmHWM") || !std::ofstream("/proc/self/clear_refs").is_open()) {
    GTEST_SKIP() << "the system does not tell peaks of memory";
  }
  constexpr int kRanks = 4;
  // Of a save a writer's staging and eight tiles; of a load a reader's staging, and a tile that is
  // converted and copied. The rest is what threads and small objects take.
  constexpr std::int64_t kMostPerRank = 48 << 20;
  const MemoryDirectory folder;
  models::GptOptions model = models::gpt_preset("gpt2-124m");
  model.dtype = DType::kBFloat16;
  Config config;
  config.apply_flag("precision=bf16");
  config.apply_flag("log.level=error");
  comm::run_ranks(kRanks, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    Engine engine(runtime);
    const models::Gpt gpt(model, engine, /*seed=*/0);
    engine.optimizer();  // masters and states are there
    for (const bool loads : {false, true}) {
      group.start_barrier().wait();
      const auto work = [&] {
        if (loads) {
          engine.load(folder.path().string());
        } else {
          engine.save(folder.path().string());
        }
        group.start_barrier().wait();
      };
      if (group.rank() > 0) {
        work();
      } else {
        EXPECT_LE(peak_bytes_of(work), kRanks * kMostPerRank) << (loads ? "load" : "save");
      }
    }
  });
}

struct WideImpl : torch::nn::Module {
  WideImpl() { weight = register_parameter("weight", at::ones({4096, 4096})); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

// Nothing was written before that would tell the disk's rate.
TEST(Checkpoint, TheFirstSaveBesideTrainingSaysHowLongUpdatesWillWait) {
  const MemoryDirectory folder;
  Config config;
  config.apply_flag("log.level=error");
  comm::run_ranks(2, [&](comm::Group& group) {
    Runtime runtime(config, group, {-1, 1});
    Engine engine(runtime);
    const auto unit = engine.unit("w", std::make_shared<WideImpl>());
    engine.backward(unit(at::ones({1, 4096})).pow(2).mean(), 1);
    engine.step();
    SaveOptions options;
    options.memory_bytes = 0;
    const SavePrediction prediction = engine.start_save(folder.path().string(), options);
    EXPECT_EQ(prediction.buffer_bytes, 0);
    EXPECT_GT(prediction.bytes, std::int64_t{4096} * 4096 * 12 / 2);
    ASSERT_TRUE(prediction.stall_s.has_value());
    EXPECT_GE(*prediction.stall_s, 0);
    engine.backward(unit(at::ones({1, 4096})).pow(2).mean(), 1);
    engine.step();
    const std::optional<SaveOutcome> outcome = engine.finish_save();
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->failure, "");
  });
}

TEST(Checkpoint, AFlippedBitIsFoundOnEveryNumberOfRanks) {
  const MemoryDirectory folder;
  train(saving(small_run(2), folder.path(), {1, 2}));
  const auto saves = checkpoint::list_saves(folder.path().string());
  ASSERT_EQ(saves.size(), 2U);
  {
    const CheckpointReader reader(saves[1].path);
    const checkpoint::StoredParam& param = reader.manifest().params[3];
    const checkpoint::Fragment& last = param.tensors.at("exp_avg").fragments.back();
    flip_a_bit(std::filesystem::path(saves[1].path) /
                   reader.manifest().files[static_cast<std::size_t>(last.file)].name,
               last.offset + 5);
  }
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const std::string text = failure_of(loading(small_run(ranks), folder.path()));
    EXPECT_NE(text.find("exp_avg"), std::string::npos) << text;
    EXPECT_NE(text.find("blocks.0"), std::string::npos) << text;
  }
  EXPECT_EQ(failure_of(loading(small_run(3), saves[0].path)), "nothing was thrown");
}

}  // namespace
}  // namespace tessera::testing
