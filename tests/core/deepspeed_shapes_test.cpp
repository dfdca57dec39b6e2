// Files as their users have them (tests/core/deepspeed): accepted in few words with the options
// that they mean, or refused in one line.
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using Lines = std::vector<std::string>;

std::filesystem::path shapes(const char* folder) {
  return std::filesystem::path(TESSERA_SOURCE_DIR) / "tests/core/deepspeed" / folder;
}

std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(shapes(folder))) {
    names.insert(entry.path().stem().string());
  }
  return names;
}

Config read_shape(const char* folder, const std::string& name) {
  return Config::from_file((shapes(folder) / (name + ".json")).string());
}

// "name = value" of every option that differs from its default and that the file really gave.
Lines given_options(const Config& config) {
  Lines lines;
  std::string text = config.describe();
  while (!text.empty()) {
    const std::string line = text.substr(0, text.find('\n'));
    text.erase(0, line.size() + 1);
    if (line.find(" not given") == std::string::npos) {
      lines.push_back(line.substr(0, line.find("  (")));
    }
  }
  return lines;
}

struct Shape {
  Lines options;
  Lines unread = {};
};

const std::map<std::string, Shape>& accepted_shapes() {
  static const std::map<std::string, Shape> shapes = {
      {"zero3_all_auto",
       {{"live.limit_bytes = 4GB", "live.reuse_distance_bytes = 4GB", "place.parameters = host",
         "place.optimizer = host", "optim.sub_group_bytes = 4GB",
         "schedule.deepspeed_timing = true"}}},
      {"zero3_nvme",
       {{"precision = bf16", "batch.micro_per_rank = 1", "prefetch.bucket_bytes = 1887436B",
         "persist.param_bytes = 20KiB", "grad.bucket_bytes = 2MiB", "place.parameters = nvme",
         "place.optimizer = nvme", "place.parameters_host_bytes = 2GB",
         "nvme.paths = [\"/local_nvme\"]", "nvme.block_bytes = 256KiB", "nvme.queue_depth = 32",
         "nvme.threads = 1", "nvme.parameter_buffers = 5", "nvme.parameter_buffer_bytes = 200MB",
         "nvme.optimizer_buffers = 4", "optim.sub_group_bytes = 4GB"}}},
      {"zero3_plain", {{}}},
      {"fp16_every_key",
       {{"precision = fp16", "grad.wire_dtype = fp16", "grad.clip_norm = 0.5",
         "loss_scale.initial = 4096", "loss_scale.window = 500", "loss_scale.hysteresis = 3",
         "loss_scale.min = 2"}}},
      {"bf16_with_loss_scale_keys", {{"precision = bf16"}}},
      {"warmup_decay",
       {{"optim.lr = 3e-05", "optim.beta1 = 0.8", "optim.weight_decay = 3e-07",
         "schedule.kind = linear", "schedule.warmup_steps = 500",
         "schedule.warmup_start_lr = 1e-06", "schedule.final_lr = 1e-06",
         "schedule.deepspeed_timing = true"}}},
      {"warmup_cosine",
       {{"optim.lr = 2e-04", "schedule.kind = cosine", "schedule.warmup_steps = 100",
         "schedule.warmup_shape = log", "schedule.warmup_start_lr = 2e-05",
         "schedule.total_steps = 10000", "schedule.final_lr = 1e-05", "schedule.first_step = 200",
         "schedule.deepspeed_timing = true"}}},
      {"one_cycle",
       {{"optim.lr = 0.01", "schedule.kind = one_cycle", "schedule.warmup_start_lr = 1e-05",
         "schedule.cycle_up_steps = 1000", "schedule.cycle_down_steps = 900",
         "schedule.cycle_up_stairs = 500", "schedule.cycle_down_stairs = 450",
         "schedule.decay_steps = 1000", "schedule.decay_rate = 0.001"}}},
      {"lr_range_test",
       {{"optim.kind = sgd", "optim.lr = 0.1", "optim.momentum = 0.9", "schedule.kind = range_test",
         "schedule.warmup_start_lr = 1e-04", "schedule.range_steps = 200",
         "schedule.range_rate = 5", "schedule.range_staircase = true"}}},
      {"monitors", {{"batch.total = 16", "batch.micro_per_rank = 4", "batch.accumulate = 2"}}},
      {"old_names",
       {{"precision = bf16", "prefetch.bucket_bytes = 20MB", "live.limit_bytes = 1GB",
         "place.parameters = host", "place.optimizer = host"}}},
      {"tiny_sizes",
       {{"prefetch.bucket_bytes = 4B", "live.limit_bytes = 4B", "live.reuse_distance_bytes = 0B",
         "grad.bucket_bytes = 1MiB", "optim.sub_group_bytes = 1MiB"}}},
      {"not_built_yet",
       {{"shard.secondary_group_size = 8", "quant.weights = true", "quant.gradients = true"},
        {"shard.secondary_group_size", "quant.weights", "quant.gradients"}}},
      {"mixture_of_experts",
       {{"unit.leaf_types = [\"MixtralSparseMoeBlock\"]", "unit.leaf_names = [\"experts\"]",
         "unit.leaf_name_suffixes = [\"mlp.experts\"]"}}},
      {"every_subject",
       {{"precision = bf16", "batch.total = 32", "quant.weights = true", "grad.bucket_bytes = 10MB",
         "grad.wire_dtype = fp32", "grad.clip_norm = 0.3", "place.parameters = host",
         "place.optimizer = nvme", "nvme.paths = [\"/nvme\"]", "nvme.block_bytes = 1MiB",
         "nvme.queue_depth = 8", "nvme.threads = 2", "optim.kind = lion", "optim.lr = 2e-04",
         "optim.beta2 = 0.98", "optim.weight_decay = 0.1", "optim.cpu_share = 1",
         "schedule.deepspeed_timing = true"},
        {"quant.weights"}}},
  };
  return shapes;
}

