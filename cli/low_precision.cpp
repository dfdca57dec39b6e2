#include "cli/low_precision.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <span>
#include <sstream>
#include <string_view>
#include <vector>

#include "cli/probe.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

// x86-64, then aarch64, as the kernel calls them.
constexpr std::array<std::string_view, 3> kBf16Units = {"avx512_bf16", "amx_bf16", "bf16"};
constexpr std::array<std::string_view, 3> kFp16Units = {"avx512_fp16", "amx_fp16", "asimdhp"};

constexpr const char* kSlowdown = "3 (with AVX-512) to hundreds of times slower than in fp32";

// Of the first core: others of one machine have the same.
std::vector<std::string> cpu_flags(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) {
      std::istringstream words(line.substr(std::min(line.find(':') + 1, line.size())));
      std::vector<std::string> flags;
      for (std::string word; words >> word;) {
        flags.push_back(word);
      }
      return flags;
    }
  }
  return {};
}

std::string found_of(const std::vector<std::string>& flags,
                     std::span<const std::string_view> wanted) {
  std::string found;
  for (const std::string_view name : wanted) {
    if (std::find(flags.begin(), flags.end(), name) != flags.end()) {
      found.append(found.empty() ? "" : ", ").append(name);
    }
  }
  return found;
}

}  // namespace

LowPrecisionUnits read_low_precision_units(const std::filesystem::path& root) {
  const std::vector<std::string> flags = cpu_flags(root);
  return {!flags.empty(), found_of(flags, kBf16Units), found_of(flags, kFp16Units)};
}

std::string slow_precision_text(const LowPrecisionUnits& units, DType dtype) {
  const bool is_bf16 = dtype == DType::kBFloat16;
  const bool is_slow =
      (is_bf16 && units.bf16.empty()) || (dtype == DType::kFloat16 && units.fp16.empty());
  if (!units.is_known || !is_slow) {
    return "";
  }
  const char* const name = is_bf16 ? "bf16" : "fp16";
  return detail::concat("precision ", name, ": this CPU has no ", name, " units, so products are ",
                        kSlowdown, "; use --precision fp32, or a GPU (--device cuda)");
}

ProbeResult probe_low_precision(const std::filesystem::path& root) {
  const LowPrecisionUnits units = read_low_precision_units(root);
  ProbeResult result{"CPU bf16", ProbeState::kOk, "", "", false};
  if (!units.is_known) {
    result.state = ProbeState::kLimited;
    result.found = "unknown: /proc/cpuinfo cannot be read";
    result.cost = "bf16 or fp16 may be much slower than fp32 here; time a few steps of both";
    return result;
  }
  result.found = units.bf16.empty() ? "no units for bf16" : units.bf16;
  result.found += units.fp16.empty() ? ", none for fp16" : "; fp16: " + units.fp16;
  if (units.bf16.empty()) {
    result.state = ProbeState::kLimited;
    result.cost = detail::concat("training on the CPU in bf16 is ", kSlowdown,
                                 "; use --precision fp32 there");
  }
  return result;
}

}  // namespace tessera::cli
