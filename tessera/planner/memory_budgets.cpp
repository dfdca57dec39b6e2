#include "tessera/planner/memory_budgets.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/planner/memory_planner.h"

namespace tessera::planner {
namespace {

// Everything may live on a device from the start where it takes at most one part in so many of
// what is free, and nobody knows what activations take.
constexpr std::int64_t kSmallPart = 4;
// A device budget is found to one part in so many of what is free.
constexpr std::int64_t kBudgetSteps = 1024;

bool is_device_given(const MemoryPlanOptions& options) {
  return options.is_device_given || options.device_bytes != kUnlimited;
}
bool is_host_given(const MemoryPlanOptions& options) {
  return options.is_host_given || options.host_bytes != kUnlimited;
}

std::int64_t without_reserve(std::int64_t free_bytes) {
  return free_bytes == kUnlimited ? kUnlimited : free_bytes - reserve_of(free_bytes);
}

class BudgetFinder {
 public:
  BudgetFinder(const ModelShapes& model, const MemoryPlanOptions& options,
               std::int64_t num_micro_batches, const StepMemory& step, const RankMemory& memory)
      : model_(model),
        options_(options),
        num_micro_batches_(num_micro_batches),
        step_(step),
        memory_(memory),
        device_room_(without_reserve(memory.device.of_rank())),
        host_room_(without_reserve(memory.host.of_rank())) {}

  std::optional<DefaultBudgets> find() const {
    check_given();
    return options_.is_discrete ? find_of_discrete() : find_of_one_memory();
  }

 private:
  MemoryPlan plan(const MemoryPlanOptions& options) const {
    return plan_memory(model_, options, num_micro_batches_);
  }

  // A number that was given may be more than there is.
  void check_given() const {
    const std::int64_t budget =
        options_.is_discrete ? options_.host_bytes : options_.memory_bytes();
    const SharedMemory& host = memory_.host;
    if (budget == kUnlimited || host.of_rank() == kUnlimited || budget <= host.of_rank()) {
      return;
    }
    const std::int64_t bytes = plan(options_).host_memory_bytes();
    TESSERA_CHECK(
        bytes <= host.of_rank(), ConfigError, host.num_ranks,
        host.num_ranks == 1 ? " rank" : " ranks", " of ", approximate_bytes(bytes),
        " each need more memory than the ", approximate_bytes(host.free_bytes),
        " that this machine and its control group have left; lower memory.host to at most ",
        exact_bytes(host.of_rank()), ", or use fewer ranks per machine");
  }

