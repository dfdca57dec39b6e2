#include "cli/train_plan.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/flag_values.h"
#include "cli/model_file.h"
#include "cli/output_file.h"
#include "cli/train_batch.h"
#include "cli/train_checkpoint.h"
#include "cli/train_memory.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/device/device_cuda.h"
#include "tessera/device/host_info.h"
#include "tessera/optim/loss_scale.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/schedule.h"

namespace tessera::cli {
namespace {

// More is a slip of the finger, and would overflow products of sizes.
constexpr std::int64_t kMaxDimension = std::int64_t{1} << 24;
constexpr std::int64_t kMaxThreads = 1024;

std::int64_t count_or(std::string_view flag, const std::string& text, std::int64_t otherwise,
                      std::int64_t min, std::int64_t max) {
  return text.empty() ? otherwise : parse_count(flag, text, min, max);
}

DType precision_of(const Config& config) {
  const std::string& name = config.get_string("precision");
  return name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

void apply_memory_flags(const TrainFlags& flags, Config& config) {
  set_from_flag("--host-budget", flags.host_budget, "memory.host", config);
  set_from_flag("--device-budget", flags.device_budget, "memory.device", config);
  set_from_flag("--nvme", flags.nvme, "nvme.paths", config);
  set_from_flag("--nvme-budget", flags.nvme_budget, "memory.nvme", config);
  set_from_flag("--parameters", flags.parameters, "place.parameters", config);
  set_from_flag("--optimizer", flags.optimizer, "place.optimizer", config);
  set_from_flag("--cpu-share", flags.cpu_share, "optim.cpu_share", config);
}

void apply_mesh_flags(const TrainFlags& flags, Config& config) {
  set_from_flag("--shard-size", flags.shard_size, "shard.group_size", config);
  set_from_flag("--hierarchical", flags.hierarchical ? "true" : "", "shard.hierarchical_gather",
                config);
  set_from_flag("--hpz-size", flags.hpz_size, "shard.secondary_group_size", config);
  set_from_flag("--quantize-weights", flags.quantize_weights ? "true" : "", "quant.weights",
                config);
  set_from_flag("--quantize-gradients", flags.quantize_gradients.empty() ? "" : "true",
                "quant.gradients", config);
  set_from_flag("--quantize-gradients", flags.quantize_gradients, "quant.gradient_bits", config);
  set_from_flag("--ranks-per-host", flags.ranks_per_host, "comm.ranks_per_host", config);
}

constexpr const char* kFrozenBits = "quant.frozen_bits";

// Bits of the frozen base where it is held as blocks; 0: in the run's precision, or not frozen.
std::int64_t base_bits(const TrainFlags& flags) {
  return flags.freeze_base == "int8" ? 8 : flags.freeze_base == "int4" ? 4 : 0;
}

bool freezes_base(const TrainFlags& flags) {
  const std::string& how = flags.freeze_base;
  TESSERA_CHECK(how.empty() || how == "none" || how == "full" || how == "int8" || how == "int4",
                ConfigError, "--freeze-base ", tessera::in_quotes(how),
                " is none of none, full, int8, int4");
  return how.empty() ? !flags.adapters.empty() : how != "none";
}

void apply_flags(const TrainFlags& flags, Config& config) {
  if (!flags.freeze_base.empty()) {
    set_from_flag("--freeze-base", std::to_string(base_bits(flags)), kFrozenBits, config);
  }
  set_from_flag("--batch", flags.batch, "batch.total", config);
  set_from_flag("--accumulate", flags.accumulate, "batch.accumulate", config);
  set_from_flag("--precision", flags.precision, "precision", config);
  set_from_flag("--lr", flags.lr, "optim.lr", config);
  set_from_flag("--clip", flags.clip, "grad.clip_norm", config);
  set_from_flag("--seed", flags.seed, "seed", config);
  set_from_flag("--trace", flags.trace, "trace.path", config);
  TESSERA_CHECK(flags.batch.empty() || config.get_int("batch.total") > 0, ConfigError, "--batch ",
                tessera::in_quotes(flags.batch), " holds no sequence; give at least one per rank");
  apply_mesh_flags(flags, config);
  apply_schedule_flags(flags.schedule, config);
}

// Of hosts as the launcher tells of them, where no option does.
comm::Mesh checked_mesh(const Config& config, const comm::Rendezvous& place) {
  const auto given = static_cast<int>(config.get_int("comm.ranks_per_host"));
  const bool are_alike = place.world_size % place.local_world_size == 0;
  return comm::plan_mesh(comm::MeshOptions::from(config, place.world_size,
                                                 given > 0   ? given
                                                 : are_alike ? place.local_world_size
                                                             : 0));
}

// Without what flags add to it.
models::GptOptions model_of_file(const TrainFlags& flags, std::vector<std::string>& notes) {
  TESSERA_CHECK(flags.preset.empty(), ConfigError, "--preset ", tessera::in_quotes(flags.preset),
                " and --model ", tessera::in_quotes(flags.model),
                " are two models; leave one of them out");
  const ModelFile file = read_model_file(flags.model);
  TESSERA_CHECK(file.positions || !flags.sequence.empty(), ConfigError, "--model ",
                tessera::in_quotes(flags.model),
                " does not say the number of positions (n_positions or max_position_embeddings); "
                "give --seq N");
  notes = file.notes;
  models::GptOptions model;
  model.width = file.width;
  model.layers = file.layers;
  model.heads = file.heads;
  model.vocabulary = file.vocabulary;
  model.sequence = file.positions.value_or(0);
  model.tie_head = file.tie_head;
  model.gelu_tanh = file.gelu_tanh;
  return model;
}

models::GptOptions checked_model(const TrainFlags& flags, const Config& config,
                                 std::vector<std::string>& notes) {
  models::GptOptions model =
      flags.model.empty() ? models::gpt_preset(flags.preset.empty() ? kDefaultPreset : flags.preset)
                          : model_of_file(flags, notes);
  model.width = count_or("--width", flags.width, model.width, 1, models::kMaxGptWidth);
  model.heads = count_or("--heads", flags.heads, model.heads, 1, models::kMaxGptWidth);
  model.layers = count_or("--layers", flags.layers, model.layers, 1, models::kMaxGptLayers);
  model.sequence = count_or("--seq", flags.sequence, model.sequence, 1, kMaxDimension);
  model.vocabulary = count_or("--vocab", flags.vocabulary, model.vocabulary, 1, kMaxDimension);
  model.freeze = count_or("--freeze", flags.freeze, 0, 0, kMaxDimension);
  model.adapter_rank = count_or("--adapters", flags.adapters, 0, 1, models::kMaxGptWidth);
  TESSERA_CHECK(model.adapter_rank > 0 || flags.adapter_alpha.empty(), ConfigError,
                "--adapter-alpha scales adapters, and there are none; give --adapters R, too");
  if (model.adapter_rank > 0) {
    model.adapter_alpha = flags.adapter_alpha.empty()
                              ? models::default_adapter_alpha(model.adapter_rank)
                              : parse_positive("--adapter-alpha", flags.adapter_alpha);
  }
  model.freeze_base = freezes_base(flags);
  model.loss_chunk = count_or("--loss-chunk", flags.loss_chunk, 0, 0, kMaxDimension);
  model.recompute = flags.recompute;
  model.tie_head = model.tie_head || flags.tie_head;
  model.dtype = precision_of(config);
  model.check();
  return model;
}

// Its own, or, where there are more ranks than GPUs, the next one in turn.
int gpu_of(int local_rank) { return local_rank % std::max(1, device::num_cuda_devices()); }

void check_device(const TrainPlan& plan, int num_local_ranks) {
  if (plan.cuda_device < 0) {
    return;
  }
  // NCCL refuses ranks that share a GPU. All others let them: they read each other's memory, or
  // pass through the host's.
  const int num_gpus = device::num_cuda_devices();
  const std::string& backend = plan.config.get_string("comm.backend");
  const bool may_share = num_gpus > 0 && backend != "nccl";
  TESSERA_CHECK(may_share || num_local_ranks <= num_gpus, ConfigError,
                "--device cuda needs a GPU for every rank: ", num_local_ranks,
                num_local_ranks == 1 ? " rank" : " ranks", " on this machine, ", num_gpus, " GPU",
                num_gpus == 1 ? "" : "s", "; use fewer ranks, ",
                num_gpus == 0 ? "or --device cpu"
                              : "--device cpu, or let ranks share a GPU: --set comm.backend=ipc");
}

// Every file has its own path: the last one written would otherwise be all that is left.
void check_outputs(const TrainPlan& plan) {
  std::map<std::string, std::string> taken;  // path to flag
  const std::vector<std::pair<const char*, const std::string*>> outputs{
      {"--metrics", &plan.metrics},
      {"--trace", &plan.trace},
      {"--save-init", &plan.save_init},
      {"--save", &plan.save}};
  for (const auto& [flag, path] : outputs) {
    if (path->empty()) {
      continue;
    }
    check_output_file(flag, *path);
    const auto [other, is_new] = taken.emplace(*path, flag);
    TESSERA_CHECK(is_new, ConfigError, flag, " and ", other->second, " both name ",
                  tessera::in_quotes(*path), "; give each its own file");
  }
}

// What --verify compares, and what --unsharded trains, begins with initial values and is not saved.
void check_whole_run(const TrainPlan& plan) {
  const char* const flag = plan.checkpoint     ? "--checkpoint"
                           : plan.stop_after_s ? "--stop-after"
                                               : "";
  TESSERA_CHECK(!plan.verify || *flag == '\0', ConfigError,
                "--verify compares a whole run with "
                "unsharded training; leave ",
                flag, " out");
  TESSERA_CHECK(!plan.unsharded || !plan.checkpoint, ConfigError,
                "--checkpoint saves what is sharded, and --unsharded shards nothing; leave one of "
                "them out (--ranks 1 trains the same bits)");
}

// Contradictions that the parts of the engine would find, but only once the ranks have met.
void check_training_options(const TrainPlan& plan) {
  plan.config.check();
  static_cast<void>(optim::RuleOptions::from(plan.config));
  static_cast<void>(optim::LossScaleOptions::from(plan.config, DType::kFloat16));
  static_cast<void>(optim::ScheduleOptions::from(plan.config, plan.schedule_steps));
  static_cast<void>(coordinator::CoordinatorOptions::from(plan.config));
}

}  // namespace

std::string preset_names_text() {
  const std::vector<std::string_view> names = models::gpt_preset_names();
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += i == 0 ? "" : i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

std::string model_name(const TrainFlags& flags) {
  std::string name = !flags.model.empty()   ? printable(flags.model, 60)
                     : flags.preset.empty() ? kDefaultPreset
                                            : flags.preset;
  const std::vector<std::pair<const char*, const std::string*>> changes{{"width ", &flags.width},
                                                                        {"heads ", &flags.heads}};
  for (const auto& [what, value] : changes) {
    if (!value->empty()) {
      name.append(", ").append(what).append(*value);
    }
  }
  return name;
}

TrainPlan checked_plan(const TrainFlags& flags, const comm::Rendezvous& place, PlanFor purpose) {
  TrainPlan plan;
  plan.config = load_config(flags.config);
  apply_memory_flags(flags, plan.config);
  apply_flags(flags, plan.config);
  plan.preset = model_name(flags);
  plan.model = checked_model(flags, plan.config, plan.notes);
  plan.frozen_bits = plan.config.get_int(kFrozenBits);
  plan.seed = static_cast<std::uint64_t>(plan.config.get_int("seed"));

  plan.verify = !flags.verify.empty();
  plan.unsharded = flags.unsharded;
  plan.deterministic = flags.deterministic;
  TESSERA_CHECK(!plan.verify || !plan.unsharded, ConfigError,
                "--verify compares sharded with unsharded training; leave --unsharded out");
  plan.verify_against = parse_against(flags.verify_against);
  TESSERA_CHECK(plan.verify || flags.verify_against.empty(), ConfigError,
                "--verify-against says what --verify N compares with; give --verify, too");
  TESSERA_CHECK(!plan.unsharded || place.world_size == 1, ConfigError,
                "--unsharded trains in one process, not in ", place.world_size,
                " ranks; leave --unsharded out, or use --ranks 1");
  plan.stop_on_divergence = flags.stop_on_divergence;
  if (!flags.stop_after.empty()) {
    plan.stop_after_s = parse_duration("--stop-after", flags.stop_after);
  }
  plan.checkpoint = checked_checkpoint_plan(flags.checkpoint);
  check_whole_run(plan);

  TESSERA_CHECK(flags.device.empty() || flags.device == "cpu" || flags.device == "cuda",
                ConfigError, "--device ", tessera::in_quotes(flags.device), " is not cpu or cuda");
  plan.cuda_device = flags.device == "cuda" ? gpu_of(place.local_rank) : -1;
  const int share = threads_per_rank(device::read_host_cores().usable(), place.local_world_size);
  plan.num_threads = static_cast<int>(count_or("--threads", flags.threads, share, 1, kMaxThreads));
  check_device(plan, purpose == PlanFor::kTraining ? place.local_world_size : 0);
  const int num_gpus = std::max(1, device::num_cuda_devices());
  plan.ranks_per_gpu = (place.local_world_size + num_gpus - 1) / num_gpus;

  plan.mesh = checked_mesh(plan.config, place);
  plan.batch = resolve_batch(plan.config, place.world_size, kDefaultBatch);
  plan_data(flags, plan);
  // A run that is verified first keeps its flags, and with them its learning rates.
  const std::int64_t num_verified = count_or("--verify", flags.verify, 0, 1, kMaxSteps);
  plan.schedule_steps = plan.num_epochs > 0
                            ? plan.num_epochs * (plan.sequences_per_epoch / plan.batch.total)
                            : count_or("--steps", flags.steps,
                                       plan.verify ? num_verified : kDefaultSteps, 1, kMaxSteps);
  plan.num_steps = plan.verify ? num_verified : plan.schedule_steps;
  check_training_options(plan);
  plan.memory = plan_memory(plan.config, plan.model, plan.mesh, plan.cuda_device >= 0);
  TESSERA_CHECK(
      !plan.memory || !plan.unsharded, ConfigError,
      "--unsharded takes what memory it needs, and no budget, place or NVMe; leave one of "
      "them out");
  plan.log_every = count_or("--log-every", flags.log_every, 0, 1, kMaxSteps);
  if (!flags.peak_tflops.empty()) {
    plan.peak_flops = parse_positive("--peak-tflops", flags.peak_tflops) * 1e12;
  }
  plan.init = flags.init;
  plan.metrics = flags.metrics;
  plan.tensorboard = flags.tensorboard;
  plan.trace = plan.config.get_string("trace.path");
  plan.save_init = flags.save_init;
  plan.save = flags.save;
  check_outputs(plan);
  if (!plan.tensorboard.empty()) {
    check_output_directory("--tensorboard", plan.tensorboard);
  }
  if (plan.checkpoint && purpose == PlanFor::kTraining) {
    plan.resume = find_resume_point(*plan.checkpoint);
  }
  return plan;
}

std::shared_ptr<const models::InitialWeights> open_initial_weights(const TrainPlan& plan) {
  return plan.init.empty() || plan.resume ? nullptr : models::open_weights(plan.init, plan.model);
}

void check_training(const TrainFlags& flags, int num_local_ranks) {
  comm::Rendezvous place;
  place.world_size = num_local_ranks;
  place.local_world_size = num_local_ranks;
  const TrainPlan plan = checked_plan(flags, place);
  check_machine(plan, num_local_ranks);
  const std::unique_ptr<models::TokenSource> data = models::open_data(plan.data);
  check_resume(plan, *data);
  static_cast<void>(open_initial_weights(plan));
  if (plan.evaluation) {
    static_cast<void>(models::open_data(plan.evaluation->data));
  }
}

}  // namespace tessera::cli
