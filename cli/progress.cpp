#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kEveryStepUpTo = 50;
constexpr std::int64_t kLineEveryNs = 1'000'000'000;
constexpr std::int64_t kRedrawEveryNs = 100'000'000;
constexpr std::int64_t kHistoryLines = 10;
constexpr const char* kEraseToEnd = "\x1b[K";
constexpr std::string_view kBetween = "  ";

// A field of the line. Those of the highest number go first when the line is too long.
struct Field {
  int dispensable;
  std::string text;
};

std::string joined(const std::vector<Field>& fields) {
  std::string line;
  for (const Field& field : fields) {
    line += line.empty() ? "" : kBetween;
    line += field.text;
  }
  return line;
}

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

std::string grouped(std::int64_t number) {
  std::string text = std::to_string(number);
  for (std::size_t place = text.size(); place > 3; place -= 3) {
    text.insert(place - 3, ",");
  }
  return text;
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  const std::int64_t hours = whole / 3600;
  const std::int64_t minutes = whole / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60)
                   : fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string progress_line(const StepMetrics& metrics, std::int64_t num_steps, double remaining_s,
                          std::size_t width) {
  // The width of the last number for all, so that columns stand still.
  const std::string total = std::to_string(num_steps);
  std::vector<Field> fields{{0, fmt::format("step {:>{}}/{}", metrics.step, total.size(), total)},
                            {2, fmt::format("loss {:.4f}", metrics.loss)},
                            {4, fmt::format("norm {:.4g}", metrics.grad_norm)},
                            {5, fmt::format("lr {:.3g}", metrics.lr)},
                            {3, fmt::format("{:>5} tokens/s", count_text(metrics.tokens_per_s))},
                            {6, approximate_bytes(metrics.rss_peak_bytes)},
                            {0, duration_text(remaining_s) + " left"}};
  if (metrics.eval_loss) {
    fields.insert(fields.begin() + 2, {1, fmt::format("eval loss {:.4f}", *metrics.eval_loss)});
  }
  if (metrics.skipped) {
    fields.push_back(
        {1, fmt::format("skipped: gradient not finite, loss scale {:g}", metrics.loss_scale)});
  }
  std::string line = joined(fields);
  while (line.size() > width) {
    const auto least = std::max_element(
        fields.begin(), fields.end(),
        [](const Field& a, const Field& b) { return a.dispensable < b.dispensable; });
    if (least->dispensable == 0) {
      line.resize(width);
      break;
    }
    fields.erase(least);
    line = joined(fields);
  }
  return line;
}

ProgressOptions stdout_progress(std::int64_t num_steps, std::int64_t log_every) {
  ProgressOptions options;
  options.num_steps = num_steps;
  options.log_every = log_every;
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

bool Progress::stays(std::int64_t step) const {
  if (step >= options_.num_steps) {
    return true;
  }
  if (options_.log_every > 0) {
    return step % options_.log_every == 0;
  }
  const std::int64_t history = (options_.num_steps + kHistoryLines - 1) / kHistoryLines;
  return options_.terminal && step % std::max<std::int64_t>(history, 1) == 0;
}

void Progress::show(const StepMetrics& metrics) {
  const std::int64_t now_ns = clock_.now_ns();
  const bool is_first = metrics.step == options_.num_done + 1;
  if (is_first) {
    first_step_end_ns_ = now_ns;
  }
  const bool stays_there = stays(metrics.step) || metrics.eval_loss.has_value();
  bool due = stays_there || metrics.skipped;
  if (options_.terminal) {
    due = due || is_first || now_ns - shown_ns_ >= kRedrawEveryNs;
  } else if (options_.log_every == 0) {
    due = due || is_first || options_.num_steps <= kEveryStepUpTo ||
          now_ns - shown_ns_ >= kLineEveryNs;
  }
  if (!due) {
    return;
  }
  shown_ns_ = now_ns;
  const double left_s = remaining_s(metrics.step);
  if (options_.terminal) {
    // The last column stays free: some terminals wrap as soon as it is written.
    const std::size_t width = std::max<std::size_t>(options_.width, 2) - 1;
    options_.print("\r" + progress_line(metrics, options_.num_steps, left_s, width) + kEraseToEnd +
                   (stays_there ? "\n" : ""));
    line_open_ = !stays_there;
  } else {
    options_.print(progress_line(metrics, options_.num_steps, left_s) + "\n");
  }
}

void Progress::say(const std::string& text) {
  finish();
  options_.print(text + "\n");
}

void Progress::finish() {
  if (std::exchange(line_open_, false)) {
    options_.print("\n");
  }
}

// The first step records the order of uses and fills caches: it is left out once there are others.
double Progress::remaining_s(std::int64_t step) const {
  const std::int64_t num_done = step - options_.num_done;
  const std::int64_t since_ns = num_done > 1 ? first_step_end_ns_ : start_ns_;
  const auto num_timed = static_cast<double>(num_done > 1 ? num_done - 1 : num_done);
  const double step_s = static_cast<double>(clock_.now_ns() - since_ns) * 1e-9 / num_timed;
  return step_s * static_cast<double>(std::max<std::int64_t>(options_.num_steps - step, 0));
}

}  // namespace tessera::cli
