// What a person sees while training runs.
//
// On a terminal one line is rewritten, at most ten times a second, and about ten lines stay as the
// history of the run; elsewhere lines are printed: all of a short run, of a long one the first, the
// last and at most one per second between them. With `log_every` the lines that stay are those of
// every so many steps and of the last. Skipped steps are always shown.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cli/metrics.h"
#include "tessera/core/clock.h"

namespace tessera::cli {

struct ProgressOptions {
  std::int64_t num_steps = 0;
  std::int64_t num_done = 0;   // of them, before the run goes on
  std::int64_t log_every = 0;  // steps; 0: not asked for
  bool terminal = false;
  std::size_t width = 80;  // of the terminal: a longer line would wrap and could not be rewritten
  // Receives text as it is to be written, and shows it at once.
  std::function<void(std::string_view text)> print;
};

// For standard output: is it a terminal, and how wide.
ProgressOptions stdout_progress(std::int64_t num_steps, std::int64_t log_every);

class Progress {
 public:
  // `clock` outlives this object; the run begins now.
  Progress(ProgressOptions options, const Clock& clock);
  // Ends an open line, so that what comes next, maybe an error, has its own.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const StepMetrics& metrics);
  // A line of text, of its own.
  void say(const std::string& text);
  // Ends an open line; before a summary, or before somebody else writes.
  void finish();

 private:
  // The line of this step is there when the run is over.
  bool stays(std::int64_t step) const;
  double remaining_s(std::int64_t step) const;

  const ProgressOptions options_;
  const Clock& clock_;
  const std::int64_t start_ns_;
  std::int64_t first_step_end_ns_ = 0;
  std::int64_t shown_ns_ = 0;
  bool line_open_ = false;
};

// "step 3/20  loss 5.4123  norm 1.23  lr 0.001  12.3k tokens/s  310.5 MiB  1:05 left"
// What does not fit into `width` columns is left out, the least important first; step and remaining
// time stay longest.
std::string progress_line(const StepMetrics& metrics, std::int64_t num_steps, double remaining_s,
                          std::size_t width = std::string::npos);

// "950", "12.3k", "4.56M": three digits.
std::string count_text(double count);
// "1,234,567".
std::string grouped(std::int64_t number);
// "0:07", "12:05", "3:02:01".
std::string duration_text(double seconds);

}  // namespace tessera::cli
