#include "tessera/planner/memory_plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "tessera/comm/ipc_backend.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/rule.h"
#include "tessera/planner/memory_cost.h"

namespace tessera::planner {
namespace {

constexpr int kGatheredBits = 8;  // of quant.weights

std::optional<Tier> tier_option(const Config& config, const char* option) {
  const std::string& name = config.get_string(option);
  if (name == "nvme") {
    return Tier::kNvme;
  }
  if (name != "device" && name != "host") {
    return std::nullopt;
  }
  const std::string budget = "memory." + name;
  TESSERA_CHECK(config.get_bytes(budget) > 0, ConfigError, option, " = ", name, ", but ", budget,
                " = 0 allows nothing there; raise it");
  return name == "device" ? Tier::kDevice : Tier::kHost;
}

DType dtype_of(const Config& config) {
  const std::string& name = config.get_string("precision");
  return name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

std::string bytes_or_dash(std::int64_t bytes) {
  return bytes == 0 ? "-" : approximate_bytes(bytes);
}

std::string budget_text(std::int64_t bytes) {
  return bytes == kUnlimited ? "-" : approximate_bytes(bytes);
}

std::string row(const std::string& name, const std::string& a, const std::string& b,
                const std::string& c) {
  std::array<char, 160> line{};
  std::snprintf(line.data(), line.size(), "%-22s%14s%14s%14s\n", name.c_str(), a.c_str(), b.c_str(),
                c.c_str());
  return line.data();
}

std::string number_text(const char* format, double number) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), format, number);
  return text.data();
}

const char* words_of(Role role) {
  switch (role) {
    case Role::kShard:
      return "parameters";
    case Role::kFull:
      return "gathered parameters";
    case Role::kGradient:
      return "gradients";
    case Role::kOptimizer:
      return "optimizer states";
    case Role::kStaging:
      return "buffers";
    case Role::kOther:
      break;
  }
  return "other";
}

// Where micro-batches add up; empty where there is nothing to add.
std::string accumulation_text(const MemoryPlan& plan) {
  const AccumulationNumel& numel = plan.accumulation;
  std::string text;
  const auto add = [&](std::int64_t part, const std::string& where) {
    if (part > 0) {
      text += text.empty() ? "gradients of micro-batches: " : "; ";
      text += number_text("%.1f %% ",
                          100 * static_cast<double>(part) / static_cast<double>(numel.all()));
      text += where;
    }
  };
  add(numel.device_sums, "summed on the device, in fp32");
  add(plan.num_gradient_copies > 1 ? numel.host_copies : 0,
      detail::concat(plan.num_gradient_copies, " copies in host memory, added by the update",
                     plan.adds_gradients_on_host
                         ? " (all but the last added up while the last is computed)"
                         : ""));
  add(numel.host_sums, "summed in host memory, in fp32");
  add(numel.nvme_sums, "summed on NVMe, in fp32");
  return text.empty() ? "" : text + "\n";
}

// Who updates on a discrete device, and what is copied for it.
std::string update_text(const MemoryPlan& plan) {
  const UpdateNumel& update = plan.update;
  const auto part = [&update](std::int64_t numel) {
    const auto all = static_cast<double>(std::max<std::int64_t>(1, update.all()));
    return number_text("%.1f %%", 100 * static_cast<double>(numel) / all);
  };
  std::string text =
      "update: " + part(update.resident) + " on the device, with states that live there";
  if (update.streamed > 0) {
    text += detail::concat(
        "; ", part(update.streamed), " on the device, with states that are copied to it (",
        plan.num_update_slots, plan.num_update_slots == 1 ? " slot of " : " slots of ",
        bytes_or_dash(plan.update_slot_bytes), ")");
  }
  text += update.cpu > 0 ? "; " + part(update.cpu) + " on the CPU\n" : "\n";
  text += accumulation_text(plan);
  if (plan.host_memory_bytes() > 0 && plan.shard_numel > 0) {
    text += "host memory per parameter: " +
            number_text("%.2f B\n", static_cast<double>(plan.host_memory_bytes()) /
                                        static_cast<double>(plan.shard_numel));
  }
  if (plan.link.h2d + plan.link.d2h > 0) {
    text += detail::concat("host link per step: ", bytes_or_dash(plan.link.h2d), " H2D, ",
                           bytes_or_dash(plan.link.d2h), " D2H\n");
  }
  return text;
}

