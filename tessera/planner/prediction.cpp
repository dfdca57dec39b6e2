#include "tessera/planner/prediction.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::planner {
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

// "2.1 GiB read and written at 1.5 GiB/s".
struct Share {
  double bytes = 0;
  double rate = 1;
  const char* how = "";

  double seconds() const { return bytes / rate; }
  std::string text() const {
    return detail::concat(approximate_bytes(static_cast<std::uint64_t>(bytes)), " ", how, " at ",
                          rate_text(rate));
  }
};

}  // namespace

Prediction predict_step(const Placement& placement, const StepRates& rates) {
  TESSERA_INVARIANT(rates.read_bytes_per_s > 0 && rates.write_bytes_per_s > 0 &&
                        rates.mixed_bytes_per_s > 0 && rates.num_local_ranks > 0,
                    "rates of ", rates.read_bytes_per_s, ", ", rates.write_bytes_per_s, " and ",
                    rates.mixed_bytes_per_s, " bytes per second for ", rates.num_local_ranks,
                    " ranks");
  const double ranks = rates.num_local_ranks;
  const double read = ranks * static_cast<double>(placement.step.read());
  const double written = ranks * static_cast<double>(placement.step.written());
  const double both = std::min(read, written);
  const std::array<Share, 3> shares{
      Share{2 * both, rates.mixed_bytes_per_s, "read and written at once"},
      Share{read - both, rates.read_bytes_per_s, "read"},
      Share{written - both, rates.write_bytes_per_s, "written"}};
  Prediction prediction;
  std::string sum;
  for (const Share& share : shares) {
    prediction.io_s += share.seconds();
    if (share.bytes > 0) {
      sum += (sum.empty() ? "" : " + ") + share.text();
    }
  }
  prediction.processor_s = rates.compute_s + rates.update_s;
  prediction.step_s = std::max(prediction.io_s, prediction.processor_s);
  prediction.is_io_bound = prediction.io_s > prediction.processor_s;
  const std::string of_ranks =
      rates.num_local_ranks == 1
          ? ""
          : detail::concat(" of ", rates.num_local_ranks, " ranks on one machine");
  prediction.text =
      detail::concat("predicted step  ", seconds_text(prediction.step_s), ", bound by ",
                     prediction.is_io_bound ? "the disk" : "the processor", "\n  disk          ",
                     seconds_text(prediction.io_s), ": ", sum.empty() ? "nothing" : sum, of_ranks,
                     "\n  processor     ", seconds_text(prediction.processor_s), ": ",
                     seconds_text(rates.compute_s), " forward and backward + ",
                     seconds_text(rates.update_s), " update\n");
  return prediction;
}

}  // namespace tessera::planner
