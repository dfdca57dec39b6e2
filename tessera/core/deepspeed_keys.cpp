#include "tessera/core/deepspeed_keys.h"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

using Meaning = DeepSpeedMeaning;
using Type = OptionType;

constexpr DeepSpeedKey same(std::string_view path, std::string_view option,
                            std::string_view default_text = "", std::string_view alias = "",
                            std::string_view note = "") {
  return {path, alias, Meaning::kSame, Type::kString, option, default_text, note};
}
constexpr DeepSpeedKey elements(std::string_view path, std::string_view option,
                                std::string_view default_text, std::string_view alias = "",
                                Meaning meaning = Meaning::kElements,
                                std::int64_t least_bytes = 0) {
  return {path, alias, meaning, Type::kInt, option, default_text, "", least_bytes};
}
constexpr DeepSpeedKey renamed(std::string_view path, std::string_view option,
                               std::string_view default_text, std::string_view names) {
  return {path, "", Meaning::kRenamed, Type::kString, option, default_text, names};
}
constexpr DeepSpeedKey not_needed(std::string_view path, Type type, std::string_view why,
                                  std::string_view alias = "") {
  return {path, alias, Meaning::kNotNeeded, type, "", "", why};
}
constexpr DeepSpeedKey fixed(std::string_view path, Type type, std::string_view value,
                             std::string_view why) {
  return {path, "", Meaning::kFixed, type, "", value, why};
}
constexpr DeepSpeedKey special(std::string_view path, Type type, std::string_view option,
                               std::string_view what) {
  return {path, "", Meaning::kSpecial, type, option, "", what};
}
constexpr DeepSpeedKey elsewhere(std::string_view path, std::string_view what) {
  return {path, "", Meaning::kElsewhere, Type::kBool, "", "", what};
}
constexpr DeepSpeedKey foreign(std::string_view path, std::string_view why) {
  return {path, "", Meaning::kForeign, Type::kBool, "", "", why};
}

// Below this, calls and requests cost more than the bytes they move.
constexpr std::int64_t kLeastBytes = std::int64_t{1} << 20;

constexpr std::string_view kDevices = "none=device,cpu=host,nvme=nvme";
constexpr std::string_view kDTypes =
    "fp32=fp32,float32=fp32,torch.float32=fp32,float=fp32,bf16=bf16,bfp16=bf16,bfloat16=bf16,"
    "torch.bfloat16=bf16,fp16=fp16,float16=fp16,torch.float16=fp16,half=fp16";
constexpr std::string_view kStage12 = "it concerns stages 1 and 2 only";
constexpr std::string_view kDirect = "a gather writes straight into the parameter's own memory";
constexpr std::string_view kAnyRanks = "checkpoints do not depend on the number of ranks";
constexpr std::string_view kUniversal =
    "checkpoints do not depend on the number of ranks; universal ones cannot be imported";
constexpr std::string_view kPinned =
    "host memory is pinned where a GPU reads or writes it, and nowhere else";
constexpr std::string_view kNoScale = "bf16 has the range of fp32 and needs no loss scale";
constexpr std::string_view kMetrics = "`tessera train --metrics FILE`";
constexpr std::string_view kTrace = "`tessera train --trace FILE`";
constexpr std::string_view kFp32States =
    "master weights, summed gradients and moments are always fp32";
constexpr std::string_view kGradMean = "gradients are averaged once, exactly, by token count";

