// The numbers of every step, as JSON lines that programs read.
//
// A metrics file can be read while training runs: an old one is emptied at the start, then each
// step adds one whole line, which is flushed. Numbers have all digits of their type, so that runs
// can be compared to the bit; a number that JSON has no word for (a norm of an overflow) is null.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace tessera::cli {

// One step of this rank; bytes of collectives are those that it sent.
struct StepMetrics {
  std::int64_t step = 0;  // from 0
  double loss = 0;
  double grad_norm = 0;  // before clipping
  double lr = 0;
  bool skipped = false;
  double loss_scale = 1;
  double step_s = 0;  // the whole step, data included
  double tokens_per_s = 0;
  std::int64_t rss_peak_bytes = 0;   // of the process, so far
  std::int64_t full_bytes_peak = 0;  // gathered parameters at once
  std::uint64_t gathered_bytes = 0;
  std::uint64_t reduced_bytes = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  double exposed_wait_s = 0;
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_written_bytes = 0;
  // On a device with memory of its own: the most of it that torch and the engine held together,
  // so far, at most; and what crossed the link to the host.
  std::int64_t device_peak_bytes = 0;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
};

// One JSON object, without a newline.
std::string metrics_json(const StepMetrics& metrics);

class MetricsFile {
 public:
  // Empties what is there. IoError if the file cannot be opened.
  explicit MetricsFile(std::string path);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // IoError with the path if it cannot be written.
  void append(const StepMetrics& metrics);

 private:
  const std::string path_;
  std::FILE* const file_;
};

// The largest resident set of this process so far.
std::int64_t rss_peak_bytes();

}  // namespace tessera::cli
