#include "cli/prediction.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

std::string seconds_text(double seconds) {
  std::array<char, 40> text{};
  if (seconds < 1) {
    std::snprintf(text.data(), text.size(), "%.3g ms", seconds * 1e3);
  } else {
    std::snprintf(text.data(), text.size(), "%.3g s", seconds);
  }
  return text.data();
}

std::string rate_text(double bytes_per_s) {
  return approximate_bytes(static_cast<std::uint64_t>(bytes_per_s)) + "/s";
}

// Of all ranks on the disk.
struct Traffic {
  double read = 0;
  double written = 0;
};

double disk_s(const Traffic& bytes, const StepRates& rates) {
  const double both = std::min(bytes.read, bytes.written);
  return 2 * both / rates.mixed_bytes_per_s + (bytes.read - both) / rates.read_bytes_per_s +
         (bytes.written - both) / rates.write_bytes_per_s;
}

std::string disk_text(const Traffic& bytes, double seconds) {
  const auto text = [](double each) { return approximate_bytes(static_cast<std::uint64_t>(each)); };
  return detail::concat(text(bytes.read), " read, ", text(bytes.written), " written, ",
                        seconds_text(seconds));
}

// Forward's share of forward and backward.
constexpr double kForwardShare = 1.0 / 3;

}  // namespace

Prediction predict_step(const planner::MemoryPlan& plan, const StepRates& rates) {
  TESSERA_INVARIANT(rates.read_bytes_per_s > 0 && rates.write_bytes_per_s > 0 &&
                        rates.mixed_bytes_per_s > 0 && rates.num_local_ranks > 0,
                    "rates of ", rates.read_bytes_per_s, ", ", rates.write_bytes_per_s, " and ",
                    rates.mixed_bytes_per_s, " bytes per second for ", rates.num_local_ranks,
                    " ranks");
  const double ranks = rates.num_local_ranks;
  const double micro_batches = rates.num_micro_batches;
  const planner::StepBytes& step = plan.step;
  // One forward of its micro-batches reads at most half of what one micro-batch does, less what the
  // update hands over; the update reads each gradient as often as one micro-batch writes it.
  const auto handed_over = static_cast<double>(step.parameters_from_update);
  const double forward_read =
      std::max(0.0, static_cast<double>(step.parameters_read) / (2 * micro_batches) - handed_over);
  const Traffic update{
      ranks * (static_cast<double>(step.states_read) +
               static_cast<double>(step.gradients_read) / micro_batches + forward_read),
      ranks * static_cast<double>(step.states_written + step.parameters_written)};
  const Traffic rest{ranks * (static_cast<double>(step.read()) - handed_over) - update.read,
                     ranks * static_cast<double>(step.written()) - update.written};
  const double update_io_s = disk_s(update, rates);
  const double rest_io_s = disk_s(rest, rates);
  const double forward_s = rates.compute_s * kForwardShare / micro_batches;
  Prediction prediction;
  prediction.io_s = update_io_s + rest_io_s;
  prediction.cpu_s = rates.compute_s + rates.update_s;
  prediction.step_s = std::max(update_io_s, forward_s + rates.update_s) +
                      std::max(rest_io_s, rates.compute_s - forward_s);
  prediction.is_io_bound = prediction.io_s > prediction.cpu_s;
  const std::string of_ranks =
      rates.num_local_ranks == 1
          ? ""
          : detail::concat(" (of ", rates.num_local_ranks, " ranks on one machine)");
  prediction.text = detail::concat(
      "predicted step    ", seconds_text(prediction.step_s), ", bound by ",
      prediction.is_io_bound ? "the disk" : "the CPU", "\n  disk", of_ranks,
      ": update and forward ", disk_text(update, update_io_s), "; rest ",
      disk_text(rest, rest_io_s), "; at ", rate_text(rates.read_bytes_per_s), " read, ",
      rate_text(rates.write_bytes_per_s), " written, ", rate_text(rates.mixed_bytes_per_s),
      " of both\n  CPU: ", seconds_text(rates.compute_s), " forward and backward + ",
      seconds_text(rates.update_s), " update\n");
  return prediction;
}

}  // namespace tessera::cli
