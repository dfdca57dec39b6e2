#include "tessera/core/option_table.h"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

constexpr double kMaxInt = 9007199254740992.0;  // 2^53: every integer below is exact in JSON
constexpr double kMaxBytes = kMaxInt64AsDouble;

// Rows that need no range, and rows whose numbers have one; read_by is empty unless it is given.
constexpr Option flag(std::string_view name, std::string_view value, std::string_view text,
                      std::string_view read_by = "") {
  return {name, OptionType::kBool, value, 0, 0, "", "", 0, read_by, text};
}
constexpr Option choice(std::string_view name, std::string_view value, std::string_view choices,
                        std::string_view text, std::string_view read_by = "") {
  return {name, OptionType::kChoice, value, 0, 0, choices, "", 0, read_by, text};
}
constexpr Option words(std::string_view name, OptionType type, std::string_view text,
                       std::string_view read_by = "") {
  return {name, type, "", 0, 0, "", "", 0, read_by, text};
}
constexpr Option integer(std::string_view name, std::string_view value, double min, double max,
                         std::string_view text, std::string_view read_by = "") {
  return {name, OptionType::kInt, value, min, max, "", "", 0, read_by, text};
}
constexpr Option real(std::string_view name, std::string_view value, double min, double max,
                      std::string_view text, std::string_view read_by = "") {
  return {name, OptionType::kDouble, value, min, max, "", "", 0, read_by, text};
}
constexpr Option bytes(std::string_view name, std::string_view value, std::string_view text,
                       std::string_view read_by = "") {
  return {name, OptionType::kBytes, value, 0, kMaxBytes, "", "unlimited", kMaxBytes, read_by, text};
}
constexpr Option bytes_or(std::string_view unset_text, std::string_view name,
                          std::string_view value, std::string_view text,
                          std::string_view read_by = "") {
  Option option = bytes(name, value, text, read_by);
  option.unset_text = unset_text;
  return option;
}
// Numbers that a measurement replaces unless they are given: "auto" reads as 0 (or -1).
constexpr Option measured(std::string_view name, OptionType type, double min, double max,
                          std::string_view text, std::string_view read_by = "",
                          double auto_value = 0) {
  return {name, type, "auto", min, max, "", "auto", auto_value, read_by, text};
}

