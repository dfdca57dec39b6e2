// How much of a device's arithmetic a run uses: MFU, the model's operations per second over the
// peak of all devices.
//
// The peak is what the vendor's data sheet gives for dense matrix products in the precision of the
// run (fp32 as torch computes it unless told otherwise, without TF32). It is looked up by the name
// of the GPU; for a GPU that is not in the table, and for CPUs, whose peak no sheet gives, it
// is not known unless --peak-tflops says it.
//
// Threads: pure functions.
#pragma once

#include <optional>
#include <string_view>

#include "tessera/core/dtype.h"

namespace tessera::cli {

// Operations per second. `device` is a name that contains the GPU's: "cuda:0 (NVIDIA H200)".
std::optional<double> gpu_peak_flops(std::string_view device, DType dtype);

struct FlopRate {
  double flops_per_token = 0;
  // Of all devices of the run together; none: not known.
  std::optional<double> peak_flops;

  // NaN where the peak is not known.
  double mfu(double tokens_per_s) const;
};

}  // namespace tessera::cli
