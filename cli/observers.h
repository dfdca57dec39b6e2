// Those who watch a run, and whom it outlives: the screen, the metrics file, TensorBoard.
//
// Files are opened when this object is made, so that a wrong path is an error before training. From
// then on nothing here throws: see record_file.h.
//
// Threads: one caller at a time.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "cli/metrics.h"
#include "cli/progress.h"
#include "cli/tensorboard.h"

namespace tessera::cli {

struct ObserverOptions {
  ProgressOptions progress;
  // Empty: not wanted.
  std::string metrics;
  std::string tensorboard;
  std::function<void(const std::string& text)> warn;
};

class Observers {
 public:
  // IoError if a file cannot be opened. `clock` outlives this object; the run begins now.
  Observers(ObserverOptions options, const Clock& clock);
  Observers(const Observers&) = delete;
  Observers& operator=(const Observers&) = delete;

  void show(const StepMetrics& metrics);
  // What else is to be seen of the run, each on a line of its own.
  void say(const std::string& text) { progress_.say(text); }
  void warn(const std::string& text);

 private:
  const std::function<void(const std::string& text)> warn_;
  std::optional<MetricsFile> metrics_;
  std::optional<TensorBoardFile> tensorboard_;
  Progress progress_;
};

}  // namespace tessera::cli