  std::optional<DefaultBudgets> try_options(const MemoryPlanOptions& options) const {
    try {
      DefaultBudgets budgets;
      budgets.plan = plan(options);
      budgets.options = options;
      return budgets;
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

  // The first that has a plan; the refusal of the last if none has.
  DefaultBudgets first_of(const std::vector<MemoryPlanOptions>& all) const {
    for (const MemoryPlanOptions& options : all) {
      if (auto found = try_options(options)) {
        return std::move(*found);
      }
    }
    static_cast<void>(plan(all.back()));
    TESSERA_INVARIANT(false, "options that had no plan have one");
  }

  DefaultBudgets explained(DefaultBudgets budgets, const MemoryPlan& all) const {
    budgets.wanted_device_bytes = options_.is_discrete ? step_.peak_bytes(all) : 0;
    budgets.wanted_host_bytes =
        all.host_memory_bytes() + (options_.is_discrete ? 0 : step_.activation_bytes.value_or(0));
    budgets.memory = memory_;
    return budgets;
  }

  // --- device and host are one memory ---
  std::optional<DefaultBudgets> find_of_one_memory() const {
    if (is_device_given(options_) || is_host_given(options_) || host_room_ == kUnlimited) {
      return std::nullopt;
    }
    const MemoryPlan all = plan(options_);
    const std::int64_t activations = step_.activation_bytes.value_or(0);
    if (all.memory_bytes() <= host_room_ - activations) {
      return std::nullopt;
    }
    std::vector<MemoryPlanOptions> tried;
    for (const std::int64_t bytes :
         {host_room_ - activations, host_room_, memory_.host.of_rank()}) {
      if (bytes > 0) {
        tried.push_back(with_host(options_, bytes));
      }
    }
    return explained(first_of(tried), all);
  }

  MemoryPlanOptions with_host(MemoryPlanOptions options, std::int64_t bytes) const {
    if (!is_host_given(options)) {
      options.host_bytes = bytes;
      options.num_host_ranks = memory_.host.num_ranks;
    }
    return options;
  }
  MemoryPlanOptions with_device(MemoryPlanOptions options, std::int64_t bytes) const {
    if (!is_device_given(options)) {
      options.device_bytes = std::max<std::int64_t>(0, bytes);
      options.num_device_ranks = memory_.device.num_ranks;
    }
    return options;
  }

  // --- a discrete device beside its host ---
  std::optional<DefaultBudgets> find_of_discrete() const {
    const MemoryPlan all = plan(options_);
    const bool is_known = step_.activation_bytes.has_value();
    const std::int64_t taken = step_.peak_bytes(all);
    const bool fits_device =
        is_device_given(options_) || device_room_ == kUnlimited ||
        taken <= (is_known ? device_room_ : memory_.device.of_rank() / kSmallPart);
    const bool fits_host = is_host_given(options_) || host_room_ == kUnlimited ||
                           all.host_memory_bytes() <= host_room_;
    if (fits_device && fits_host) {
      return std::nullopt;
    }
    if (fits_device) {
      return explained(
          first_of({with_host(options_, host_room_), with_host(options_, memory_.host.of_rank())}),
          all);
    }
    return explained(is_known ? find_known() : find_for_first_step(), all);
  }

  DefaultBudgets find_known() const {
    const MemoryPlanOptions in_room = with_host(options_, host_room_);
    const MemoryPlanOptions in_all = with_host(options_, memory_.host.of_rank());
    if (auto found = search_device(in_room)) {
      return std::move(*found);
    }
    if (auto found = search_device(in_all)) {
      return std::move(*found);
    }
    // Either there is no plan at all, or each leaves too little for activations.
    const MemoryPlan most = first_of({with_device(in_all, device_room_)}).plan;
    throw ConfigError(detail::concat(
        "activations and full gradients of a micro-batch take up to ",
        approximate_bytes(step_.peak_bytes(most) - most.device_memory_bytes()), ", with ",
        approximate_bytes(reserve_of(memory_.device.of_rank())),
        " in reserve and what has to be on the device (",
        approximate_bytes(least_device_bytes(in_all)), ") more than the ",
        approximate_bytes(memory_.device.of_rank()),
        " that it has free for a rank; take smaller micro-batches (--batch, --accumulate), "
        "recompute activations (--recompute), or cut the loss (--loss-chunk)"));
  }

  // The largest budget whose plan leaves enough for activations and full gradients, to one step.
  std::optional<DefaultBudgets> search_device(const MemoryPlanOptions& options) const {
    std::optional<DefaultBudgets> best;
    std::int64_t low = 0;  // too small for a plan, or as good as the best
    std::int64_t high = device_room_ + 1;
    const std::int64_t step = std::max<std::int64_t>(1, device_room_ / kBudgetSteps);
    while (high - low > step) {
      const std::int64_t middle = high > device_room_ ? device_room_ : low + (high - low) / 2;
      std::optional<DefaultBudgets> found = try_options(with_device(options, middle));
      if (found && step_.peak_bytes(found->plan) > device_room_) {
        high = middle;
        continue;
      }
      low = middle;
      best = found ? std::move(found) : std::move(best);
    }
    return best;
  }

  std::int64_t least_device_bytes(const MemoryPlanOptions& options) const {
    std::int64_t low = 0;
    std::int64_t high = device_room_;
    while (high - low > std::max<std::int64_t>(1, device_room_ / kBudgetSteps)) {
      const std::int64_t middle = low + (high - low) / 2;
      (try_options(with_device(options, middle)) ? high : low) = middle;
    }
    return high;
  }

  DefaultBudgets find_for_first_step() const {
    const std::int64_t free_bytes = memory_.device.of_rank();
    if (!options_.parameters && !options_.optimizer) {
      MemoryPlanOptions in_host = with_host(options_, host_room_);
      in_host.parameters = Tier::kHost;
      in_host.optimizer = Tier::kHost;
      in_host.has_nvme = false;  // what has gone there does not come back
      for (const std::int64_t bytes : {free_bytes / kSmallPart, free_bytes / 2, device_room_}) {
        if (auto found = try_options(with_device(in_host, bytes))) {
          found->is_for_first_step = true;
          return std::move(*found);
        }
      }
    }
    // Activations have the other half.
    std::vector<MemoryPlanOptions> tried;
    for (const std::int64_t bytes : {free_bytes / 2, device_room_}) {
      tried.push_back(with_device(with_host(options_, host_room_), bytes));
      tried.push_back(with_device(with_host(options_, memory_.host.of_rank()), bytes));
    }
    return first_of(tried);
  }

  const ModelShapes& model_;
  const MemoryPlanOptions& options_;
  const std::int64_t num_micro_batches_;
  const StepMemory& step_;
  const RankMemory& memory_;
  const std::int64_t device_room_;  // of this rank, without the reserve
  const std::int64_t host_room_;
};

std::string share_text(const SharedMemory& memory) {
  return memory.num_ranks == 1 ? approximate_bytes(memory.free_bytes)
                               : detail::concat(approximate_bytes(memory.of_rank()),
                                                " for each of ", memory.num_ranks, " ranks");
}

}  // namespace

std::int64_t reserve_of(std::int64_t free_bytes) {
  return std::max(free_bytes / 100 * kReservePerCent, std::min(kLeastReserveBytes, free_bytes / 8));
}

std::int64_t save_buffer_of(std::int64_t free_bytes, std::int64_t had_bytes, int num_local_ranks) {
  const std::int64_t without = free_bytes + had_bytes * num_local_ranks;
  return std::max<std::int64_t>(without - reserve_of(without), 0) / (2 * num_local_ranks);
}

RankMemory least_memory(std::span<const RankMemory> ranks) {
  TESSERA_INVARIANT(!ranks.empty(), "memory of no rank");
  RankMemory least = ranks.front();
  for (const RankMemory& each : ranks) {
    least.device = each.device.of_rank() < least.device.of_rank() ? each.device : least.device;
    least.host = each.host.of_rank() < least.host.of_rank() ? each.host : least.host;
  }
  return least;
}

std::int64_t StepMemory::peak_bytes(const MemoryPlan& plan) const {
  return device_peak_bytes
             ? device_peak_bytes(plan)
             : plan.device_memory_bytes() + plan.full_gradient_bytes + activation_bytes.value_or(0);
}

std::string DefaultBudgets::text() const {
  const bool has_device = options.num_device_ranks > 0;
  const bool has_host = options.num_host_ranks > 0;
  std::string text;
  if (has_device) {
    text = detail::concat("the device has ", share_text(memory.device),
                          " free; everything on it takes ", approximate_bytes(wanted_device_bytes));
  } else {
    text = detail::concat("the host has ", share_text(memory.host), " free; everything takes ",
                          approximate_bytes(wanted_host_bytes));
  }
  text += is_for_first_step
              ? ": the first step runs with shards in host memory, placement is fixed "
                "after it, when activations are measured; planned with "
              : ": planned with ";
  text += has_device ? "memory.device = " + approximate_bytes(options.device_bytes) : "";
  text += has_device && has_host ? " and " : "";
  text += has_host ? "memory.host = " + approximate_bytes(options.host_bytes) : "";
  return detail::concat(text, has_device ? " (--device-budget SIZE" : " (--host-budget SIZE",
                        has_device && has_host ? ", --host-budget SIZE change it" : " changes it",
                        has_device ? "; --device-budget unlimited leaves everything on the device)"
                                   : "; --host-budget unlimited turns it off)");
}

std::optional<DefaultBudgets> default_budgets(const ModelShapes& model,
                                              const MemoryPlanOptions& options,
                                              std::int64_t num_micro_batches,
                                              const StepMemory& step, const RankMemory& memory) {
  return BudgetFinder(model, options, num_micro_batches, step, memory).find();
}

}  // namespace tessera::planner
