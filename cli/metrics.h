// The numbers of every step, as JSON lines that programs read; docs/metrics.md has the table.
//
// A metrics file can be read while training runs: an old one is emptied at the start, or, where the
// run goes on from a checkpoint, cut behind the step at which it does; then each step adds one
// whole line at once. Numbers have all digits of their type, so that runs can be compared to the
// bit; a number that JSON has no word for (a norm of an overflow), or that is not known, is null.
//
// Threads: one caller at a time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "cli/record_file.h"
#include "tessera/core/ledger.h"

namespace tessera::cli {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// What the library holds in one tier, by the ledger.
struct TierBytes {
  std::int64_t now = 0;
  std::int64_t peak = 0;  // since the start
};

// One step of this rank; bytes of collectives are those that it sent.
struct StepMetrics {
  std::int64_t step = 1;  // from 1
  double loss = 0;
  std::optional<double> eval_loss;  // of --eval-data after this step, where it was evaluated
  double grad_norm = 0;             // before clipping
  double lr = 0;
  bool skipped = false;
  double loss_scale = 1;
  std::int64_t tokens = 0;  // of all ranks, since the start
  double step_s = 0;        // the whole step, data included
  // Parts of step_s, see StepPhases; what is missing to it is the data.
  double forward_s = 0;
  double backward_s = 0;
  double update_s = 0;
  double tokens_per_s = 0;
  double mfu = kUnknown;             // share of the devices' peak, see cli/device_peak.h
  std::int64_t rss_peak_bytes = 0;   // of the process, so far
  std::int64_t full_bytes_peak = 0;  // gathered parameters at once
  std::uint64_t gathered_bytes = 0;
  std::uint64_t reduced_bytes = 0;
  std::optional<double> grad_quant_error;  // relative; none: gradients are reduced exactly
  std::string grad_quant_worst;            // the parameter with the largest
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  double exposed_wait_s = 0;
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_written_bytes = 0;
  // On a device with memory of its own: the most of it that torch and the engine held together,
  // so far, at most; and what crossed the link to the host.
  std::int64_t device_peak_bytes = 0;
  std::uint64_t sent_inside_bytes = 0;
  std::uint64_t sent_across_bytes = 0;
  // Of parameters that are gathered quantised; no name: none is.
  double weight_quant_error = 0;
  std::string weight_quant_error_param;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  // Elements of the whole model.
  std::int64_t num_trainable = 0;
  std::int64_t num_frozen = 0;
  std::array<TierBytes, kNumTiers> held{};
};

std::array<TierBytes, kNumTiers> held_bytes(const Ledger& ledger);

// One JSON object, without a newline.
std::string metrics_json(const StepMetrics& metrics);

class MetricsFile {
 public:
  // Keeps the lines of steps up to `num_done`, those before the run goes on; 0: none. IoError if
  // the file cannot be opened; later a failure is one `warn`.
  MetricsFile(const std::string& path, std::int64_t num_done,
              std::function<void(const std::string& text)> warn);

  // False: the line is not in the file.
  bool append(const StepMetrics& metrics) { return file_.append(metrics_json(metrics) + "\n"); }

 private:
  RecordFile file_;
};

// The largest resident set of this process so far. Where ranks share memory: the largest
// proportional set at the times of these calls, which are one thread's.
std::int64_t rss_peak_bytes();

}  // namespace tessera::cli
