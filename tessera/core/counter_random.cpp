#include "tessera/core/counter_random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "tessera/core/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLanes = 4;
// Elements that are made at a time: small enough for the stack and the first-level cache.
constexpr std::size_t kChunk = 256;

// FNV-1a, then a finalizer: names that differ in the last letter alone must not have near hashes.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdU;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53U;
  return hash ^ (hash >> 33);
}

std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
std::uint32_t high(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }
std::uint64_t joined(std::uint32_t low, std::uint32_t high) {
  return std::uint64_t{high} << 32 | low;
}

// The middle of one of 2^32 equal pieces of (-0.5, 0.5): exact, never an end, and symmetric.
double from_middle_of(std::uint32_t bits) {
  return (static_cast<std::int32_t>(bits ^ 0x80000000U) + 0.5) * 0x1p-32;
}

// sum of c[i] * x^i. Written out, so that a loop around it becomes vector code.
inline double polynomial(const std::array<double, 8>& c, double x) {
  return ((((((c[7] * x + c[6]) * x + c[5]) * x + c[4]) * x + c[3]) * x + c[2]) * x + c[1]) * x +
         c[0];
}

// The natural logarithm of a normal number in (0, 1), to a few units in the last place.
double log_of(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double mantissa = std::bit_cast<double>((bits & 0xfffffffffffffU) | 0x3ff0000000000000U);
  if (mantissa > 1.4142135623730951) {  // now in (0.7, 1.42), where the series is short
    mantissa *= 0.5;
    ++exponent;
  }
  // log(m) = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...) with s^2 < 0.0295: after s^21/21 what is
  // left is below 1e-18.
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  constexpr std::array<double, 10> kRest = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                            1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  double sum = 1.0 / 21;
  for (const double coefficient : kRest) {
    sum = sum * square + coefficient;
  }
  return exponent * 0.6931471805599453 + 2.0 * s * sum;
}

// Quantiles of the normal distribution: Wichura, "Algorithm AS 241", Applied Statistics 37 (1988),
// to about 1e-16. Its third case, for probabilities below 1e-11, cannot come from 32 bits.
constexpr double kCentralHalfWidth = 0.425;

double central_quantile(double from_middle) {
  constexpr std::array<double, 8> kNumerator = {3.3871328727963666080e+0, 1.3314166789178437745e+2,
                                                1.9715909503065514427e+3, 1.3731693765509461125e+4,
                                                4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                                3.3430575583588128105e+4, 2.5090809287301226727e+3};
  constexpr std::array<double, 8> kDenominator = {1.0,
                                                  4.2313330701600911252e+1,
                                                  6.8718700749205790830e+2,
                                                  5.3941960214247511077e+3,
                                                  2.1213794301586595867e+4,
                                                  3.9307895800092710610e+4,
                                                  2.8729085735721942674e+4,
                                                  5.2264952788528545610e+3};
  const double r = kCentralHalfWidth * kCentralHalfWidth - from_middle * from_middle;
  return from_middle * polynomial(kNumerator, r) / polynomial(kDenominator, r);
}

