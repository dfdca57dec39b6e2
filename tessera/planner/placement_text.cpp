#include <array>
#include <cstdio>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/placement.h"

namespace tessera::planner {
namespace {

std::string bytes_text(std::int64_t bytes) {
  return bytes == 0 ? "-" : approximate_bytes(static_cast<std::uint64_t>(bytes));
}

std::string row(const std::string& name, const std::string& a, const std::string& b,
                const std::string& c) {
  std::array<char, 160> line{};
  std::snprintf(line.data(), line.size(), "%-22s%14s%14s%14s\n", name.c_str(), a.c_str(), b.c_str(),
                c.c_str());
  return line.data();
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

}  // namespace

std::string placement_text(const Placement& placement) {
  const bool has_device = placement.on_cuda;
  const auto in_memory = [&](Role role) {
    return placement.bytes(Tier::kHost, role) + placement.bytes(Tier::kPinned, role) +
           (has_device ? 0 : placement.bytes(Tier::kDevice, role));
  };
  const auto on_device = [&](Role role) {
    return has_device ? placement.bytes(Tier::kDevice, role) : 0;
  };
  std::string text =
      row("bytes per rank", has_device ? "device" : "", has_device ? "host" : "memory", "NVMe");
  for (std::size_t i = 0; i < kNumRoles; ++i) {
    const auto role = static_cast<Role>(i);
    const std::int64_t memory =
        in_memory(role) + (role == Role::kStaging ? placement.comm_bytes : 0);
    const std::int64_t nvme = placement.bytes(Tier::kNvme, role);
    if (memory + nvme + on_device(role) > 0) {
      text += row(words_of(role), has_device ? bytes_text(on_device(role)) : "", bytes_text(memory),
                  bytes_text(nvme));
    }
  }
  const std::int64_t device = has_device ? placement.bytes(Tier::kDevice) : 0;
  text +=
      row("all", has_device ? bytes_text(device) : "",
          bytes_text(placement.memory_bytes() - device), bytes_text(placement.bytes(Tier::kNvme)));
  if (placement.memory_budget_bytes != kUnlimited) {
    text += row("budget", has_device ? bytes_text(placement.memory_budget_bytes) : "",
                has_device ? "" : bytes_text(placement.memory_budget_bytes), "");
  }
  text += detail::concat(
      "besides, torch's: activations, and the full gradient of one parameter at "
      "a time, up to ",
      bytes_text(placement.full_gradient_bytes), "\n");
  if (!placement.uses_nvme) {
    return text;
  }
  const StepBytes& step = placement.step;
  text += "\n" + row("NVMe per step and rank", "read", "written", "");
  text +=
      row("parameters", bytes_text(step.parameters_read), bytes_text(step.parameters_written), "");
  text += row("gradients", bytes_text(step.gradients_read), bytes_text(step.gradients_written), "");
  text += row("update", bytes_text(step.states_read), bytes_text(step.states_written), "");
  text += row("all", bytes_text(step.read()), bytes_text(step.written()), "");
  if (placement.num_optimizer_buffers > 0) {
    text += detail::concat(
        "sub-groups of ", bytes_text(4 * placement.sub_group_numel), " of masters in ",
        placement.num_optimizer_buffers,
        placement.num_optimizer_buffers == 1 ? " buffer of " : " buffers of ",
        bytes_text(placement.optimizer_pool_bytes / placement.num_optimizer_buffers), "\n");
  }
  return text;
}

}  // namespace tessera::planner
