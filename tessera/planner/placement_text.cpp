#include <algorithm>
#include <array>
#include <cstdio>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/placement.h"

namespace tessera::planner {
namespace {

std::string bytes_or_dash(std::int64_t bytes) {
  return bytes == 0 ? "-" : approximate_bytes(bytes);
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

std::string budget_text(std::int64_t bytes) {
  return bytes == kUnlimited ? "-" : approximate_bytes(bytes);
}

std::string number_text(const char* format, double number) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), format, number);
  return text.data();
}

// Who updates, and what passes between host and device for it.
std::string device_text(const Placement& placement) {
  const UpdateNumel& update = placement.update;
  const auto part = [&update](std::int64_t numel) {
    const auto all = static_cast<double>(std::max<std::int64_t>(1, update.all()));
    return number_text("%.1f %%", 100 * static_cast<double>(numel) / all);
  };
  std::string text =
      "update: " + part(update.resident) + " on the device, with states that live there";
  if (update.streamed > 0) {
    text += detail::concat(
        "; ", part(update.streamed), " on the device, with states that come to it (",
        placement.num_update_slots, placement.num_update_slots == 1 ? " slot of " : " slots of ",
        bytes_or_dash(placement.update_slot_bytes), ")");
  }
  text += update.processor > 0 ? "; " + part(update.processor) + " on the processor\n" : "\n";
  if (placement.host_memory_bytes() > 0 && placement.shard_numel > 0) {
    text += "host memory per parameter: " +
            number_text("%.2f B\n", static_cast<double>(placement.host_memory_bytes()) /
                                        static_cast<double>(placement.shard_numel));
  }
  if (placement.link.h2d + placement.link.d2h > 0) {
    text += detail::concat("host link per step: ", bytes_or_dash(placement.link.h2d), " up, ",
                           bytes_or_dash(placement.link.d2h), " down\n");
  }
  return text;
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
      text += row(words_of(role), has_device ? bytes_or_dash(on_device(role)) : "",
                  bytes_or_dash(memory), bytes_or_dash(nvme));
    }
  }
  text += row("all", has_device ? bytes_or_dash(placement.device_memory_bytes()) : "",
              bytes_or_dash(placement.host_memory_bytes()),
              bytes_or_dash(placement.bytes(Tier::kNvme)));
  const std::int64_t host_budget =
      has_device ? placement.host_budget_bytes : placement.memory_budget_bytes;
  if (placement.memory_budget_bytes != kUnlimited || host_budget != kUnlimited) {
    text += row("budget", has_device ? budget_text(placement.memory_budget_bytes) : "",
                budget_text(host_budget), "");
  }
  text += detail::concat("besides, torch's: activations, and full gradients (one parameter's",
                         placement.kept_gradient_bytes > 0 ? ", and those still on their way" : "",
                         "), up to ", bytes_or_dash(placement.full_gradient_bytes), "\n");
  text += has_device ? device_text(placement) : "";
  if (!placement.uses_nvme) {
    return text;
  }
  const StepBytes& step = placement.step;
  text += "\n" + row("NVMe per step and rank", "read", "written", "");
  text += row("parameters", bytes_or_dash(step.parameters_read),
              bytes_or_dash(step.parameters_written), "");
  text += row("gradients", bytes_or_dash(step.gradients_read),
              bytes_or_dash(step.gradients_written), "");
  text += row("update", bytes_or_dash(step.states_read), bytes_or_dash(step.states_written), "");
  text += row("all", bytes_or_dash(step.read()), bytes_or_dash(step.written()), "");
  if (placement.num_optimizer_buffers > 0) {
    text += detail::concat(
        "sub-groups of ", bytes_or_dash(4 * placement.sub_group_numel), " of masters in ",
        placement.num_optimizer_buffers,
        placement.num_optimizer_buffers == 1 ? " buffer of " : " buffers of ",
        bytes_or_dash(placement.optimizer_pool_bytes / placement.num_optimizer_buffers), "\n");
  }
  return text;
}

}  // namespace tessera::planner
