#include "cli/train_summary.h"

#include <algorithm>

#include <fmt/format.h>

#include "cli/progress.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

std::string time_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

// " (4.19M trained, 6.86B frozen as int4 blocks)"; empty where all are trained.
std::string frozen_text(const RunHead& head) {
  if (head.num_frozen == 0) {
    return "";
  }
  const auto num_trained = static_cast<double>(head.num_params - head.num_frozen);
  return fmt::format(" ({} trained, {} frozen{})", count_text(num_trained),
                     count_text(static_cast<double>(head.num_frozen)),
                     head.frozen_bits > 0 ? fmt::format(" as int{} blocks", head.frozen_bits) : "");
}

}  // namespace

std::string head_text(const RunHead& head) {
  const std::string ranks = head.unsharded
                                ? "unsharded"
                                : fmt::format("sharded over {} rank{} ({})", head.num_ranks,
                                              plural(head.num_ranks), head.backend);
  const std::string micro_batches =
      head.accumulate == 1 ? "" : fmt::format(" in {} micro-batches", head.accumulate);
  std::string text = fmt::format("{}: {} parameters in {}{}, {} on {}, {} thread{}\n", head.preset,
                                 count_text(static_cast<double>(head.num_params)), head.precision,
                                 frozen_text(head), ranks, head.device, head.num_threads,
                                 plural(head.num_threads)) +
                     fmt::format("{} step{} of {} sequence{} of {} tokens{}, data: {}\n",
                                 head.num_steps, plural(head.num_steps), head.batch,
                                 plural(head.batch), head.sequence, micro_batches, head.data);
  if (head.num_epochs > 0) {
    const std::int64_t left_out = head.sequences_per_epoch % head.batch;
    text +=
        fmt::format("{} epoch{} of {} steps over {} sequences, without {} that fill{} no batch\n",
                    head.num_epochs, plural(head.num_epochs), head.sequences_per_epoch / head.batch,
                    head.sequences_per_epoch, left_out, left_out == 1 ? "s" : "");
  }
  if (head.num_evaluated > 0) {
    text += fmt::format("evaluated on {} sequence{}, data: {}\n", head.num_evaluated,
                        plural(head.num_evaluated), head.eval_data);
  }
  return text;
}

std::string verified_text(const RunHead& head, Against against, bool equal) {
  const char* const with = head.num_ranks == 1          ? "unsharded training"
                           : against == Against::kTurns ? "unsharded training of the ranks' "
                                                          "micro-batches in turn"
                                                        : "the plain run in one process";
  return fmt::format("verified: {} step{} of {} rank{} in {} equal {}{}\n", head.num_steps,
                     plural(head.num_steps), head.num_ranks, plural(head.num_ranks), head.precision,
                     with, equal ? ", bit for bit" : " within the bounds");
}

std::int64_t ModelBytes::unsharded(Role role) const {
  const bool has_master = dtype != DType::kFloat32;
  switch (role) {
    case Role::kShard:
      return num_params * static_cast<std::int64_t>(bytes_of(dtype));
    case Role::kGradient:
      return num_trainable * static_cast<std::int64_t>(sizeof(float));
    case Role::kOptimizer:
      return num_trainable * static_cast<std::int64_t>(sizeof(float)) *
             (num_states + (has_master ? 1 : 0));
    default:
      return 0;
  }
}

void RunTotals::add(const StepMetrics& metrics) {
  if (step_s_.empty()) {
    first_loss_ = metrics.loss;
  }
  last_loss_ = metrics.loss;
  step_s_.push_back(metrics.step_s);
  num_skipped_ += metrics.skipped ? 1 : 0;
  num_tokens_ += metrics.tokens_per_s * metrics.step_s;
  total_s_ += metrics.step_s;
  exposed_wait_s_ += metrics.exposed_wait_s;
  prefetch_hits_ += metrics.prefetch_hits;
  prefetch_misses_ += metrics.prefetch_misses;
  full_bytes_peak_ = std::max(full_bytes_peak_, metrics.full_bytes_peak);
}

double RunTotals::median_step_s() const {
  if (step_s_.empty()) {
    return 0;
  }
  std::vector<double> sorted = step_s_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (sorted.size() % 2 == 1) {
    return *middle;
  }
  return (*middle + *std::max_element(sorted.begin(), middle)) / 2;
}

double RunTotals::tokens_per_s() const { return total_s_ > 0 ? num_tokens_ / total_s_ : 0; }