double tail_quantile(double from_middle) {
  constexpr std::array<double, 8> kNumerator = {
      1.42343711074968357734e+0, 4.63033784615654529590e+0, 5.76949722146069140550e+0,
      3.64784832476320460504e+0, 1.27045825245236838258e+0, 2.41780725177450611770e-1,
      2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr std::array<double, 8> kDenominator = {1.0,
                                                  2.05319162663775882187e+0,
                                                  1.67638483018380384940e+0,
                                                  6.89767334985100004550e-1,
                                                  1.48103976427480074590e-1,
                                                  1.51986665636164571966e-2,
                                                  5.47593808499534494600e-4,
                                                  1.05075007164441684324e-9};
  const double tail = 0.5 - std::fabs(from_middle);
  const double r = std::sqrt(-log_of(tail)) - 1.6;
  return std::copysign(polynomial(kNumerator, r) / polynomial(kDenominator, r), from_middle);
}

bool is_central(double from_middle) { return std::fabs(from_middle) <= kCentralHalfWidth; }

constexpr std::array<std::uint32_t, 2> kMultipliers = {0xd2511f53U, 0xcd9e8d57U};
constexpr std::array<std::uint32_t, 2> kKeySteps = {0x9e3779b9U, 0xbb67ae85U};
constexpr int kNumRounds = 10;

// philox4x32 of consecutive blocks. One block is a chain of dependent products; blocks side by side
// keep the CPU busy.
template <std::size_t kNumBlocks>
void philox_blocks(std::uint64_t first, std::uint64_t stream, std::array<std::uint32_t, 2> key,
                   std::uint32_t* out) {
  std::array<std::uint32_t, kNumBlocks> a, b, c, d;
  for (std::size_t i = 0; i < kNumBlocks; ++i) {
    a[i] = low(first + i);
    b[i] = high(first + i);
    c[i] = low(stream);
    d[i] = high(stream);
  }
  for (int round = 0; round < kNumRounds; ++round) {
    for (std::size_t i = 0; i < kNumBlocks; ++i) {
      const std::uint64_t product0 = std::uint64_t{kMultipliers[0]} * a[i];
      const std::uint64_t product1 = std::uint64_t{kMultipliers[1]} * c[i];
      a[i] = high(product1) ^ b[i] ^ key[0];
      b[i] = low(product1);
      c[i] = high(product0) ^ d[i] ^ key[1];
      d[i] = low(product0);
    }
    key[0] += kKeySteps[0];
    key[1] += kKeySteps[1];
  }
  for (std::size_t i = 0; i < kNumBlocks; ++i) {
    out[4 * i] = a[i];
    out[4 * i + 1] = b[i];
    out[4 * i + 2] = c[i];
    out[4 * i + 3] = d[i];
  }
}

// The bits of elements [begin, begin + kChunk) of a stream, where begin is that of a block.
using Chunk = std::array<std::uint32_t, kChunk>;
void make_chunk(std::uint64_t begin, std::uint64_t stream, std::array<std::uint32_t, 2> key,
                Chunk& chunk) {
  constexpr std::size_t kNumBlocks = 8;
  for (std::size_t at = 0; at < kChunk; at += kNumBlocks * kLanes) {
    philox_blocks<kNumBlocks>((begin + at) / kLanes, stream, key, chunk.data() + at);
  }
}

std::array<float, kChunk> uniform_chunk(const Chunk& bits) {
  std::array<float, kChunk> values;
  for (std::size_t i = 0; i < kChunk; ++i) {
    values[i] = static_cast<float>(bits[i] >> 8) * 0x1p-24F;
  }
  return values;
}

// Most are central: that case is computed for all, and the others are mended. Neither loop has a
// branch that the CPU would have to guess.
std::array<float, kChunk> normal_chunk(const Chunk& bits) {
  std::array<float, kChunk> values;
  for (std::size_t i = 0; i < kChunk; ++i) {
    values[i] = static_cast<float>(central_quantile(from_middle_of(bits[i])));
  }
  std::array<std::size_t, kChunk> tails;
  std::size_t num_tails = 0;
  for (std::size_t i = 0; i < kChunk; ++i) {
    tails[num_tails] = i;
    num_tails += is_central(from_middle_of(bits[i])) ? 0 : 1;
  }
  for (std::size_t i = 0; i < num_tails; ++i) {
    values[tails[i]] = static_cast<float>(tail_quantile(from_middle_of(bits[tails[i]])));
  }
  return values;
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key) {
  std::array<std::uint32_t, 4> block{};
  philox_blocks<1>(joined(counter[0], counter[1]), joined(counter[2], counter[3]), key,
                   block.data());
  return block;
}

CounterRandom::CounterRandom(std::uint64_t seed, std::string_view stream)
    : key_{low(seed), high(seed)}, stream_(hash_of(stream)) {}

std::array<std::uint32_t, 4> CounterRandom::block(std::uint64_t counter) const {
  return philox4x32({low(counter), high(counter), low(stream_), high(stream_)}, key_);
}

std::uint64_t CounterRandom::below(std::uint64_t counter, std::uint64_t limit) const {
  TESSERA_INVARIANT(limit > 0, "there is no number below zero");
  const auto words = block(counter);
  const std::uint64_t fraction = joined(words[0], words[1]);
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(fraction) * limit) >> 64);
}

void CounterRandom::fill_uniform(std::uint64_t begin, std::span<float> out) const {
  fill(begin, out, uniform_chunk);
}

void CounterRandom::fill_normal(std::uint64_t begin, std::span<float> out) const {
  fill(begin, out, normal_chunk);
}

template <typename MakeValues>
void CounterRandom::fill(std::uint64_t begin, std::span<float> out, MakeValues make_values) const {
  Chunk chunk;
  std::size_t skipped = begin % kLanes;  // of the first block
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t count = std::min(kChunk - skipped, out.size() - done);
    make_chunk(begin + done - skipped, stream_, key_, chunk);
    const auto values = make_values(chunk);
    std::copy_n(values.begin() + skipped, count, out.data() + done);
    done += count;
    skipped = 0;
  }
}

}  // namespace tessera
