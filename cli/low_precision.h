// What the CPU has for products in bf16 and fp16, read from /proc/cpuinfo.
//
// Without such units torch converts or emulates: measured on `tiny`, 3 times slower than fp32 with
// AVX-512, 10 times with AVX2, hundreds of times on aarch64. The numbers are the same.
//
// Threads: pure functions.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/core/dtype.h"

namespace tessera::cli {

// Names of the kernel for what was found, such as "avx512_bf16, amx_bf16"; empty: nothing.
struct LowPrecisionUnits {
  bool is_known = false;  // the CPU's flags could be read
  std::string bf16;
  std::string fp16;
};

// `root` is where the machine's proc/ is.
LowPrecisionUnits read_low_precision_units(const std::filesystem::path& root = "/");

// One sentence for training in `dtype` on the CPU; empty: it is as fast as it should be, or
// nothing is known.
std::string slow_precision_text(const LowPrecisionUnits& units, DType dtype);

}  // namespace tessera::cli