std::string nvme_text(const MemoryPlan& plan) {
  const StepBytes& step = plan.step;
  std::string text = "\n" + row("NVMe per step and rank", "read", "written", "");
  const auto add = [&text](const char* name, std::int64_t read, std::int64_t written) {
    text += row(name, bytes_or_dash(read), bytes_or_dash(written), "");
  };
  add("parameters", step.parameters_read, step.parameters_written);
  add("gradients", step.gradients_read, step.gradients_written);
  add("update", step.states_read, step.states_written);
  add("all", step.read(), step.written());
  if (plan.num_optimizer_buffers > 0) {
    text +=
        detail::concat("sub-groups of ", bytes_or_dash(4 * plan.sub_group_numel), " of masters in ",
                       plan.num_optimizer_buffers,
                       plan.num_optimizer_buffers == 1 ? " buffer of " : " buffers of ",
                       bytes_or_dash(plan.optimizer_pool_bytes / plan.num_optimizer_buffers), "\n");
  }
  return text;
}

}  // namespace

MemoryPlanOptions MemoryPlanOptions::from(const Config& config, const comm::Mesh& mesh,
                                          bool is_discrete) {
  MemoryPlanOptions options = from(config, mesh.shard_size(), is_discrete, mesh.num_replicas());
  options.num_reduction_hosts = mesh.two_hops() ? mesh.hosts_per_group() : 1;
  options.num_gather_hosts = mesh.hierarchical() ? mesh.hosts_per_group() : 1;
  return options;
}

grad::ReducerOptions MemoryPlanOptions::reductions(std::int64_t of_bucket_bytes) const {
  return {of_bucket_bytes, wire_dtype, gradient_blocks, num_reduction_hosts};
}

MemoryPlanOptions MemoryPlanOptions::from(const Config& config, int num_ranks, bool is_discrete,
                                          int num_copies) {
  config.check();
  MemoryPlanOptions options;
  options.num_ranks = num_ranks;
  options.num_copies = num_copies;
  options.weight_bits = config.get_bool("quant.weights") ? kGatheredBits : 0;
  options.block_numel = config.get_int("quant.block_numel");
  options.num_secondary_ranks =
      static_cast<int>(std::max<std::int64_t>(1, config.get_int("shard.secondary_group_size")));
  options.is_discrete = is_discrete;
  options.device_bytes = config.get_bytes("memory.device");
  options.host_bytes = config.get_bytes("memory.host");
  options.nvme_bytes = config.get_bytes("memory.nvme");
  options.is_device_given = config.is_set("memory.device");
  options.is_host_given = config.is_set("memory.host");
  options.has_nvme = !config.get_list("nvme.paths").empty() && options.nvme_bytes > 0;
  options.parameters = tier_option(config, "place.parameters");
  options.optimizer = tier_option(config, "place.optimizer");
  // "On NVMe" without more means all of it.
  options.parameters_host_bytes = config.is_set("place.parameters_host_bytes")
                                      ? config.get_bytes("place.parameters_host_bytes")
                                      : 0;
  options.small_param_bytes = std::min(kSmallParamBytes, config.get_bytes("persist.param_bytes"));
  options.num_states =
      static_cast<int>(optim::state_names(optim::RuleOptions::from(config)).size());
  const auto reductions = grad::ReducerOptions::from(config, dtype_of(config));
  options.wire_dtype = reductions.wire_dtype;
  options.bucket_bytes = reductions.bucket_bytes;
  options.gradient_blocks = reductions.blocks;
  options.is_bucket_given = config.is_set("grad.bucket_bytes");
  options.pack_below_bytes = config.get_bytes("comm.pack_below_bytes");
  // As if all ranks were on one host; the engine, which has the group, asks that.
  const std::string& backend = config.get_string("comm.backend");
  if (num_ranks > 1 && is_discrete && (backend == "gloo" || backend == "shm")) {
    options.call_memory = comm::CallMemory::kCopied;
  } else if (num_ranks > 1 && backend != "gloo" && backend != "nccl") {
    options.call_memory = comm::CallMemory::kShared;
  }
  if (options.call_memory == comm::CallMemory::kShared && is_discrete) {
    options.group_memory = comm::kIpcChunks;
  } else if (options.call_memory == comm::CallMemory::kShared ||
             (num_ranks > 1 && backend == "shm")) {
    options.group_memory = comm::kShmChunks;
  }
  options.live_limit_bytes = config.get_bytes("live.limit_bytes");
  options.is_live_limit_given = config.is_set("live.limit_bytes");
  options.is_max_inflight_given = config.is_set("prefetch.max_inflight");
  options.is_reuse_distance_given = config.is_set("live.reuse_distance_bytes");
  options.sub_group_bytes = config.get_bytes("optim.sub_group_bytes");
  options.parameter_buffers = static_cast<int>(config.get_int("nvme.parameter_buffers"));
  options.parameter_buffer_bytes = config.get_bytes("nvme.parameter_buffer_bytes");
  options.optimizer_buffers = static_cast<int>(config.get_int("nvme.optimizer_buffers"));
  options.cpu_share = config.get_double("optim.cpu_share");
  options.verify = config.get_bool("nvme.verify");
  options.stored = shard::StoredRule::from(config);
  return options;
}

