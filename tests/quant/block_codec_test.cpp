// The format of quantised blocks: its bytes, its sizes and its limits.
#include "tessera/quant/block_codec.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"

namespace tessera::quant {
namespace {

std::vector<int> encoded(const BlockFormat& format, const std::vector<float>& values) {
  const auto codec = make_cpu_block_codec(format);
  const auto numel = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> wire(codec->wire_bytes(numel));
  codec->encode(values.data(), DType::kFloat32, numel, wire.data(), nullptr).wait();
  std::vector<int> bytes;
  for (const std::byte byte : wire) {
    bytes.push_back(std::to_integer<int>(byte));
  }
  return bytes;
}

// Scales are 1, so codes are the values, and 3.5 is a tie.
TEST(BlockFormat, Int8BytesAreCodesThenScales) {
  std::vector<float> values(33, 0.0F);
  values[0] = 127;
  values[1] = -1;
  values[2] = 3.5;
  values[32] = -254;
  std::vector<int> expected(48 + 16, 0);
  expected[0] = 127;
  expected[1] = 0xff;
  expected[2] = 4;
  expected[32] = 0x81;      // -127, of a block with scale 2
  expected[48 + 1] = 0x3f;  // 1 is 0x3f80 in bf16
  expected[48 + 0] = 0x80;
  expected[48 + 3] = 0x40;  // and 2 is 0x4000
  EXPECT_EQ(encoded({8, 32}, values), expected);
}

TEST(BlockFormat, Int4BytesHoldTwoCodesTheFirstInTheLowHalf) {
  std::vector<float> values(33, 0.0F);
  values[0] = 7;
  values[1] = -1;
  values[2] = 2.5;
  values[32] = -14;
  std::vector<int> expected(32 + 16, 0);
  expected[0] = 0xf7;
  expected[1] = 0x02;
  expected[16] = 0x09;
  expected[32 + 1] = 0x3f;
  expected[32 + 0] = 0x80;
  expected[32 + 3] = 0x40;
  EXPECT_EQ(encoded({4, 32}, values), expected);
}

TEST(BlockFormat, ScalesAreRoundedUpAndNeverBelowTheSmallestNormalNumber) {
  const auto scale = [](float largest) {
    const auto bytes = encoded({8, 128}, {largest});
    return bytes[16] + 256 * bytes[17];
  };
  EXPECT_EQ(scale(127), 0x3f80);
  EXPECT_EQ(scale(std::nextafter(127.0F, 200.0F)), 0x3f81);
  EXPECT_EQ(scale(-1), 0x3c02);  // 1 / 127 = 0x3c010204
  EXPECT_EQ(scale(0), 0);
  EXPECT_EQ(scale(-0.0F), 0);
  EXPECT_EQ(scale(std::numeric_limits<float>::denorm_min()), 0x0080);
  EXPECT_EQ(scale(0x1p-120F), 0x0080);
  EXPECT_EQ(scale(0x1p-118F), 0x0102);  // 2^-125 * 128 / 127
  EXPECT_EQ(scale(std::numeric_limits<float>::max()), 0x7c02);
  EXPECT_EQ(scale(std::numeric_limits<float>::infinity()), 0x7fc0);
  EXPECT_EQ(scale(-std::numeric_limits<float>::quiet_NaN()), 0x7fc0);
}

TEST(BlockFormat, SizesAreThoseOfTheBytes) {
  for (const int bits : {4, 8}) {
    for (const std::int64_t block_numel : {32, 96, 128, 4096}) {
      const BlockFormat format{bits, block_numel};
      EXPECT_EQ(wire_bytes(format, 0), 0U);
      for (const std::int64_t numel : {1, 2, 31, 32, 33, 127, 128, 129, 1024, 1025, 99999}) {
        const auto padded = [](std::int64_t bytes) { return (bytes + 15) / 16 * 16; };
        const std::int64_t codes = padded((numel * bits + 7) / 8);
        const std::int64_t scales = padded(2 * ((numel + block_numel - 1) / block_numel));
        EXPECT_EQ(code_bytes(format, numel), static_cast<std::size_t>(codes));
        EXPECT_EQ(wire_bytes(format, numel), static_cast<std::size_t>(codes + scales));
        EXPECT_EQ(make_cpu_block_codec(format)->wire_bytes(numel), wire_bytes(format, numel));
      }
    }
  }
  // 1 + 2 / 128 bytes a value, and half of the codes.
  EXPECT_EQ(wire_bytes({8, 128}, 1 << 20), (1U << 20) * 65 / 64);
  EXPECT_EQ(wire_bytes({4, 128}, 1 << 20), (1U << 20) * 33 / 64);
  // Of more values than memory holds, without overflow.
  EXPECT_EQ(wire_bytes({8, 128}, std::int64_t{1} << 50), (std::size_t{1} << 50) * 65 / 64);
}

std::string refusal(const BlockFormat& format) {
  try {
    check_block_format(format);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(BlockFormat, OthersAreRefused) {
  for (const std::int64_t block_numel : {32, 96, 128, 1 << 20}) {
    EXPECT_EQ(refusal({8, block_numel}), "");
    EXPECT_EQ(refusal({4, block_numel}), "");
  }
  EXPECT_EQ(refusal({2, 128}), "quantised blocks of 2 bits: there are 4 and 8");
  for (const std::int64_t block_numel : {-32, 0, 31, 48, (1 << 20) + 32}) {
    EXPECT_EQ(refusal({8, block_numel}),
              "quantised blocks of " + std::to_string(block_numel) +
                  " values (quant.block_numel): take a multiple of 32, from 32 to 1048576");
  }
  EXPECT_THROW(make_cpu_block_codec({5, 128}), ConfigError);
}

TEST(CudaBlockCodecWithoutCuda, SaysWhatIsMissing) {
  if (device::cuda_built()) {
    GTEST_SKIP() << "this build has CUDA";
  }
  const auto device = device::make_cpu_device();
  EXPECT_THROW(make_cuda_block_codec({}, *device), DeviceError);
  EXPECT_THROW(make_cuda_block_codec({3, 128}, *device), ConfigError);
}

}  // namespace
}  // namespace tessera::quant