constexpr std::array kOptions = {
    integer("seed", "0", 0, kMaxInt, "Seed of every random number of a run.",
            "engine, the trainer"),
    choice("precision", "fp32", "fp32|bf16|fp16",
           "Type of parameters and gradients; master weights and moments stay fp32.", "engine"),

    integer("batch.total", "0", 0, kMaxInt,
            "Sequences per step of all ranks together; 0: from the other two and the rank count.",
            "the trainer"),
    integer("batch.micro_per_rank", "0", 0, kMaxInt,
            "Sequences per forward and rank; 0: from the other two and the rank count.",
            "the trainer"),
    integer("batch.accumulate", "1", 1, kMaxInt, "Micro-batches per step.", "engine, the trainer"),

    choice(
        "comm.backend", "auto", "auto|shm|ipc|gloo|nccl",
        "Network: auto takes ipc on CUDA and shm on CPU where all ranks of a group can map each "
        "other's memory, else nccl and gloo. All but nccl let ranks share a GPU; shm and gloo copy "
        "through the host there.",
        "comm"),
    Option{"comm.timeout_s", OptionType::kSeconds, "600", 0.001, 1e9, "", "", 0, "comm",
           "How long a collective may take before it fails and names the ranks that are missing."},
    integer("comm.ranks_per_host", "0", 0, 1048576,
            "Ranks of each host; 0: as found; must divide the world. Where it is less than a host "
            "has, comm.backend=auto takes its ranks as those of several hosts.",
            "comm"),
    bytes("comm.pack_below_bytes", "64KiB",
          "Tensors whose piece per rank is smaller than this travel together in one message.",
          "comm, planner"),

    integer("shard.group_size", "0", 0, 1048576,
            "Ranks that hold one copy of the model together (MiCS); 0: all; must divide the world.",
            "comm"),
    flag("shard.hierarchical_gather", "false",
         "Gather across hosts first and inside each host second (MiCS).", "comm"),
    integer(
        "shard.secondary_group_size", "1", 0, 1048576,
        "Ranks of a host that share a second copy of the shards, from which every gather but the "
        "first after an update comes (hpZ); 0 or 1: none; must divide the ranks that a shard group "
        "has on a host.",
        "engine, planner"),

    flag("mics.check_replicas", "false",
         "Compare the shards of all copies of the model before every update, and name a parameter "
         "that differs (MiCS). Reads every shard.",
         "engine"),

    flag("quant.weights", "false", "Gather parameters as int8 blocks; changes numbers (qwZ).",
         "engine"),
    integer(
        "quant.frozen_bits", "0", 0, 8,
        "Keep frozen parameters as blocks of integers of so many bits, 4 or 8 and no other "
        "number, with scales; 0: as they are. Changes numbers: what was frozen is rounded once.",
        "engine, planner"),
    words("quant.frozen_names", OptionType::kList,
          "Frozen parameters that quant.frozen_bits is for, by full name, where a * stands for any "
          "run of characters; none: all. Those of fewer than two dims (norms, biases) or 8 blocks "
          "stay as they are.",
          "engine, planner"),
    flag("quant.gradients", "false",
         "Reduce gradients as blocks of integers, inside hosts and then across; changes numbers "
         "(qgZ).",
         "comm, engine, planner"),
    integer("quant.gradient_bits", "4", 4, 8,
            "Bits of a value of these blocks: 4 or 8, and none between.", "engine, planner"),
    integer(
        "quant.block_numel", "128", 32, 1048576,
        "Values of a quantised block, which share a scale; a multiple of 32, and of gradients a "
        "power of two up to 4096.",
        "engine, planner"),
    flag("quant.error_feedback", "false",
         "Carry the rounding error of quantised gradients over to the next step (LoCo)."),
    real("quant.error_beta", "0.8", 0, 1, "Share of the old error that is kept per step."),
    integer("quant.error_reset_steps", "1024", 1, kMaxInt,
            "Steps after which the carried error is set to zero."),

    bytes("prefetch.bucket_bytes", "128MiB",
          "Most full bytes that one prefetch gathers in one call; 0 turns prefetch off.",
          "coordinator"),
    integer("prefetch.max_inflight", "4", 1, 1024, "Most gathers in flight at once.",
            "coordinator"),
    bytes("live.limit_bytes", "2GiB",
          "Hard limit on full parameters held at once; a unit that is larger is held alone. Unless "
          "set, one rank on a GPU has no such limit but its memory budget.",
          "coordinator"),
    bytes("live.reuse_distance_bytes", "2GiB",
          "A parameter that is used again within this many bytes of the trace is not released.",
          "coordinator"),
    bytes(
        "persist.param_bytes", "256KiB",
        "Parameters of at most this many full bytes stay gathered between uses, and, up to 256KiB, "
        "on a GPU in every respect.",
        "coordinator, planner"),
    bytes("persist.model_bytes", "unlimited", "Most bytes that persistent parameters may hold.",
          "coordinator"),

    words("unit.leaf_types", OptionType::kList, "Module types that are gathered whole.", "engine"),
    words("unit.leaf_names", OptionType::kList, "Units that are gathered whole, by full name.",
          "engine"),
    words("unit.leaf_name_suffixes", OptionType::kList,
          "Units that are gathered whole, by the end of their name.", "engine"),
    integer("unit.leaf_below_numel", "0", 0, kMaxInt,
            "Units with at most this many elements per unit inside them become leaves; 0: none.",
            "engine"),
    words("unit.dynamic_names", OptionType::kList,
          "Units that only some ranks use in a step (mixture of experts), by full name; a * at the "
          "end stands for any rest.",
          "engine"),
    flag("unit.uneven_data", "false",
         "Ranks may run out of data at different steps: they agree at every unit.", "coordinator"),

    bytes_or(
        "at most 64MiB", "grad.bucket_bytes", "64MiB",
        "Full gradients reduced in one call, in two buffers; unless set, at most 64 MiB and at "
        "most a quarter of all.",
        "grad"),
    choice("grad.wire_dtype", "auto", "auto|fp32|bf16|fp16",
           "Type of gradients on the network; auto: that of the parameters.", "grad"),
    real("grad.clip_norm", "1.0", 0, kNoLimit, "Largest global norm of the gradients; 0: off.",
         "engine"),
    flag("grad.skip_nonfinite", "true",
         "Skip the step on all ranks when a gradient is infinite or NaN.", "engine"),

    bytes_or(
        "found", "memory.device", "unlimited",
        "Budget of device memory per rank; unless set, what is free where not everything fits. "
        "unlimited: no budget, and no refusal of what does not fit.",
        "planner"),
    bytes_or("found", "memory.host", "unlimited",
             "Budget of host memory per rank; unless set, a part of what is free where not "
             "everything fits. unlimited: no budget, and no refusal of what does not fit.",
             "planner"),
    bytes("memory.nvme", "unlimited",
          "Budget of NVMe space per rank, where nvme.paths is given; 0: no NVMe.", "planner"),
    choice("place.parameters", "auto", "auto|device|host|nvme",
           "Tier of parameter shards; auto: by the memory budgets.", "planner"),
    choice("place.optimizer", "auto", "auto|device|host|nvme",
           "Tier of master weights and moments; auto: by the memory budgets.", "planner"),
    bytes("place.parameters_host_bytes", "0",
          "Parameter shards that stay in memory when their tier is nvme.", "planner"),

    words("nvme.paths", OptionType::kList, "Directories for scratch files; several are striped.",
          "engine"),
    choice("nvme.engine", "auto", "auto|uring|threads", "How files are read and written.",
           "engine"),
    choice("nvme.direct_io", "auto", "auto|on|off", "O_DIRECT; auto: where the file system has it.",
           "engine"),
    measured("nvme.block_bytes", OptionType::kBytes, 4096, 1073741824,
             "Bytes per I/O request; auto: measured once per directory.", "engine"),
    measured(
        "nvme.queue_depth", OptionType::kInt, 1, 65536,
        "Requests in flight per thread; auto: measured once per directory, for all ranks of a host "
        "together.",
        "engine"),
    measured("nvme.threads", OptionType::kInt, 1, 1024,
             "Threads that submit I/O; auto: measured once per directory, for all ranks of a host "
             "together.",
             "engine"),
    measured("nvme.parameter_buffers", OptionType::kInt, 1, 65536,
             "Pinned buffers between NVMe and parameters; auto: from the host budget.", "planner"),
    measured("nvme.parameter_buffer_bytes", OptionType::kBytes, 4096, 1099511627776,
             "Bytes of each of those buffers; auto: from the host budget.", "planner"),
    measured("nvme.optimizer_buffers", OptionType::kInt, 1, 65536,
             "Pinned buffers between NVMe and the update; auto: from the host budget.", "planner"),
    flag("nvme.pipeline_read", "true", "Read the next sub-group while one is updated.", "engine"),
    flag("nvme.pipeline_write", "true", "Write a sub-group while the next one is updated.",
         "engine"),
    flag("nvme.verify", "false", "Verify checksums of everything that is read.", "engine"),

    choice("optim.kind", "adamw", "adamw|adam|sgd|lion", "Update rule; adam is Adam with L2.",
           "optim"),
    real("optim.lr", "0.001", 0, kNoLimit, "Learning rate, at the end of warm-up.", "optim"),
    real("optim.beta1", "0.9", 0, 1, "Decay of the first moment.", "optim"),
    real("optim.beta2", "0.999", 0, 1, "Decay of the second moment.", "optim"),
    real("optim.eps", "1e-08", 0, kNoLimit, "Added to the root of the second moment.", "optim"),
    real("optim.weight_decay", "0.01", 0, kNoLimit, "Weight decay.", "optim"),
    real("optim.momentum", "0", 0, 1, "Momentum of sgd.", "optim"),
    bytes("optim.sub_group_bytes", "256MiB",
          "Master weights (fp32 bytes of this rank) that are read, updated and written together.",
          "planner"),
    measured("optim.cpu_share", OptionType::kDouble, 0, 1,
             "Share of the update that runs on the CPU, or more where the device's memory is too "
             "small for the rest; auto: from measured rates.",
             "planner", -1),

    choice("schedule.kind", "constant", "constant|linear|cosine|one_cycle|range_test",
           "Course of the learning rate: after warm-up constant, or down linearly or by a cosine; "
           "up and down once (one_cycle); up without an end, to find a good one (range_test).",
           "optim"),
    integer("schedule.warmup_steps", "0", 0, kMaxInt, "Steps of warm-up.", "optim"),
    choice("schedule.warmup_shape", "linear", "linear|log", "Course of the warm-up.", "optim"),
    real("schedule.warmup_start_lr", "0", 0, kNoLimit,
         "Learning rate at the first step of a warm-up, one_cycle or range_test.", "optim"),
    integer("schedule.total_steps", "0", 0, kMaxInt,
            "Step at which linear and cosine end; 0: the steps of the run.", "optim"),
    real("schedule.final_lr", "0", 0, kNoLimit, "Learning rate at the end of linear and cosine.",
         "optim"),
    integer("schedule.first_step", "0", 0, kMaxInt, "Step of the schedule at which the run begins.",
            "optim"),
    flag("schedule.deepspeed_timing", "false",
         "Warm-up and linear decay run one step late, as in DeepSpeed: the first learning rate "
         "holds for two steps.",
         "optim"),
    integer("schedule.cycle_up_steps", "2000", 1, kMaxInt,
            "one_cycle: steps from schedule.warmup_start_lr up to optim.lr.", "optim"),
    integer("schedule.cycle_down_steps", "0", 0, kMaxInt,
            "one_cycle: steps back down; 0: as many as up.", "optim"),
    integer("schedule.cycle_up_stairs", "0", 0, kMaxInt,
            "one_cycle: flat stairs on the way up; 0: a slope.", "optim"),
    integer("schedule.cycle_down_stairs", "0", 0, kMaxInt,
            "one_cycle: flat stairs on the way down; 0: a slope.", "optim"),
    integer("schedule.decay_steps", "0", 0, kMaxInt,
            "one_cycle: steps per unit of decay after the cycle; 0: no decay.", "optim"),
    real("schedule.decay_rate", "0", 0, kNoLimit,
         "one_cycle: after n such units the learning rate is divided by 1 + n times this.",
         "optim"),
    integer("schedule.range_steps", "2000", 1, kMaxInt,
            "range_test: steps after which the learning rate has grown by the rate.", "optim"),
    real("schedule.range_rate", "1", 0, kNoLimit,
         "range_test: growth, as a multiple of the first learning rate.", "optim"),
    flag("schedule.range_staircase", "false", "range_test: grow in stairs.", "optim"),

    real("loss_scale.fixed", "0", 0, kNoLimit, "Constant loss scale for fp16; 0: dynamic.",
         "optim"),
    real("loss_scale.initial", "65536", 1, kNoLimit, "First dynamic loss scale.", "optim"),
    integer("loss_scale.window", "1000", 1, kMaxInt,
            "Steps without overflow after which the scale doubles.", "optim"),
    integer("loss_scale.hysteresis", "2", 1, kMaxInt, "Overflows before the scale halves.",
            "optim"),
    flag("loss_scale.consecutive_hysteresis", "false",
         "A step without overflow restores the hysteresis.", "optim"),
    Option{"loss_scale.min", OptionType::kDouble, "1", 1e-30, kNoLimit, "", "", 0, "optim",
           "Smallest dynamic loss scale."},

    choice("log.level", "info", "trace|debug|info|warn|error",
           "Least important line that is shown.", "core"),
    flag("log.all_ranks", "false", "Let every rank speak; otherwise rank 0, and warnings of all.",
         "core"),
    words("trace.path", OptionType::kString,
          "File for a Chrome/Perfetto trace of the run's spans; empty: no tracing.", "engine"),
    integer("trace.ring_spans", "65536", 1, 1073741824,
            "Spans kept per rank; the oldest are overwritten and counted.", "engine"),
};

