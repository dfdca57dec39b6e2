#include "cli/metrics.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/device/shared_heap.h"

namespace tessera::cli {
namespace {

class JsonObject {
 public:
  void add(std::string_view name, double value) {
    std::array<char, 32> digits{};
    std::snprintf(digits.data(), digits.size(), "%.17g", value);
    add_text(name, std::isfinite(value) ? digits.data() : "null");
  }
  void add(std::string_view name, std::int64_t value) { add_text(name, std::to_string(value)); }
  void add(std::string_view name, std::uint64_t value) { add_text(name, std::to_string(value)); }
  void add(std::string_view name, bool value) { add_text(name, value ? "true" : "false"); }
  void add(std::string_view name, const std::string& value) {
    add_text(name, nlohmann::json(value).dump());
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  void add_text(std::string_view name, const std::string& value) {
    text_ += text_.empty() ? "\"" : ", \"";
    text_ += name;
    text_ += "\": " + value;
  }

  std::string text_;
};

// Of a file of metrics: its whole lines up to the last of a step that is not beyond `num_done`.
std::int64_t bytes_up_to(const std::string& path, std::int64_t num_done) {
  std::error_code ignored;
  if (num_done == 0 || !std::filesystem::is_regular_file(path, ignored)) {
    return 0;
  }
  std::ifstream in(path, std::ios::binary);
  std::int64_t end = 0;
  std::int64_t kept = 0;
  for (std::string line; std::getline(in, line) && !in.eof();) {
    end += static_cast<std::int64_t>(line.size()) + 1;
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto step = object.is_object() ? object.find("step") : object.end();
    if (step == object.end() || !step->is_number_integer()) {
      continue;
    }
    if (step->get<std::int64_t>() > num_done) {
      break;
    }
    kept = end;
  }
  return kept;
}

}  // namespace

std::array<TierBytes, kNumTiers> held_bytes(const Ledger& ledger) {
  std::array<TierBytes, kNumTiers> held{};
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    held[tier].now = static_cast<std::int64_t>(ledger.current_bytes(static_cast<Tier>(tier)));
    held[tier].peak = static_cast<std::int64_t>(ledger.peak_bytes(static_cast<Tier>(tier)));
  }
  return held;
}

std::string metrics_json(const StepMetrics& metrics) {
  JsonObject object;
  object.add("step", metrics.step);
  object.add("loss", metrics.loss);
  if (metrics.eval_loss) {
    object.add("eval_loss", *metrics.eval_loss);
  }
  object.add("grad_norm", metrics.grad_norm);
  object.add("lr", metrics.lr);
  object.add("skipped", metrics.skipped);
  object.add("loss_scale", metrics.loss_scale);
  object.add("tokens", metrics.tokens);
  object.add("step_s", metrics.step_s);
  object.add("forward_s", metrics.forward_s);
  object.add("backward_s", metrics.backward_s);
  object.add("update_s", metrics.update_s);
  object.add("tokens_per_s", metrics.tokens_per_s);
  object.add("mfu", metrics.mfu);
  object.add("rss_peak_bytes", metrics.rss_peak_bytes);
  object.add("full_bytes_peak", metrics.full_bytes_peak);
  object.add("gathered_bytes", metrics.gathered_bytes);
  object.add("reduced_bytes", metrics.reduced_bytes);
  if (metrics.grad_quant_error) {
    object.add("grad_quant_error", *metrics.grad_quant_error);
    object.add("grad_quant_worst", metrics.grad_quant_worst);
  }
  object.add("sent_inside_bytes", metrics.sent_inside_bytes);
  object.add("sent_across_bytes", metrics.sent_across_bytes);
  if (!metrics.weight_quant_error_param.empty()) {
    object.add("weight_quant_error", metrics.weight_quant_error);
    object.add("weight_quant_error_param", metrics.weight_quant_error_param);
  }
  object.add("prefetch_hits", metrics.prefetch_hits);
  object.add("prefetch_misses", metrics.prefetch_misses);
  object.add("exposed_wait_s", metrics.exposed_wait_s);
  object.add("nvme_read_bytes", metrics.nvme_read_bytes);
  object.add("nvme_written_bytes", metrics.nvme_written_bytes);
  object.add("device_peak_bytes", metrics.device_peak_bytes);
  object.add("h2d_bytes", metrics.h2d_bytes);
  object.add("d2h_bytes", metrics.d2h_bytes);
  object.add("trainable_params", metrics.num_trainable);
  object.add("frozen_params", metrics.num_frozen);
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    const std::string name = "held_" + std::string(to_string(static_cast<Tier>(tier)));
    object.add(name + "_bytes", metrics.held[tier].now);
    object.add(name + "_peak_bytes", metrics.held[tier].peak);
  }
  return object.text();
}

MetricsFile::MetricsFile(const std::string& path, std::int64_t num_done,
                         std::function<void(const std::string& text)> warn)
    : file_({"--metrics", path, bytes_up_to(path, num_done), std::move(warn)}) {}

std::int64_t rss_peak_bytes() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  const std::int64_t rss = std::int64_t{usage.ru_maxrss} * 1024;  // Linux counts KiB
  if (device::SharedHeap::current() == nullptr) {
    return rss;
  }
  // Ranks that read each other's memory have all of it resident: each counts its share. The kernel
  // keeps no peak of that.
  static std::int64_t peak = 0;
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if (word == "Pss:" && file >> kib) {
      peak = std::max(peak, kib * 1024);
      return peak;
    }
  }
  return rss;
}

}  // namespace tessera::cli
