#include "cli/default_budgets.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/memory_cost.h"
#include "tessera/planner/memory_planner.h"

namespace tessera::cli {
namespace {

std::int64_t reserve_of(std::int64_t free_bytes) {
  return std::max(free_bytes / 100 * kReservePerCent, kLeastReserveBytes);
}

// What the GPU updates has its gradients there, unlike the CPU's share: where there is no plan with
// the usual share, there may be one without the GPU's.
double fitting_share(const planner::ModelShapes& model, planner::MemoryPlanOptions options,
                     std::int64_t num_micro_batches) {
  try {
    planner::plan_memory(model, options, num_micro_batches);
    return options.cpu_share;
  } catch (const ConfigError&) {
    if (options.cpu_share >= 0) {
      throw;
    }
  }
  options.cpu_share = 1;
  planner::plan_memory(model, options, num_micro_batches);
  return options.cpu_share;
}

}  // namespace

std::string DefaultBudgets::text() const {
  return detail::concat(
      "the GPU has ", approximate_bytes(free_bytes), " free; everything on it takes ",
      approximate_bytes(planned_bytes), ", activations up to ", approximate_bytes(activation_bytes),
      ", and ", approximate_bytes(reserve_bytes),
      " stay in reserve: planned with memory.device = ", approximate_bytes(device_bytes),
      is_host_given ? "" : detail::concat(" and memory.host = ", approximate_bytes(host_bytes)),
      cpu_share < 1 ? "" : ", the update on the CPU", " (--device-budget SIZE",
      is_host_given ? "" : ", --host-budget SIZE",
      " change it; --device-budget unlimited leaves everything on the GPU)\n");
}

std::optional<DefaultBudgets> default_budgets(const planner::ModelShapes& model,
                                              const planner::MemoryPlanOptions& options,
                                              std::int64_t num_micro_batches,
                                              std::int64_t activation_bytes,
                                              const FreeMemory& free) {
  TESSERA_INVARIANT(options.is_discrete && options.device_bytes == planner::kUnlimited,
                    "budgets are chosen for a GPU that has none");
  const planner::MemoryPlan all = planner::plan_memory(model, options, num_micro_batches);
  DefaultBudgets budgets;
  budgets.free_bytes = free.device_bytes;
  budgets.planned_bytes = all.device_memory_bytes();
  budgets.activation_bytes = activation_bytes + all.full_gradient_bytes;
  budgets.reserve_bytes = reserve_of(free.device_bytes);
  budgets.device_bytes = free.device_bytes - budgets.activation_bytes - budgets.reserve_bytes;
  if (budgets.planned_bytes <= budgets.device_bytes) {
    return std::nullopt;
  }
  planner::MemoryPlanOptions limited = options;
  limited.device_bytes = free.device_bytes;
  // Gradients leave it then.
  const std::int64_t kept =
      planner::most_kept_gradients(planner::CutModel(model, limited)) - all.kept_gradient_bytes;
  budgets.activation_bytes += kept;
  budgets.device_bytes -= kept;
  TESSERA_CHECK(budgets.device_bytes > 0, ConfigError, "activations of a micro-batch take up to ",
                approximate_bytes(budgets.activation_bytes), ", with ",
                approximate_bytes(budgets.reserve_bytes), " in reserve more than the ",
                approximate_bytes(free.device_bytes),
                " that the GPU has free; take smaller micro-batches (--batch, --accumulate), or "
                "use --recompute or --loss-chunk");
  budgets.is_host_given = options.host_bytes != planner::kUnlimited;
  budgets.host_bytes =
      budgets.is_host_given
          ? options.host_bytes
          : std::max<std::int64_t>(0, free.host_bytes - reserve_of(free.host_bytes));
  limited.device_bytes = budgets.device_bytes;
  limited.host_bytes = budgets.host_bytes;
  budgets.cpu_share = fitting_share(model, limited, num_micro_batches);
  return budgets;
}

}  // namespace tessera::cli