struct RemovedOption {
  std::string_view name;
  std::string_view why;
};

constexpr std::string_view kPinnedByItself =
    "host memory is pinned where a GPU reads or writes it, and nowhere else; leave it out";

constexpr std::string_view kAlwaysFp32 = "master weights and moments are always fp32; leave it out";

constexpr std::array kRemoved = {
    RemovedOption{"grad.accumulate_dtype",
                  "gradients of micro-batches are always summed in fp32; leave it out"},
    RemovedOption{"grad.reduction",
                  "gradients are always added in rank order in fp32; leave it out"},
    RemovedOption{"optim.master_dtype", kAlwaysFp32},
    RemovedOption{"optim.state_dtype", kAlwaysFp32},
    RemovedOption{"place.parameters_pinned", kPinnedByItself},
    RemovedOption{"quant.frozen_weights",
                  "quant.frozen_bits = 8 keeps frozen parameters as int8 blocks"},
    RemovedOption{"place.optimizer_pinned", kPinnedByItself},
};

}  // namespace

std::span<const Option> option_table() { return kOptions; }

std::string_view why_removed(std::string_view name) {
  const auto found = std::find_if(kRemoved.begin(), kRemoved.end(),
                                  [name](const RemovedOption& each) { return each.name == name; });
  return found == kRemoved.end() ? std::string_view() : found->why;
}

const Option* find_option(std::string_view name) {
  const auto found = std::find_if(kOptions.begin(), kOptions.end(),
                                  [name](const Option& option) { return option.name == name; });
  return found == kOptions.end() ? nullptr : &*found;
}

std::string_view section_of(std::string_view name) { return name.substr(0, name.find('.')); }

}  // namespace tessera
