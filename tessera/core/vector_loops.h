// What loops over elements on the host are made of: compiled once per instruction set, rounding
// without jumps, and memory asked for ahead or written past the caches.
//
// [Note: instruction sets]
// On baseline x86-64 std::fma is a library call per element, so loops are compiled again for
// x86-64-v3 (AVX2, fma) and v4 (AVX-512), and the machine says at run time which it can run. Other
// architectures have fma in their baseline, and one version. All versions give the same bits; tests
// run each one that the machine can.
//
//   #define LOOPS(suffix, name, attribute)  a function of this attribute, and a table of functions
//   TESSERA_PER_INSTRUCTION_SET(LOOPS)      such tables for each set that the compiler knows
//
// A macro, since an attribute cannot be a template argument. What is called there is
// TESSERA_INLINE: inlined into the function of each set, and so compiled for it.
//
// [Note: streaming stores]
// What is written and not read soon drives something else out of the caches, and an ordinary store
// reads its line from memory first. Long runs go past the caches instead, whole lines at a time,
// from a small array that stays in the first-level cache. Such stores are ordered only by a fence.
//
// Threads: stateless.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "tessera/core/dtype.h"

namespace tessera::loops {

#define TESSERA_INLINE [[gnu::always_inline]] inline

// From the baseline on, the best last.
#if defined(__x86_64__)
#define TESSERA_PER_INSTRUCTION_SET(define)                              \
  define(baseline, "baseline", )                                         \
      define(v3, "x86-64-v3", __attribute__((target("arch=x86-64-v3")))) \
          define(v4, "x86-64-v4", __attribute__((target("arch=x86-64-v4"))))
#else
#define TESSERA_PER_INSTRUCTION_SET(define) define(baseline, "baseline", )
#endif

// How many of them this machine can run.
inline std::size_t count_runnable_sets() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("x86-64-v3")) {
    return 1;
  }
  return __builtin_cpu_supports("x86-64-v4") ? 3 : 2;
#else
  return 1;
#endif
}

TESSERA_INLINE float widened(float value) { return value; }
template <typename Half>
TESSERA_INLINE float widened(Half value) {
  return to_float(value);
}

// All ones where `a` is the smaller one, else zero. For magnitudes: below 2^31.
TESSERA_INLINE std::uint32_t mask_below(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(a - b) >> 31);
}
TESSERA_INLINE std::uint32_t chosen(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) {
  return (yes & mask) | (no & ~mask);
}

// Of what is no NaN, in core/dtype.h's bits.
TESSERA_INLINE void narrow_number(float value, float& out) { out = value; }
TESSERA_INLINE void narrow_number(float value, BFloat16& out) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  out.bits = static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
// to_float16() with masks for its choices: the compiler would make jumps of them, and then no
// vector code.
TESSERA_INLINE void narrow_number(float value, Float16& out) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) & 0x7ffU;
  const std::uint32_t at_least_normal = chosen(mask_below(magnitude, 0x477ff000U), normal, 0x7c00U);
  out.bits = static_cast<std::uint16_t>(
      sign | chosen(mask_below(magnitude, 0x38800000U), subnormal, at_least_normal));
}

// Of every value.
TESSERA_INLINE void narrow(float value, float& out) { out = value; }
TESSERA_INLINE void narrow(float value, BFloat16& out) { out = to_bfloat16(value); }
TESSERA_INLINE void narrow(float value, Float16& out) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const std::uint32_t quiet_nan = ((bits >> 16) & 0x8000U) | 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  narrow_number(value, out);
  out.bits =
      static_cast<std::uint16_t>(chosen(mask_below(0x7f800000U, magnitude), quiet_nan, out.bits));
}

constexpr std::size_t kLineBytes = 64;

// The CPU's own prefetchers begin anew at every page, that is every 1,024 elements of every tensor,
// so what a loop reads next is asked for ahead. Behind the end of a tensor that is a hint about
// memory that is not there, which no CPU minds.
constexpr std::size_t kAheadBytes = 2048;
template <typename Value>
TESSERA_INLINE void prefetch(const Value* values, std::int64_t numel) {
  const auto* const ahead = reinterpret_cast<const char*>(values) + kAheadBytes;
  for (std::size_t line = 0; line < static_cast<std::size_t>(numel) * sizeof(Value);
       line += kLineBytes) {
    __builtin_prefetch(ahead + line);
  }
}

// [Note: streaming stores]. `to` and `from` are aligned to lines, and `bytes` is a multiple of
// them.
#if defined(__x86_64__)
constexpr bool kHasStreamingStores = true;
TESSERA_INLINE void store_past_caches(void* to, const void* from, std::size_t bytes) {
  // 16 bytes at a time in every instruction set: the CPU gathers them into lines.
  auto* const out = static_cast<__m128i*>(to);
  const auto* const in = static_cast<const __m128i*>(from);
  for (std::size_t i = 0; i < bytes / sizeof(__m128i); ++i) {
    _mm_stream_si128(out + i, _mm_load_si128(in + i));
  }
}
TESSERA_INLINE void fence_stores() { _mm_sfence(); }
#else
constexpr bool kHasStreamingStores = false;
TESSERA_INLINE void store_past_caches(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
TESSERA_INLINE void fence_stores() {}
#endif

}  // namespace tessera::loops
