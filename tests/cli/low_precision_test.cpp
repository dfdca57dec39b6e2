#include "cli/low_precision.h"

#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "cli/probe.h"
#include "cli/train_warnings.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

class Processor : public ::testing::Test {
 protected:
  const std::filesystem::path& with(const std::string& cpuinfo) {
    std::filesystem::create_directory(root_.path() / "proc");
    std::ofstream(root_.path() / "proc/cpuinfo") << cpuinfo;
    return root_.path();
  }

  testing::TemporaryDirectory root_;
};

TEST_F(Processor, WithBf16UnitsIsNotWarnedAbout) {
  for (const std::string line :
       {"flags\t\t: fpu avx512f avx512_bf16 amx_bf16", "Features\t: fp asimd i8mm bf16"}) {
    const auto& root = with("processor\t: 0\n" + line + "\n\nprocessor\t: 1\n");
    const LowPrecisionUnits units = read_low_precision_units(root);
    EXPECT_EQ(slow_precision_text(units, DType::kBFloat16), "");
    EXPECT_NE(slow_precision_text(units, DType::kFloat16), "");
    EXPECT_EQ(probe_low_precision(root).state, ProbeState::kOk);
  }
}

TEST_F(Processor, WithoutThemIs) {
  // A flag that only begins like one is none.
  const auto& root = with("flags : fpu avx512f avx512bw bf16_not\n");
  const LowPrecisionUnits units = read_low_precision_units(root);
  EXPECT_TRUE(units.is_known);
  EXPECT_HAS(slow_precision_text(units, DType::kBFloat16), "no bf16 units");
  EXPECT_EQ(slow_precision_text(units, DType::kFloat32), "");
  const ProbeResult probe = probe_low_precision(root);
  EXPECT_EQ(probe.state, ProbeState::kLimited);
  EXPECT_HAS(probe.cost, "--precision fp32");
  EXPECT_FALSE(probe.required);
}

TEST_F(Processor, ThatTellsNothingIsNotWarnedAbout) {
  const LowPrecisionUnits units = read_low_precision_units(root_.path());
  EXPECT_FALSE(units.is_known);
  EXPECT_EQ(slow_precision_text(units, DType::kBFloat16), "");
  EXPECT_HAS(probe_low_precision(root_.path()).found, "unknown");
}

TEST(TorchWarning, IsCutWhereItsStackTraceBegins) {
  EXPECT_EQ(first_sentence("mkldnn_bf16_gemm failed, switching to BLAS gemm: could not create a "
                           "primitive\nException raised from execute at ideep.hpp:40 (most recent "
                           "call first):\nframe #0: c10::Error::Error\nframe #1: ...\n"),
            "mkldnn_bf16_gemm failed, switching to BLAS gemm: could not create a primitive");
  EXPECT_EQ(first_sentence("two\nlines\n"), "two lines");
  EXPECT_EQ(first_sentence(""), "");
}

}  // namespace
}  // namespace tessera::cli