TEST(DeepSpeedShapes, EveryAcceptedFileGivesTheOptionsThatItMeans) {
  std::set<std::string> tested;
  for (const auto& [name, shape] : accepted_shapes()) {
    SCOPED_TRACE(name);
    tested.insert(name);
    const Config config = read_shape("accepted", name);
    EXPECT_NO_THROW(config.check());
    EXPECT_EQ(given_options(config), shape.options);
  }
  EXPECT_EQ(tested, names_in("accepted")) << "every file of the folder is tested";
}

// Beside these a run may say one line of options that are not built yet, and one of the schedule.
TEST(DeepSpeedShapes, AFileIsSummedUpInAtMostEightLines) {
  for (const auto& [name, shape] : accepted_shapes()) {
    const Lines notices = read_shape("accepted", name).notices();
    EXPECT_GE(notices.size(), 2U) << name;
    EXPECT_LE(notices.size(), 8U) << name << "\n" << ::testing::PrintToString(notices);
  }
}

TEST(DeepSpeedShapes, OnlyWhatTheFileAsksForCanBeMissing) {
  for (const auto& [name, shape] : accepted_shapes()) {
    Lines unread;
    for (const std::string& each : read_shape("accepted", name).unread()) {
      unread.push_back(each.substr(0, each.find(" (")));
    }
    EXPECT_EQ(unread, shape.unread) << name;
  }
}

TEST(DeepSpeedShapes, EveryRefusedFileSaysWhyInOneLine) {
  const std::map<std::string, std::string> messages = {
      {"unknown_key",
       ": zero_optimization.stage3_prefetch_bucket_sise: unknown key; did you mean "
       "zero_optimization.stage3_prefetch_bucket_size?"},
      {"one_cycle_momentum",
       ": scheduler.params.cycle_momentum is not given, which means true: OneCycle changes the "
       "learning rate alone here, not the betas; set it to false"},
      {"unknown_scheduler",
       ": scheduler.type = \"CosineAnnealing\": expected WarmupLR, WarmupDecayLR, WarmupCosineLR, "
       "OneCycle or LRRangeTest"},
      {"wrong_parameter",
       ": scheduler.params.cos_min_ratio: WarmupLR has no such parameter; it has warmup_min_lr, "
       "warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration"},
      {"stage_2",
       ": zero_optimization.stage = 2: Tessera always shards everything; set it to 3 or remove "
       "it"},
      {"both_precisions", ": fp16.enabled and bf16.enabled are both true; choose one"},
      {"curriculum",
       ": curriculum_learning: not supported: it is not supported; remove it or set enabled to "
       "false"},
      {"batches_that_contradict",
       "batch.total = 10 (FILE: train_batch_size) is not a multiple of batch.accumulate = 3 "
       "(FILE: gradient_accumulation_steps)"},
      {"nvme_without_path",
       ": zero_optimization.offload_param.device = \"nvme\": nvme_path is missing; give a "
       "directory on the disk"},
  };
  std::set<std::string> tested;
  for (const auto& [name, message] : messages) {
    tested.insert(name);
    const std::string path = (shapes("refused") / (name + ".json")).string();
    std::string said = "accepted";
    try {
      Config::from_file(path).check();
    } catch (const ConfigError& error) {
      said = error.what();
    }
    std::string expected = message.starts_with(":") ? path + message : message;
    for (auto at = expected.find("FILE"); at != std::string::npos; at = expected.find("FILE")) {
      expected.replace(at, 4, path);
    }
    EXPECT_EQ(said, expected) << name;
  }
  EXPECT_EQ(tested, names_in("refused")) << "every file of the folder is tested";
}

}  // namespace
}  // namespace tessera
