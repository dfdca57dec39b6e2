// Runs for `tessera plot`: files of --metrics, read leniently and made small enough for a page.
//
// A file may still be written: a last line without its end is left out. Lines that are not a step's
// object are counted and passed over. A run that went on from an earlier step (the steps of a file
// do not rise) replaces what it had from there on.
//
// Threads: pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

// What the page draws; others of a file are not read.
inline constexpr std::array<std::string_view, 18> kPlotFields{"loss",
                                                              "eval_loss",
                                                              "grad_norm",
                                                              "lr",
                                                              "loss_scale",
                                                              "tokens_per_s",
                                                              "mfu",
                                                              "step_s",
                                                              "forward_s",
                                                              "backward_s",
                                                              "update_s",
                                                              "exposed_wait_s",
                                                              "held_device_bytes",
                                                              "held_pinned_bytes",
                                                              "held_host_bytes",
                                                              "held_nvme_bytes",
                                                              "rss_peak_bytes",
                                                              "device_peak_bytes"};
inline constexpr std::size_t kNumPlotFields = kPlotFields.size();

struct PlotStep {
  std::int64_t step = 0;
  double tokens = 0;  // since the start
  double time_s = 0;  // of all steps up to this one
  bool skipped = false;
  // In the order of kPlotFields; NaN: not there, or not finite.
  std::array<double, kNumPlotFields> values{};
  std::array<bool, kNumPlotFields> is_null{};  // a loss or norm that was not finite
};

struct PlotRun {
  std::string name;
  std::vector<PlotStep> steps;
  std::size_t num_unreadable = 0;  // whole lines
  bool is_torn = false;            // the last line has no end
};

PlotRun read_plot_run(std::string name, std::istream& in);

// At most this many points of a series are drawn; more steps share a point.
inline constexpr std::size_t kMaxPlotPoints = 1500;

// JSON for the page, ASCII. Of steps that share a point it has mean, minimum and maximum.
std::string plot_json(const std::vector<PlotRun>& runs, std::size_t max_points = kMaxPlotPoints);

}  // namespace tessera::cli
