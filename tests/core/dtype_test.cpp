#include "tessera/core/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace tessera {
namespace {

// A stupid reference: the value of a small float from its definition, in double.
double value_of(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1U << exponent_bits) - 1));
  const double sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp((1U << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

// Round to nearest even by looking at both neighbours: `below` and the pattern after it.
std::uint32_t nearest_even(double magnitude, std::uint32_t below, int exponent_bits,
                           int mantissa_bits) {
  const std::uint32_t above = below + 1;
  const double low = value_of(below, exponent_bits, mantissa_bits);
  double high = value_of(above, exponent_bits, mantissa_bits);
  if (std::isinf(high)) {  // the step past the largest finite value
    high = low + (low - value_of(below - 1, exponent_bits, mantissa_bits));
  }
  if (magnitude - low == high - magnitude) {
    return below % 2 == 0 ? below : above;
  }
  return magnitude - low < high - magnitude ? below : above;
}

// A NaN keeps its payload and becomes quiet.
template <typename Small, typename ToSmall>
void expect_defined_values(int exponent_bits, int mantissa_bits, ToSmall to_small) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float wide = to_float(Small{static_cast<std::uint16_t>(bits)});
    const double expected = value_of(bits, exponent_bits, mantissa_bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_EQ(to_small(wide).bits, bits | (1U << (mantissa_bits - 1)));
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), expected) << bits;
    ASSERT_EQ(std::signbit(wide), (bits & 0x8000U) != 0) << bits;
    ASSERT_EQ(to_small(wide).bits, bits);
  }
}

TEST(LowPrecision, EveryPatternHasItsDefinedValueAndRoundTrips) {
  expect_defined_values<Float16>(5, 10, to_float16);
  expect_defined_values<BFloat16>(8, 7, to_bfloat16);
}

// Between each pair of neighbours: just above the lower, the tie, just below the upper.
TEST(Float16, RoundsToNearestEvenBetweenAllNeighbours) {
  for (std::uint32_t bits = 0; bits <= 0x7bffU; ++bits) {
    const double low = value_of(bits, 5, 10);
    const double high = bits == 0x7bffU ? 65536.0 : value_of(bits + 1, 5, 10);
    const auto tie = static_cast<float>((low + high) / 2);  // exact: one more bit of mantissa
    for (const float probe :
         {std::nextafterf(static_cast<float>(low), 1e30F), std::nextafterf(tie, 0.0F), tie,
          std::nextafterf(tie, 1e30F), std::nextafterf(static_cast<float>(high), 0.0F)}) {
      const std::uint32_t expected = nearest_even(probe, bits, 5, 10);
      ASSERT_EQ(to_float16(probe).bits, expected) << bits << " probe " << probe;
      ASSERT_EQ(to_float16(-probe).bits, expected | 0x8000U) << bits << " probe " << -probe;
    }
  }
}

TEST(BFloat16, RoundsToNearestEvenBetweenAllNeighbours) {
  for (std::uint32_t bits = 0; bits < 0x7f80U; ++bits) {
    const std::uint32_t low = bits << 16;
    for (const std::uint32_t rest : {1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      const auto probe = std::bit_cast<float>(low | rest);
      const bool up = rest > 0x8000U || (rest == 0x8000U && bits % 2 == 1);
      ASSERT_EQ(to_bfloat16(probe).bits, bits + (up ? 1 : 0)) << bits << " rest " << rest;
      ASSERT_EQ(to_bfloat16(-probe).bits, (bits + (up ? 1 : 0)) | 0x8000U);
    }
  }
}

TEST(Float16, LargeValuesBecomeInfinityAndTinyOnesZero) {
  EXPECT_EQ(to_float16(65519.996F).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_float16(std::numeric_limits<float>::infinity()).bits, 0x7c00);
  EXPECT_EQ(to_float16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(to_float16(std::ldexp(1.0F, -25)).bits, 0) << "a tie with zero goes to even";
  EXPECT_EQ(to_float16(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(Float16, ANanNeverBecomesInfinityWhateverItsPayload) {
  std::mt19937 random(7);
  for (int i = 0; i < 100000; ++i) {
    const std::uint32_t bits = 0x7f800000U | (random() & 0x807fffffU) | 1U;
    const auto nan = std::bit_cast<float>(bits);
    ASSERT_TRUE(std::isnan(to_float(to_float16(nan)))) << bits;
    ASSERT_TRUE(std::isnan(to_float(to_bfloat16(nan)))) << bits;
  }
}

TEST(DType, SizesAndNamesAreThoseOfTheTypes) {
  EXPECT_EQ(bytes_of(DType::kFloat32), sizeof(float));
  EXPECT_EQ(bytes_of(DType::kBFloat16), sizeof(BFloat16));
  EXPECT_EQ(bytes_of(DType::kUInt8), 1U);
  EXPECT_EQ(to_string(DType::kBFloat16), "bf16");
  EXPECT_EQ(to_string(DType::kUInt8), "uint8");
}

}  // namespace
}  // namespace tessera