std::int64_t MemoryPlanOptions::memory_bytes() const {
  return is_discrete ? device_bytes : std::min(device_bytes, host_bytes);
}

std::int64_t MemoryPlan::bytes(Tier tier) const {
  std::int64_t sum = 0;
  for (const LedgerLine& line : ledger) {
    sum += line.tier == tier ? line.bytes : 0;
  }
  return sum;
}

std::int64_t MemoryPlan::bytes(Tier tier, Role role) const {
  for (const LedgerLine& line : ledger) {
    if (line.tier == tier && line.role == role) {
      return line.bytes;
    }
  }
  return 0;
}

std::vector<LedgerLine> MemoryPlan::ledger_with_groups() const {
  std::vector<LedgerLine> lines = ledger;
  const auto add_staging = [&lines](Tier tier, std::int64_t bytes) {
    const auto line = std::find_if(lines.begin(), lines.end(), [&](const LedgerLine& each) {
      return each.tier == tier && each.role == Role::kStaging;
    });
    if (line != lines.end()) {
      line->bytes += bytes;
    } else if (bytes > 0) {
      lines.push_back({tier, Role::kStaging, bytes});
    }
  };
  add_staging(comm_tier, comm_bytes);
  add_staging(chunk_tier, chunk_bytes);
  return lines;
}

std::int64_t MemoryPlan::memory_bytes() const {
  return bytes(Tier::kDevice) + bytes(Tier::kPinned) + bytes(Tier::kHost) + comm_bytes +
         chunk_bytes;
}

std::int64_t MemoryPlan::device_memory_bytes() const {
  return is_discrete ? bytes(Tier::kDevice) + (chunk_tier == Tier::kDevice ? chunk_bytes : 0) : 0;
}

std::int64_t MemoryPlan::host_memory_bytes() const {
  return memory_bytes() - device_memory_bytes();
}

