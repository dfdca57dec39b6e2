#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kEveryStepUpTo = 50;
constexpr std::int64_t kLineEveryNs = 1'000'000'000;
constexpr std::int64_t kRedrawEveryNs = 100'000'000;
constexpr const char* kEraseToEnd = "\x1b[K";

}  // namespace

std::string count_text(double count) {
  static constexpr std::array<const char*, 5> kSuffixes{"", "k", "M", "G", "T"};
  std::size_t suffix = 0;
  // From 999.5 on three digits would become four.
  while (count >= 999.5 && suffix + 1 < kSuffixes.size()) {
    count /= 1000;
    ++suffix;
  }
  if (suffix == 0) {
    return fmt::format("{:.0f}", count);
  }
  const int decimals = count < 9.995 ? 2 : count < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", count, decimals, kSuffixes[suffix]);
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  const std::int64_t hours = whole / 3600;
  const std::int64_t minutes = whole / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60)
                   : fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string progress_line(const StepMetrics& metrics, std::int64_t num_steps, double remaining_s) {
  // The width of the last number for all, so that columns stand still.
  const std::string total = std::to_string(num_steps);
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.4f}  norm {:.4g}  lr {:.3g}  {:>5} tokens/s  {}  {} left",
      metrics.step + 1, total.size(), total, metrics.loss, metrics.grad_norm, metrics.lr,
      count_text(metrics.tokens_per_s), approximate_bytes(metrics.rss_peak_bytes),
      duration_text(remaining_s));
  if (metrics.skipped) {
    line += fmt::format("  skipped: gradient not finite, loss scale {:g}", metrics.loss_scale);
  }
  return line;
}

ProgressOptions stdout_progress(std::int64_t num_steps) {
  ProgressOptions options;
  options.num_steps = num_steps;
  struct winsize window {};
  options.terminal = ::isatty(STDOUT_FILENO) == 1;
  if (options.terminal && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0) {
    options.width = window.ws_col;
  }
  options.print = [](std::string_view text) { std::cout << text << std::flush; };
  return options;
}

Progress::Progress(ProgressOptions options, const Clock& clock)
    : options_(std::move(options)), clock_(clock), start_ns_(clock.now_ns()) {}

Progress::~Progress() { finish(); }

void Progress::show(const StepMetrics& metrics) {
  const std::int64_t now_ns = clock_.now_ns();
  const std::int64_t num_done = metrics.step + 1;
  if (num_done == 1) {
    first_step_end_ns_ = now_ns;
  }
  const bool first_or_last = num_done == 1 || num_done >= options_.num_steps;
  const bool each = !options_.terminal && options_.num_steps <= kEveryStepUpTo;
  const std::int64_t every_ns = options_.terminal ? kRedrawEveryNs : kLineEveryNs;
  if (!first_or_last && !each && !metrics.skipped && now_ns - shown_ns_ < every_ns) {
    return;
  }
  shown_ns_ = now_ns;
  std::string line = progress_line(metrics, options_.num_steps, remaining_s(num_done));
  if (options_.terminal) {
    // The last column stays free: some terminals wrap as soon as it is written.
    line.resize(std::min(line.size(), std::max<std::size_t>(options_.width, 2) - 1));
    options_.print("\r" + line + kEraseToEnd);
    line_open_ = true;
  } else {
    options_.print(line + "\n");
  }
}

void Progress::finish() {
  if (std::exchange(line_open_, false)) {
    options_.print("\n");
  }
}

// The first step records the order of uses and fills caches: it is left out once there are others.
double Progress::remaining_s(std::int64_t num_done) const {
  const std::int64_t since_ns = num_done > 1 ? first_step_end_ns_ : start_ns_;
  const auto num_timed = static_cast<double>(num_done > 1 ? num_done - 1 : num_done);
  const double step_s = static_cast<double>(clock_.now_ns() - since_ns) * 1e-9 / num_timed;
  return step_s * static_cast<double>(std::max<std::int64_t>(options_.num_steps - num_done, 0));
}

}  // namespace tessera::cli
