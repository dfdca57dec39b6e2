// What the kernels of a GPU do with words of codes, for all codes in all places.
#include "tessera/quant/block_words.cuh"

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

#include <gtest/gtest.h>

namespace tessera::quant {
namespace {

template <int kBits>
int code_of_bits(std::uint32_t bits) {
  const int code = static_cast<int>(bits);
  return code < 1 << (kBits - 1) ? code : code - (1 << kBits);
}

// Among random codes: what is beside a code must not matter.
template <int kBits>
void expect_codes_are_found() {
  std::mt19937 random(24);
  for (int k = 0; k < kWordBits / kBits; ++k) {
    for (std::uint32_t bits = 0; bits < 1U << kBits; ++bits) {
      const std::uint32_t mask = ((1U << kBits) - 1) << (k * kBits);
      for (const std::uint32_t beside : {0U, ~0U, static_cast<std::uint32_t>(random())}) {
        const std::uint32_t word = (beside & ~mask) | bits << (k * kBits);
        const auto code = static_cast<float>(code_of_bits<kBits>(bits));
        ASSERT_EQ(bits_of(code_in_fp32<kBits>(word, k, kCodeBase)), bits_of(code))
            << "place " << k << " of word " << word;
        ASSERT_EQ(std::bit_cast<std::uint64_t>(code_in_fp64<kBits>(word, k)),
                  std::bit_cast<std::uint64_t>(static_cast<double>(code)))
            << "place " << k << " of word " << word;
      }
    }
  }
}

TEST(BlockWords, CodesAreTheSameNumbersInAllPlaces) {
  expect_codes_are_found<8>();
  expect_codes_are_found<4>();
}

// Of all codes in each place, with others beside them.
template <int kBits, int kNum>
void expect_codes_are_packed() {
  std::mt19937 random(24);
  for (int k = 0; k < kNum; ++k) {
    for (std::uint32_t bits = 0; bits < 1U << kBits; ++bits) {
      std::uint32_t codes[kNum];
      std::uint32_t expected = 0;
      for (int i = 0; i < kNum; ++i) {
        const std::uint32_t own = i == k ? bits : random() % (1U << kBits);
        expected |= own << (i * kBits);
        codes[i] = code_of(static_cast<float>(code_of_bits<kBits>(own)), 1);
      }
      ASSERT_EQ((packed_codes<kBits, kNum>(codes)), expected) << "place " << k;
    }
  }
}

TEST(BlockWords, CodesArePackedInTheOrderOfValues) {
  expect_codes_are_packed<8, 4>();
  expect_codes_are_packed<4, 8>();
  expect_codes_are_packed<4, 4>();
}

// Adding 1.5 * 2^23 rounds as the host's rounding does: around every half from -128 to 128, and on
// every 16-bit number in that range.
TEST(BlockWords, TheSumRoundsToTheNearestEvenCode) {
  const auto expect_rounded = [](float value) {
    const auto code = static_cast<int>(std::nearbyint(value));
    ASSERT_EQ(code_of(value, 1) & 0xffU, static_cast<std::uint32_t>(code) & 0xffU) << value;
  };
  for (int twice = -255; twice <= 255; ++twice) {
    const float half = static_cast<float>(twice) / 2;
    expect_rounded(half);
    expect_rounded(std::nextafter(half, 1000.0F));
    expect_rounded(std::nextafter(half, -1000.0F));
  }
  for (std::uint32_t bits = 0; bits < 1U << 16; ++bits) {
    const float value = float_of(bits << 16);
    if (std::fabs(value) <= 127) {
      expect_rounded(value);
    }
  }
}

// fp64 holds the difference of a decoded value and another one in the product's precision: a fused
// product and difference is rounded once, as the difference of what was rounded to fp32 is.
TEST(BlockWords, AnErrorIsTheSameFusedOrNot) {
  std::mt19937 random(24);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto scale = static_cast<std::uint16_t>(random() % 0x7e00);
    const int code = static_cast<int>(random() % 256) - 128;
    if (!is_plain<8, float>(scale)) {
      continue;
    }
    const float step = widened_scale(scale);
    // From far below a step to far above all codes.
    const float value = std::ldexp(static_cast<float>(static_cast<std::int32_t>(random())),
                                   static_cast<int>(random() % 64) - 62) *
                        step;
    if (!std::isfinite(value)) {
      continue;
    }
    const double fused =
        std::fma(static_cast<double>(code), static_cast<double>(step), -static_cast<double>(value));
    const double apart = static_cast<double>(decoded<float>(code, scale)) - value;
    ASSERT_EQ(std::bit_cast<std::uint64_t>(fused + 0.0), std::bit_cast<std::uint64_t>(apart + 0.0))
        << code << " * " << step << " - " << value;
  }
}

}  // namespace
}  // namespace tessera::quant