std::string RunTotals::text() const {
  const auto num_gathered = prefetch_hits_ + prefetch_misses_;
  std::string text = fmt::format("{} steps in {}: loss {:.4f} -> {:.4f}", num_steps(),
                                 time_text(total_s_), first_loss_, last_loss_);
  if (num_skipped_ > 0) {
    text += fmt::format(", {} skipped", num_skipped_);
  }
  text += fmt::format("\n{:<16}{} tokens/s, median step {}\n", "speed", count_text(tokens_per_s()),
                      time_text(median_step_s()));
  if (num_gathered > 0) {
    text += fmt::format(
        "{:<16}{:.1f} % of {} gathered parameters were on their way before use\n", "prefetch",
        100 * static_cast<double>(prefetch_hits_) / static_cast<double>(num_gathered),
        num_gathered);
  }
  if (num_gathered > 0 || exposed_wait_s_ > 0) {
    text += fmt::format("{:<16}{} per step, {:.1f} % of the time\n", "exposed wait",
                        time_text(exposed_wait_s_ / static_cast<double>(num_steps())),
                        100 * exposed_wait_s_ / total_s_);
  }
  // More than the plan has for gathered ones where shards are full parameters and used in place.
  text += fmt::format("{:<16}{} of full parameters at once, gathered or in place\n", "in use",
                      approximate_bytes(full_bytes_peak_));
  return text;
}

void NvmeTotals::add(Role role, std::uint64_t read_bytes, std::uint64_t written_bytes) {
  Bytes& bytes = roles_[static_cast<std::size_t>(role)];
  bytes.read += read_bytes;
  bytes.written += written_bytes;
  step_read_ += read_bytes;
  step_written_ += written_bytes;
}

void NvmeTotals::end_step() {
  step_read_ = 0;
  step_written_ = 0;
  ++num_steps_;
}

std::uint64_t NvmeTotals::read_bytes(Role role) const {
  return roles_[static_cast<std::size_t>(role)].read / std::max<std::uint64_t>(1, num_steps_);
}

std::uint64_t NvmeTotals::written_bytes(Role role) const {
  return roles_[static_cast<std::size_t>(role)].written / std::max<std::uint64_t>(1, num_steps_);
}

std::string pinned_text(const device::PinStats& pins) {
  return pins.bytes == 0 ? ""
                         : fmt::format("pinned: {} of host memory, which took {}\n",
                                       approximate_bytes(pins.bytes), time_text(pins.seconds));
}

std::string places_text(const planner::MemoryPlan& placement, const Ledger& ledger,
                        const NvmeTotals& nvme) {
  constexpr const char* kLine = "{:<8}{:<12}{:>12}{:>14}{:>14}{:>14}\n";
  std::string text = "what went where\n" + fmt::format(kLine, "tier", "role", "planned",
                                                       "held at most", "read/step", "written/step");
  for (const planner::LedgerLine& line : placement.ledger_with_groups()) {
    const bool moves = line.tier == Tier::kNvme;
    text += fmt::format(
        kLine, to_string(line.tier), to_string(line.role), approximate_bytes(line.bytes),
        approximate_bytes(static_cast<std::int64_t>(ledger.peak_bytes(line.tier, line.role))),
        moves ? approximate_bytes(nvme.read_bytes(line.role)) : "-",
        moves ? approximate_bytes(nvme.written_bytes(line.role)) : "-");
  }
  return text;
}

std::string memory_text(const ModelBytes& model, const Ledger& ledger) {
  constexpr const char* kLine = "{:<8}{:<12}{:>12}{:>12}{:>12}\n";
  std::string text = fmt::format(kLine, "tier", "role", "now", "peak", "unsharded");
  std::int64_t now = 0;
  std::int64_t unsharded = 0;
  for (std::size_t role_index = 0; role_index < kNumRoles; ++role_index) {
    const auto role = static_cast<Role>(role_index);
    // Shown once, beside the first tier that holds any of it.
    std::int64_t beside = model.unsharded(role);
    unsharded += beside;
    for (std::size_t tier_index = 0; tier_index < kNumTiers; ++tier_index) {
      const auto tier = static_cast<Tier>(tier_index);
      if (ledger.peak_bytes(tier, role) == 0) {
        continue;
      }
      const auto current = static_cast<std::int64_t>(ledger.current_bytes(tier, role));
      now += current;
      text +=
          fmt::format(kLine, to_string(tier), to_string(role), approximate_bytes(current),
                      approximate_bytes(static_cast<std::int64_t>(ledger.peak_bytes(tier, role))),
                      beside > 0 ? approximate_bytes(beside) : "-");
      beside = 0;
    }
    if (beside > 0) {
      text += fmt::format(kLine, "-", to_string(role), "-", "-", approximate_bytes(beside));
    }
  }
  text += fmt::format(kLine, "all", "", approximate_bytes(now), "", approximate_bytes(unsharded));
  if (now > unsharded) {
    text +=
        "more than unsharded: beside so small a model, gathered parameters, buckets and buffers "
        "weigh more than sharding saves\n";
  }
  return text;
}

}  // namespace tessera::cli