constexpr std::array kKeys = {
    // 1.1 zero_optimization
    special("zero_optimization", Type::kBool, "", "legacy: true is stage 1, false is stage 0"),
    special("zero_optimization.stage", Type::kInt, "", "3, or absent; Tessera shards everything"),
    not_needed("zero_optimization.contiguous_gradients", Type::kBool,
               "gradients always go through one bucket buffer"),
    not_needed("zero_optimization.reduce_scatter", Type::kBool,
               "gradients are always reduce-scattered; the sum is the same"),
    elements("zero_optimization.reduce_bucket_size", "grad.bucket_bytes", "5e8", "",
             Meaning::kElements, kLeastBytes),
    not_needed("zero_optimization.allgather_partitions", Type::kBool, kStage12),
    not_needed("zero_optimization.allgather_bucket_size", Type::kInt, kStage12),
    not_needed("zero_optimization.use_multi_rank_bucket_allreduce", Type::kBool, kStage12),
    not_needed("zero_optimization.round_robin_gradients", Type::kBool, kStage12),
    not_needed("zero_optimization.ignore_unused_parameters", Type::kBool, kStage12),
    fixed("zero_optimization.legacy_stage1", Type::kBool, "false", "DeepSpeed removed it"),
    not_needed("zero_optimization.overlap_comm", Type::kBool,
               "communication always overlaps with compute"),
    not_needed("zero_optimization.load_from_fp32_weights", Type::kBool,
               "master weights are restored wherever a checkpoint has them"),
    not_needed("zero_optimization.elastic_checkpoint", Type::kBool, kAnyRanks),
    foreign("zero_optimization.zenflow", "ZenFlow is not supported"),
    elements("zero_optimization.sub_group_size", "optim.sub_group_bytes", "1e9", "",
             Meaning::kMasterElements, kLeastBytes),
    elements("zero_optimization.stage3_prefetch_bucket_size", "prefetch.bucket_bytes", "5e7",
             "prefetch_bucket_size"),
    elements("zero_optimization.stage3_param_persistence_threshold", "persist.param_bytes", "1e5",
             "param_persistence_threshold"),
    elements("zero_optimization.stage3_model_persistence_threshold", "persist.model_bytes",
             "9223372036854775807", "model_persistence_threshold"),
    elements("zero_optimization.stage3_max_live_parameters", "live.limit_bytes", "1e9",
             "max_live_parameters"),
    elements("zero_optimization.stage3_max_reuse_distance", "live.reuse_distance_bytes", "1e9",
             "max_reuse_distance"),
    not_needed("zero_optimization.stage3_gather_16bit_weights_on_model_save", Type::kBool,
               "an export gathers unit by unit without a switch",
               "gather_16bit_weights_on_model_save"),
    special("zero_optimization.stage3_gather_fp16_weights_on_model_save", Type::kBool, "",
            "deprecated: stage3_gather_16bit_weights_on_model_save"),
    same("zero_optimization.stage3_module_granularity_threshold", "unit.leaf_below_numel", "0",
         "module_granularity_threshold"),
    not_needed("zero_optimization.stage3_use_all_reduce_for_fetch_params", Type::kBool, kDirect,
               "use_all_reduce_for_fetch_params"),
    not_needed("zero_optimization.stage3_allgather_sequential", Type::kBool, kDirect,
               "allgather_sequential"),
    same("zero_optimization.zero_hpz_partition_size", "shard.secondary_group_size", "1"),
    same("zero_optimization.zero_quantized_weights", "quant.weights", "false"),
    special("zero_optimization.zero_quantized_nontrainable_weights", Type::kBool,
            "quant.frozen_bits", "true becomes 8"),
    same("zero_optimization.zero_quantized_gradients", "quant.gradients", "false"),
    same("zero_optimization.zeropp_loco_param.err_beta", "quant.error_beta"),
    same("zero_optimization.zeropp_loco_param.reset_T", "quant.error_reset_steps"),
    special("zero_optimization.mics_shard_size", Type::kInt, "shard.group_size",
            "-1 (no MiCS) becomes 0"),
    same("zero_optimization.mics_hierarchical_params_gather", "shard.hierarchical_gather", "false",
         "", "also without mics_shard_size"),
    not_needed("zero_optimization.memory_efficient_linear", Type::kBool,
               "a released weight is never kept alive by autograd"),
    not_needed("zero_optimization.pipeline_loading_checkpoint", Type::kBool,
               "each rank reads only its own bytes"),
    not_needed("zero_optimization.override_module_apply", Type::kBool, "modules are not patched"),
    not_needed("zero_optimization.log_trace_cache_warnings", Type::kBool,
               "a dropped trace is always logged"),
    not_needed("zero_optimization.enable_sanity_checks", Type::kBool,
               "ranks compare every collective, always"),
    fixed("zero_optimization.save_muon_momentum_buffer_in_memory", Type::kBool, "false",
          "Muon is not supported"),
    special("zero_optimization.cpu_offload", Type::kBool, "place.optimizer",
            "deprecated: offload_optimizer"),
    special("zero_optimization.cpu_offload_param", Type::kBool, "place.parameters",
            "deprecated: offload_param"),
    not_needed("zero_optimization.cpu_offload_use_pin_memory", Type::kBool,
               "deprecated; DeepSpeed ignores it too"),
    same("zero_optimization.leaf_module.classes", "unit.leaf_types"),
    same("zero_optimization.leaf_module.names", "unit.leaf_names"),
    same("zero_optimization.leaf_module.name_suffixes", "unit.leaf_name_suffixes"),

    // 1.2 offload_param
    renamed("zero_optimization.offload_param.device", "place.parameters", "none", kDevices),
    special("zero_optimization.offload_param.nvme_path", Type::kString, "nvme.paths",
            "one of the directories"),
    same("zero_optimization.offload_param.buffer_count", "nvme.parameter_buffers", "5"),
    elements("zero_optimization.offload_param.buffer_size", "nvme.parameter_buffer_bytes", "1e8"),
    elements("zero_optimization.offload_param.max_in_cpu", "place.parameters_host_bytes", "1e9"),
    not_needed("zero_optimization.offload_param.pin_memory", Type::kBool, kPinned),

    // 1.3 offload_optimizer
    renamed("zero_optimization.offload_optimizer.device", "place.optimizer", "none", kDevices),
    special("zero_optimization.offload_optimizer.nvme_path", Type::kString, "nvme.paths",
            "one of the directories"),
    same("zero_optimization.offload_optimizer.buffer_count", "nvme.optimizer_buffers", "4"),
    not_needed("zero_optimization.offload_optimizer.pin_memory", Type::kBool, kPinned),
    same("zero_optimization.offload_optimizer.pipeline_read", "nvme.pipeline_read", "false"),
    same("zero_optimization.offload_optimizer.pipeline_write", "nvme.pipeline_write", "false"),
    not_needed("zero_optimization.offload_optimizer.pipeline", Type::kBool,
               "reads and writes overlap with the update"),
    not_needed("zero_optimization.offload_optimizer.buffer_size", Type::kInt,
               "buffers have the size of a sub-group"),
    not_needed("zero_optimization.offload_optimizer.fast_init", Type::kBool,
               "states are written once, from the shards"),
    // DeepSpeed's 1.0 is not taken over: who updates changes no number, and the share that is
    // measured is never slower.
    same("zero_optimization.offload_optimizer.ratio", "optim.cpu_share"),
    fixed("zero_optimization.offload_optimizer.super_offload", Type::kBool, "false",
          "the update is split by optim.cpu_share instead"),
    not_needed("zero_optimization.offload_optimizer.cpuadam_cores_perc", Type::kDouble,
               "it belongs to super_offload"),

    // 1.4 aio
    same("aio.block_size", "nvme.block_bytes", "1048576"),
    same("aio.queue_depth", "nvme.queue_depth", "8"),
    same("aio.intra_op_parallelism", "nvme.threads", "1", "thread_count"),
    not_needed("aio.single_submit", Type::kBool, "requests are submitted in batches"),
    not_needed("aio.overlap_events", Type::kBool, "the queue is always kept full"),
    fixed("aio.use_gds", Type::kBool, "false", "GPUDirect Storage is not supported"),

    // 1.6 top-level keys
    same("train_batch_size", "batch.total"),
    same("train_micro_batch_size_per_gpu", "batch.micro_per_rank"),
    same("gradient_accumulation_steps", "batch.accumulate"),
    fixed("managed_gradient_accumulation", Type::kBool, "true",
          "the engine counts micro-batches itself"),
    same("gradient_clipping", "grad.clip_norm"),
    fixed("prescale_gradients", Type::kBool, "false", kGradMean),
    fixed("gradient_predivide_factor", Type::kDouble, "1.0", kGradMean),
    fixed("gradient_allreduce_op", Type::kString, "mean", kGradMean),
    renamed("communication_data_type", "grad.wire_dtype", "", kDTypes),
    special("data_types.grad_accum_dtype", Type::kString, "",
            "only fp32 or null: gradients of micro-batches are summed in fp32"),
    special("fp16.enabled", Type::kBool, "precision", "precision = fp16"),
    same("fp16.loss_scale", "loss_scale.fixed", "0"),
    special("fp16.initial_scale_power", Type::kInt, "loss_scale.initial", "2 to this power"),
    same("fp16.loss_scale_window", "loss_scale.window", "1000"),
    same("fp16.hysteresis", "loss_scale.hysteresis", "2"),
    same("fp16.consecutive_hysteresis", "loss_scale.consecutive_hysteresis", "false"),
    same("fp16.min_loss_scale", "loss_scale.min", "1"),
    fixed("fp16.fp16_master_weights_and_grads", Type::kBool, "false", kFp32States),
    not_needed("fp16.auto_cast", Type::kBool, "inputs are tokens, or given in the model's type"),
    special("bf16.enabled", Type::kBool, "precision", "precision = bf16"),
    same("bf16.check_grad_overflow", "grad.skip_nonfinite", "true"),
    fixed("bf16.bf16_master_weights_and_grads", Type::kBool, "false", kFp32States),
    fixed("bf16.bf16_optimizer_states", Type::kBool, "false", kFp32States),
    not_needed("bf16.immediate_grad_update", Type::kBool,
               "a gradient is reduced as soon as its bucket is full"),
    not_needed("bf16.loss_scale", Type::kDouble, kNoScale),
    not_needed("bf16.initial_scale_power", Type::kDouble, kNoScale),
    not_needed("bf16.loss_scale_window", Type::kDouble, kNoScale),
    not_needed("bf16.hysteresis", Type::kDouble, kNoScale),
    not_needed("bf16.min_loss_scale", Type::kDouble, kNoScale),
    not_needed("bf16.auto_cast", Type::kBool, "inputs are tokens, or given in the model's type"),
    not_needed("zero_allow_untested_optimizer", Type::kBool, "every optimizer here is tested"),
    not_needed("zero_force_ds_cpu_optimizer", Type::kBool, "there is one update kernel"),
    not_needed("checkpoint.load_universal", Type::kBool, kUniversal),
    fixed("checkpoint.use_node_local_storage", Type::kBool, "false",
          "a checkpoint is one directory that all ranks see"),
    not_needed("checkpoint.tag_validation", Type::kString,
               "a checkpoint is committed by all ranks or not at all"),

    // Optimizer and schedule
    special("optimizer.type", Type::kString, "optim.kind", "Adam, AdamW, SGD or Lion"),
    special("optimizer.params.lr", Type::kDouble, "optim.lr",
            "the learning rate, unless the scheduler has a largest one of its own"),
    same("optimizer.params.betas[0]", "optim.beta1"),
    same("optimizer.params.betas[1]", "optim.beta2"),
    same("optimizer.params.eps", "optim.eps"),
    same("optimizer.params.weight_decay", "optim.weight_decay"),
    same("optimizer.params.momentum", "optim.momentum"),
    special("optimizer.params.adam_w_mode", Type::kBool, "optim.kind",
            "false with type Adam: optim.kind = adam"),
    not_needed("optimizer.legacy_fusion", Type::kBool, "there is one update kernel"),
    not_needed("optimizer.params.torch_adam", Type::kBool, "there is one update kernel"),
    not_needed("optimizer.params.fused", Type::kBool, "there is one update kernel"),
    fixed("optimizer.params.bias_correction", Type::kBool, "true", "moments are always corrected"),
    fixed("optimizer.params.amsgrad", Type::kBool, "false", "AMSGrad is not supported"),
    special("scheduler.type", Type::kString, "schedule.kind",
            "WarmupLR: constant, WarmupDecayLR: linear, WarmupCosineLR: cosine, OneCycle: "
            "one_cycle, LRRangeTest: range_test; Warmup* also set schedule.deepspeed_timing"),
    special("scheduler.params.last_batch_iteration", Type::kInt, "schedule.first_step",
            "one more than this"),
    same("scheduler.params.warmup_min_lr", "schedule.warmup_start_lr", "", "",
         "of WarmupDecayLR also schedule.final_lr"),
    special("scheduler.params.warmup_max_lr", Type::kDouble, "optim.lr", "the learning rate"),
    special("scheduler.params.warmup_num_steps", Type::kInt, "schedule.warmup_steps",
            "1 becomes 2; not given: 1000, or a tenth of a shorter run"),
    same("scheduler.params.warmup_type", "schedule.warmup_shape", "", "", "not given: log"),
    same("scheduler.params.total_num_steps", "schedule.total_steps", "", "",
         "not given: the steps of the run"),
    special("scheduler.params.warmup_min_ratio", Type::kDouble, "schedule.warmup_start_lr",
            "times the learning rate"),
    special("scheduler.params.cos_min_ratio", Type::kDouble, "schedule.final_lr",
            "times the learning rate; not given: 0.0001"),
    same("scheduler.params.cycle_min_lr", "schedule.warmup_start_lr"),
    special("scheduler.params.cycle_max_lr", Type::kDouble, "optim.lr", "the learning rate"),
    same("scheduler.params.cycle_first_step_size", "schedule.cycle_up_steps"),
    same("scheduler.params.cycle_second_step_size", "schedule.cycle_down_steps"),
    same("scheduler.params.cycle_first_stair_count", "schedule.cycle_up_stairs"),
    same("scheduler.params.cycle_second_stair_count", "schedule.cycle_down_stairs", "", "",
         "not given: as many as up"),
    same("scheduler.params.decay_step_size", "schedule.decay_steps"),
    same("scheduler.params.decay_lr_rate", "schedule.decay_rate"),
    not_needed("scheduler.params.cycle_momentum", Type::kBool,
               "momentum is not cycled; only false, unless the optimizer is SGD"),
    not_needed("scheduler.params.cycle_min_mom", Type::kDouble, "it belongs to cycle_momentum"),
    not_needed("scheduler.params.cycle_max_mom", Type::kDouble, "it belongs to cycle_momentum"),
    not_needed("scheduler.params.decay_mom_rate", Type::kDouble, "it belongs to cycle_momentum"),
    same("scheduler.params.lr_range_test_min_lr", "schedule.warmup_start_lr", "", "",
         "not given: 0.001"),
    same("scheduler.params.lr_range_test_step_size", "schedule.range_steps"),
    same("scheduler.params.lr_range_test_step_rate", "schedule.range_rate"),
    same("scheduler.params.lr_range_test_staircase", "schedule.range_staircase"),

    // Watching a run
    not_needed("steps_per_print", Type::kDouble, "the trainer prints one line per step"),
    not_needed("dump_state", Type::kBool, "effective options are printed at start"),
    elsewhere("wall_clock_breakdown", kTrace),
    elsewhere("memory_breakdown", kMetrics),
    elsewhere("timers", kMetrics),
    elsewhere("flops_profiler", kTrace),
    elsewhere("comms_logger", kMetrics),
    elsewhere("tensorboard", "`tessera train --tensorboard DIR`"),
    elsewhere("wandb", kMetrics),
    elsewhere("comet", kMetrics),
    elsewhere("csv_monitor", kMetrics),
    elsewhere("activation_checkpointing", "`tessera train --recompute`, or per unit in code"),
    elsewhere("autotuning", "memory budgets (memory.device, memory.host, memory.nvme)"),

    // Weight-only quantisation
    special("weight_quantization.quantized_initialization.num_bits", Type::kInt,
            "quant.frozen_bits", "of frozen weights, and of no others"),
    same("weight_quantization.quantized_initialization.group_size", "quant.block_numel"),
    fixed("weight_quantization.quantized_initialization.group_dim", Type::kInt, "1",
          "weights that share a scale lie behind each other in memory"),
    special("weight_quantization.quantized_initialization.symmetric", Type::kBool, "",
            "false is DeepSpeed's form; blocks have a scale and no offset here, so values differ"),
    special("weight_quantization.post_init_quant", Type::kBool, "quant.frozen_names",
            "each name becomes `*name*.weight`, of frozen weights alone; one num_bits "
            "(quant.frozen_bits) and one group_size (quant.block_numel) for all of them"),

    // Other subjects that real files mention
    not_needed("disable_allgather", Type::kBool, kStage12),
    not_needed("dataloader_drop_last", Type::kBool, "every step has a whole batch"),
    not_needed("seq_parallel_communication_data_type", Type::kString,
               "there is no sequence parallelism"),
    fixed("graph_harvesting", Type::kBool, "false", "CUDA graphs are not supported"),
    fixed("sparse_gradients", Type::kBool, "false", "sparse gradients are not supported"),
    fixed("sequence_parallel_size", Type::kInt, "1", "sequence parallelism is not supported"),
    foreign("amp", "Apex AMP does not go with sharded parameters; use fp16 or bf16"),
    foreign("torch_autocast", "choose the precision by fp16 or bf16"),
    foreign("compile", "torch.compile is Python's"),
    foreign("nebula", "it is not supported"),
    foreign("elasticity", "it is not supported"),
    foreign("compression_training", "it is not supported"),
    foreign("data_efficiency", "it is not supported"),
    foreign("curriculum_learning", "it is not supported"),
    foreign("progressive_layer_drop", "it is not supported"),
    foreign("eigenvalue", "it is not supported"),
    foreign("sparse_attention", "it is not supported"),
    foreign("tensor_parallel", "it is not supported"),
    foreign("hybrid_engine", "it is not supported"),
};

}  // namespace

std::span<const DeepSpeedKey> deepspeed_keys() { return kKeys; }

std::string_view parent_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

const DeepSpeedKey* find_deepspeed_key(std::string_view path) {
  const std::string_view parent = parent_of(path);
  const std::string_view last = parent.empty() ? path : path.substr(parent.size() + 1);
  const auto found = std::find_if(kKeys.begin(), kKeys.end(), [&](const DeepSpeedKey& key) {
    return key.path == path ||
           (!key.alias.empty() && key.alias == last && parent_of(key.path) == parent);
  });
  return found == kKeys.end() ? nullptr : &*found;
}

bool is_deepspeed_block(std::string_view path) {
  return std::any_of(kKeys.begin(), kKeys.end(), [path](const DeepSpeedKey& key) {
    return key.path.size() > path.size() && key.path.starts_with(path) &&
           key.path[path.size()] == '.';
  });
}

}  // namespace tessera
