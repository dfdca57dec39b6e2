#include "tessera/planner/placement.h"

#include <algorithm>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/rule.h"
#include "tessera/planner/cuda_placement.h"
#include "tessera/planner/placement_cost.h"
#include "tessera/planner/placement_fill.h"

namespace tessera::planner {
namespace {

Wish wish_of(const Config& config, const char* option) {
  const std::string& name = config.get_string(option);
  return name == "device" ? Wish::kDevice
         : name == "host" ? Wish::kHost
         : name == "nvme" ? Wish::kNvme
                          : Wish::kAuto;
}

DType dtype_of(const Config& config) {
  const std::string& name = config.get_string("precision");
  return name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

void check_wish(const Config& config, const char* option, Wish wish) {
  const char* const budget = wish == Wish::kDevice ? "memory.device"
                             : wish == Wish::kHost ? "memory.host"
                                                   : nullptr;
  TESSERA_CHECK(budget == nullptr || config.get_bytes(budget) > 0, ConfigError, option, " = ",
                config.get_string(option), ", but ", budget, " = 0 allows nothing there; raise it");
}

Placement place_in_one_memory(const CutModel& cut, std::int64_t num_micro_batches) {
  Placement placement = fill(cut);
  placement.memory_budget_bytes = cut.options.memory_bytes();
  complete(cut, num_micro_batches, placement);
  TESSERA_INVARIANT(placement.memory_bytes() <= placement.memory_budget_bytes, "a plan of ",
                    placement.memory_bytes(), " bytes for a budget of ",
                    placement.memory_budget_bytes);
  return placement;
}

}  // namespace

PlacementOptions PlacementOptions::from(const Config& config, int num_ranks, bool on_cuda) {
  config.check();
  PlacementOptions options;
  options.num_ranks = num_ranks;
  options.on_cuda = on_cuda;
  options.device_bytes = config.get_bytes("memory.device");
  options.host_bytes = config.get_bytes("memory.host");
  options.nvme_bytes = config.get_bytes("memory.nvme");
  options.has_nvme = !config.get_list("nvme.paths").empty() && options.nvme_bytes > 0;
  options.parameters = wish_of(config, "place.parameters");
  options.optimizer = wish_of(config, "place.optimizer");
  check_wish(config, "place.parameters", options.parameters);
  check_wish(config, "place.optimizer", options.optimizer);
  // "On NVMe" without more means all of it.
  options.parameters_host_bytes = config.is_set("place.parameters_host_bytes")
                                      ? config.get_bytes("place.parameters_host_bytes")
                                      : 0;
  options.num_states =
      static_cast<int>(optim::state_names(optim::RuleOptions::from(config)).size());
  const auto reductions = grad::ReducerOptions::from(config, dtype_of(config));
  options.wire_dtype = reductions.wire_dtype;
  options.bucket_bytes = reductions.bucket_bytes;
  options.is_bucket_given = config.is_set("grad.bucket_bytes");
  options.pack_below_bytes = config.get_bytes("comm.pack_below_bytes");
  options.call_memory = on_cuda && num_ranks > 1 && config.get_string("comm.backend") == "gloo"
                            ? comm::CallMemory::kCopied
                            : comm::CallMemory::kReached;
  options.live_limit_bytes = config.get_bytes("live.limit_bytes");
  options.is_live_limit_given = config.is_set("live.limit_bytes");
  options.sub_group_bytes = config.get_bytes("optim.sub_group_bytes");
  options.parameter_buffers = static_cast<int>(config.get_int("nvme.parameter_buffers"));
  options.parameter_buffer_bytes = config.get_bytes("nvme.parameter_buffer_bytes");
  options.optimizer_buffers = static_cast<int>(config.get_int("nvme.optimizer_buffers"));
  options.cpu_share = config.get_double("optim.cpu_share");
  options.verify = config.get_bool("nvme.verify");
  return options;
}

std::int64_t PlacementOptions::memory_bytes() const {
  return on_cuda ? device_bytes : std::min(device_bytes, host_bytes);
}

std::int64_t Placement::bytes(Tier tier) const {
  std::int64_t sum = 0;
  for (const LedgerLine& line : ledger) {
    sum += line.tier == tier ? line.bytes : 0;
  }
  return sum;
}

std::int64_t Placement::bytes(Tier tier, Role role) const {
  for (const LedgerLine& line : ledger) {
    if (line.tier == tier && line.role == role) {
      return line.bytes;
    }
  }
  return 0;
}

std::vector<LedgerLine> Placement::ledger_with_groups() const {
  std::vector<LedgerLine> lines = ledger;
  if (comm_bytes == 0) {
    return lines;
  }
  const auto staging = std::find_if(lines.begin(), lines.end(), [this](const LedgerLine& line) {
    return line.tier == comm_tier && line.role == Role::kStaging;
  });
  if (staging != lines.end()) {
    staging->bytes += comm_bytes;
  } else {
    lines.push_back({comm_tier, Role::kStaging, comm_bytes});
  }
  return lines;
}

std::int64_t Placement::memory_bytes() const {
  return bytes(Tier::kDevice) + bytes(Tier::kPinned) + bytes(Tier::kHost) + comm_bytes;
}

std::int64_t Placement::device_memory_bytes() const { return on_cuda ? bytes(Tier::kDevice) : 0; }

std::int64_t Placement::host_memory_bytes() const { return memory_bytes() - device_memory_bytes(); }

Placement make_placement(const ModelShapes& model, const PlacementOptions& options,
                         std::int64_t num_micro_batches) {
  const CutModel cut(model, options);
  Placement placement = options.on_cuda ? place_on_cuda(cut, num_micro_batches)
                                        : place_in_one_memory(cut, num_micro_batches);
  placement.comm_tier =
      options.call_memory == comm::CallMemory::kCopied ? Tier::kPinned : Tier::kHost;
  for (const shard::Layout& layout : cut.layouts) {
    placement.shard_numel += layout.shard_numel();
  }
  const std::int64_t nvme_bytes = placement.bytes(Tier::kNvme);
  TESSERA_CHECK(nvme_bytes <= options.nvme_bytes, ConfigError, "NVMe: a rank needs ",
                approximate_bytes(nvme_bytes), ", memory.nvme allows ",
                approximate_bytes(options.nvme_bytes), ". Raise memory.nvme to ",
                exact_bytes(nvme_bytes), " (--nvme-budget), or keep more in memory (memory.host)");
  return placement;
}

}  // namespace tessera::planner