std::string MemoryPlan::text() const {
  // A column that a CPU does not have stays empty.
  const auto device_column = [this](const std::string& text) { return is_discrete ? text : ""; };
  std::string text =
      row("bytes per rank", device_column("device"), is_discrete ? "host" : "memory", "NVMe");
  for (std::size_t i = 0; i < kNumRoles; ++i) {
    const auto role = static_cast<Role>(i);
    std::int64_t device = is_discrete ? bytes(Tier::kDevice, role) : 0;
    std::int64_t memory =
        bytes(Tier::kDevice, role) - device + bytes(Tier::kPinned, role) + bytes(Tier::kHost, role);
    if (role == Role::kStaging) {
      memory += comm_bytes;
      (is_discrete && chunk_tier == Tier::kDevice ? device : memory) += chunk_bytes;
    }
    const std::int64_t nvme = bytes(Tier::kNvme, role);
    if (device + memory + nvme > 0) {
      text += row(words_of(role), device_column(bytes_or_dash(device)), bytes_or_dash(memory),
                  bytes_or_dash(nvme));
    }
  }
  text += row("all", device_column(bytes_or_dash(device_memory_bytes())),
              bytes_or_dash(host_memory_bytes()), bytes_or_dash(bytes(Tier::kNvme)));
  const std::int64_t host_budget = is_discrete ? host_budget_bytes : memory_budget_bytes;
  if (memory_budget_bytes != kUnlimited || host_budget != kUnlimited) {
    text += row("budget", device_column(budget_text(memory_budget_bytes)), budget_text(host_budget),
                "");
  }
  if (secondary_device_bytes + secondary_host_bytes > 0) {
    text += detail::concat(
        "of the parameters' bytes, secondary shards (hpZ): ", bytes_or_dash(secondary_device_bytes),
        is_discrete ? " on the device, " : " in memory",
        is_discrete ? bytes_or_dash(secondary_host_bytes) : std::string(),
        is_discrete ? " in host memory\n" : "\n");
  }
  if (encoded_bytes > 0) {
    text += detail::concat("of the parameters' bytes, shards encoded for gathers (qwZ): ",
                           bytes_or_dash(encoded_bytes), is_discrete ? " on the device\n" : "\n");
  }
  text += detail::concat("besides, torch's: activations, and full gradients (one parameter's",
                         kept_gradient_bytes > 0 ? ", and those still being copied" : "",
                         "), up to ", bytes_or_dash(full_gradient_bytes), "\n");
  return text + (is_discrete ? update_text(*this) : "") + (uses_nvme ? nvme_text(*this) : "");
}

std::vector<PlannedExtent> planned_extents(const ModelShapes& model,
                                           const MemoryPlanOptions& options, const MemoryPlan& plan,
                                           const std::vector<std::string>& state_names) {
  TESSERA_INVARIANT(state_names.size() == static_cast<std::size_t>(options.num_states),
                    state_names.size(), " names for ", options.num_states, " states");
  const CutModel cut(model, options);
  std::vector<PlannedExtent> all;
  // Whole blocks, behind what the role has so far.
  const auto add = [&all](Role role, std::size_t param, std::int64_t begin, std::int64_t bytes,
                          const std::string& tensor = {}) {
    const bool is_first = all.empty() || all.back().role != role;
    const std::int64_t offset = is_first ? 0 : all.back().offset + all.back().bytes;
    all.push_back({role, static_cast<int>(param), begin, offset, block_bytes(bytes), tensor});
  };
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (plan.params[i].parameter == Tier::kNvme) {
      add(Role::kShard, i, 0, as_int(cut.layouts[i].shard_bytes()));
    }
  }
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (plan.params[i].gradient == Tier::kNvme) {
      add(Role::kGradient, i, 0, 4 * cut.layouts[i].shard_numel());
    }
  }
  std::vector<std::string> tensors = state_names;
  if (!optim::is_own_master(model.dtype)) {
    tensors.insert(tensors.begin(), "master");
  }
  for (const optim::SubGroup& group : sub_groups(cut, plan.params, plan.sub_group_numel).groups) {
    for (const optim::SubGroupPiece& piece : group.pieces) {
      for (const std::string& tensor : tensors) {
        if (group.states_on_nvme()) {
          add(Role::kOptimizer, static_cast<std::size_t>(piece.param), piece.begin,
              as_int(piece.tensor_bytes), tensor);
        }
      }
    }
  }
  return all;
}

}  // namespace tessera::planner
