#include "cli/device_peak.h"

#include <array>
#include <limits>

namespace tessera::cli {
namespace {

struct Peak {
  std::string_view name;
  // 10^12 operations per second; 0: the data sheet does not give it, or the GPU cannot do it.
  double bf16;
  double fp16;
  double fp32;
};

// From NVIDIA's data sheets and white papers, dense, products of half precision added up in fp32.
// A name stands before every name that is a part of it.
constexpr std::array kPeaks = {
    Peak{"B200", 2250, 2250, 0},
    Peak{"GH200", 989.4, 989.4, 66.9},
    Peak{"H200 NVL", 835.5, 835.5, 60},
    Peak{"H200", 989.4, 989.4, 66.9},
    Peak{"H100 NVL", 835.5, 835.5, 60},
    Peak{"H100 PCIe", 756, 756, 51.2},
    Peak{"H100 80GB HBM3", 989.4, 989.4, 66.9},
    Peak{"A100", 312, 312, 19.5},
    Peak{"A30", 165, 165, 10.3},
    Peak{"RTX A6000", 154.8, 154.8, 38.7},
    Peak{"A40", 149.7, 149.7, 37.4},
    Peak{"L40S", 362, 362, 91.6},
    Peak{"L40", 181, 181, 90.5},
    Peak{"L4", 121, 121, 30.3},
    Peak{"RTX 4090", 165.2, 165.2, 82.6},
    Peak{"RTX 3090", 71, 71, 35.6},
    Peak{"V100-SXM2", 0, 125, 15.7},
    Peak{"V100-PCIE", 0, 112, 14},
    Peak{"T4", 0, 65, 8.1},
};

bool is_word(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// Whole words: an "L40G" is no "L40", and "GB200" no "B200".
bool names(std::string_view device, std::string_view name) {
  for (std::size_t at = device.find(name); at != std::string_view::npos;
       at = device.find(name, at + 1)) {
    const std::size_t end = at + name.size();
    if ((at == 0 || !is_word(device[at - 1])) && (end == device.size() || !is_word(device[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::optional<double> gpu_peak_flops(std::string_view device, DType dtype) {
  for (const Peak& peak : kPeaks) {
    if (names(device, peak.name)) {
      const double tflops = dtype == DType::kBFloat16  ? peak.bf16
                            : dtype == DType::kFloat16 ? peak.fp16
                                                       : peak.fp32;
      return tflops > 0 ? std::optional<double>(tflops * 1e12) : std::nullopt;
    }
  }
  return std::nullopt;
}

double FlopRate::mfu(double tokens_per_s) const {
  return peak_flops ? flops_per_token * tokens_per_s / *peak_flops
                    : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace tessera::cli
