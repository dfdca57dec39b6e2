#include "cli/observers.h"

#include <utility>

namespace tessera::cli {

Observers::Observers(ObserverOptions options, const Clock& clock)
    : warn_(std::move(options.warn)), progress_(options.progress, clock) {
  const std::int64_t num_done = options.progress.num_done;
  const auto warn = [this](const std::string& text) { this->warn(text); };
  if (!options.metrics.empty()) {
    metrics_.emplace(options.metrics, num_done, warn);
  }
  if (!options.tensorboard.empty()) {
    tensorboard_.emplace(options.tensorboard, num_done, warn);
  }
}

void Observers::show(const StepMetrics& metrics) {
  if (metrics_) {
    metrics_->append(metrics);
  }
  if (tensorboard_) {
    tensorboard_->append(metrics);
  }
  progress_.show(metrics);
}

void Observers::warn(const std::string& text) {
  progress_.finish();
  if (warn_) {
    warn_(text);
  }
}

}  // namespace tessera::cli
