#include "tessera/quant/block_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tessera/core/vector_loops.h"
#include "tessera/quant/block_rules.cuh"

namespace tessera::quant {
namespace {

using loops::count_runnable_sets;
using loops::fence_stores;
using loops::kHasStreamingStores;
using loops::kLineBytes;
using loops::narrow_number;
using loops::prefetch;
using loops::store_past_caches;
using loops::widened;

// Values that stay in the first-level cache between two loops over them.
constexpr std::int64_t kTile = 256;
static_assert(kTile % 32 == 0);

// Blocks are short loops with a division between them, which the CPU's own prefetching and
// reordering bridge only in part: what is read is asked for ahead. What is decoded is written and
// not read, so long spans go past the caches, a tile at a time (core/vector_loops.h, [Note:
// streaming stores]).
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

// For every value. With jumps: as vector code, this rare loop costs the usual one beside it a third
// of its speed (g++ 12, fp16, AVX-512).
TESSERA_INLINE void store_carefully(float value, float& out) { out = value; }
TESSERA_INLINE void store_carefully(float value, BFloat16& out) { out = to_bfloat16(value); }
TESSERA_INLINE void store_carefully(float value, Float16& out) { out = to_float16(value); }

template <typename Value>
TESSERA_INLINE bool is_streamed(const Value* values, std::int64_t numel) {
  return kHasStreamingStores && numel * static_cast<std::int64_t>(sizeof(Value)) >= kStreamBytes &&
         reinterpret_cast<std::uintptr_t>(values) % kLineBytes == 0;
}

// The bits of the largest magnitude, as fp32. Those of every type are in the order of magnitudes.
TESSERA_INLINE std::uint32_t absmax_bits(const float* __restrict values, std::int64_t numel) {
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    largest = std::max(largest, static_cast<std::int32_t>(bits_of(values[i]) & 0x7fffffffU));
  }
  return static_cast<std::uint32_t>(largest);
}
template <typename Half>
TESSERA_INLINE std::uint32_t absmax_bits(const Half* __restrict values, std::int64_t numel) {
  std::int16_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    largest = std::max(largest, static_cast<std::int16_t>(values[i].bits & 0x7fffU));
  }
  return bits_of(to_float(Half{static_cast<std::uint16_t>(largest)}));
}

template <typename Value>
TESSERA_INLINE void code_bytes_of(const Value* __restrict values, std::int64_t numel, float inverse,
                                  std::uint8_t* __restrict codes) {
  for (std::int64_t i = 0; i < numel; ++i) {
    codes[i] = static_cast<std::uint8_t>(code_of(widened(values[i]), inverse));
  }
}

// Two codes per byte. REQUIRES: pairs are behind one another, so that `bytes` has numel + 1.
TESSERA_INLINE void pack_nibbles(const std::uint8_t* __restrict bytes, std::int64_t numel,
                                 std::uint8_t* __restrict codes) {
  for (std::int64_t i = 0; i < (numel + 1) / 2; ++i) {
    codes[i] = static_cast<std::uint8_t>((bytes[2 * i] & 0xfU) | (bytes[2 * i + 1] << 4));
  }
}
TESSERA_INLINE void unpack_nibbles(const std::uint8_t* __restrict codes, std::int64_t numel,
                                   std::int8_t* __restrict out) {
  for (std::int64_t i = 0; i < (numel + 1) / 2; ++i) {
    const std::uint32_t byte = codes[i];
    out[2 * i] = static_cast<std::int8_t>(signed_nibble(byte));
    out[2 * i + 1] = static_cast<std::int8_t>(signed_nibble(byte >> 4));
  }
}

template <int kBits, typename Value>
TESSERA_INLINE void encode_codes(const Value* values, std::int64_t numel, float inverse,
                                 std::uint8_t* codes) {
  if constexpr (kBits == 8) {
    code_bytes_of(values, numel, inverse, codes);
  } else {
    alignas(64) std::uint8_t bytes[kTile];
    for (std::int64_t begin = 0; begin < numel; begin += kTile) {
      const std::int64_t part = std::min(kTile, numel - begin);
      if (part % 2 != 0) {
        bytes[part] = 0;
      }
      code_bytes_of(values + begin, part, inverse, bytes);
      pack_nibbles(bytes, part, codes + begin / 2);
    }
  }
}

// Codes of at most kTile values from an even one on: where they are, or unpacked into `space`.
template <int kBits>
TESSERA_INLINE const std::int8_t* codes_at(const std::byte* wire, std::int64_t begin,
                                           std::int64_t numel, std::int8_t* space) {
  if constexpr (kBits == 8) {
    return reinterpret_cast<const std::int8_t*>(wire) + begin;
  } else {
    unpack_nibbles(reinterpret_cast<const std::uint8_t*>(wire) + begin / 2, numel, space);
    return space;
  }
}

TESSERA_INLINE std::uint16_t scale_at(const std::byte* scales, std::int64_t block) {
  std::uint16_t scale = 0;
  std::memcpy(&scale, scales + 2 * block, sizeof(scale));
  return scale;
}

template <int kBits, typename Value>
TESSERA_INLINE void encode_blocks(const BlockFormat& format, const Value* values,
                                  std::int64_t numel, std::byte* wire) {
  if (numel == 0) {
    return;  // the wire has no bytes, and may be null
  }
  auto* const codes = reinterpret_cast<std::uint8_t*>(wire);
  std::byte* const scales = wire + code_bytes(format, numel);
  const std::int64_t blocks = num_blocks(format, numel);
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t begin = block * format.block_numel;
    const std::int64_t part = std::min(format.block_numel, numel - begin);
    std::uint8_t* const out = codes + begin * kBits / 8;
    prefetch(values + begin, part);
    const std::uint16_t scale = scale_for<kBits>(absmax_bits(values + begin, part));
    std::memcpy(scales + 2 * block, &scale, sizeof(scale));
    const float inverse = inverse_scale(scale);
    if (inverse == 0.0F) {
      std::memset(out, 0, static_cast<std::size_t>((part * kBits + 7) / 8));
    } else {
      encode_codes<kBits>(values + begin, part, inverse, out);
    }
  }
  const std::size_t coded = static_cast<std::size_t>((numel * kBits + 7) / 8);
  std::memset(wire + coded, 0, code_bytes(format, numel) - coded);
  const std::size_t scaled = code_bytes(format, numel) + 2 * static_cast<std::size_t>(blocks);
  std::memset(wire + scaled, 0, wire_bytes(format, numel) - scaled);
}

template <typename Value>
TESSERA_INLINE void decode_plain(const std::int8_t* __restrict codes, std::int64_t numel,
                                 float scale, Value* __restrict values) {
  for (std::int64_t i = 0; i < numel; ++i) {
    narrow_number(static_cast<float>(codes[i]) * scale, values[i]);
  }
}

template <typename Value>
TESSERA_INLINE void decode_carefully(const std::int8_t* codes, std::int64_t numel,
                                     std::uint16_t scale, Value* values) {
  for (std::int64_t i = 0; i < numel; ++i) {
    store_carefully(decoded<Value>(codes[i], scale), values[i]);
  }
}

template <int kBits, typename Value>
TESSERA_INLINE void decode_blocks(const BlockFormat& format, const std::byte* wire,
                                  std::int64_t numel, Value* values) {
  const std::byte* const scales = wire + code_bytes(format, numel);
  alignas(64) std::int8_t space[kTile];
  alignas(64) Value tile[kTile];
  const bool past_caches = is_streamed(values, numel);
  std::int64_t end = 0;
  for (std::int64_t block = 0; end < numel; ++block) {
    const std::uint16_t scale = scale_at(scales, block);
    const float wide = widened_scale(scale);
    const std::int64_t first = end;
    end = std::min(first + format.block_numel, numel);
    for (std::int64_t begin = first; begin < end; begin += kTile) {
      const std::int64_t part = std::min(kTile, end - begin);
      const std::int8_t* const codes = codes_at<kBits>(wire, begin, part, space);
      // Whole lines: what is left of the last block is stored as usual.
      const bool through_tile = past_caches && part % 32 == 0;
      Value* const out = through_tile ? tile : values + begin;
      if (is_plain<kBits, Value>(scale)) {
        decode_plain(codes, part, wide, out);
      } else {
        decode_carefully(codes, part, scale, out);
      }
      if (through_tile) {
        store_past_caches(values + begin, tile, static_cast<std::size_t>(part) * sizeof(Value));
      }
    }
  }
  if (past_caches) {
    fence_stores();
  }
}

TESSERA_INLINE void add_plain(const std::int8_t* __restrict codes, std::int64_t numel, float scale,
                              float* __restrict sums) {
  for (std::int64_t i = 0; i < numel; ++i) {
    sums[i] += static_cast<float>(codes[i]) * scale;
  }
}

// The type's limits hold for each term, not for the sum.
template <typename Value>
TESSERA_INLINE void add_carefully(const std::int8_t* codes, std::int64_t numel, std::uint16_t scale,
                                  float* sums) {
  for (std::int64_t i = 0; i < numel; ++i) {
    sums[i] += decoded<Value>(codes[i], scale);
  }
}

template <typename Value>
TESSERA_INLINE void narrow_sums(const float* __restrict sums, std::int64_t numel,
                                Value* __restrict out) {
  for (std::int64_t i = 0; i < numel; ++i) {
    narrow_number(sums[i], out[i]);
  }
}

template <int kBits, typename Value>
TESSERA_INLINE void decode_sum_blocks(const BlockFormat& format, const std::byte* wires,
                                      std::size_t stride, int num_wires, std::int64_t numel,
                                      Value* sum) {
  const std::size_t scales_at = code_bytes(format, numel);
  alignas(64) std::int8_t space[kTile];
  alignas(64) float sums[kTile];
  std::int64_t end = 0;
  for (std::int64_t block = 0; end < numel; ++block) {
    const std::int64_t first = end;
    end = std::min(first + format.block_numel, numel);
    for (std::int64_t begin = first; begin < end; begin += kTile) {
      const std::int64_t part = std::min(kTile, end - begin);
      bool is_finite = true;
      const std::byte* wire = wires;
      for (int number = 0; number < num_wires; ++number, wire += stride) {
        const std::uint16_t scale = scale_at(wire + scales_at, block);
        const std::int8_t* const codes = codes_at<kBits>(wire, begin, part, space);
        const bool plain = is_plain<kBits, Value>(scale);
        is_finite &= plain;
        if (number == 0) {
          std::memset(sums, 0, sizeof(sums));  // no term is a negative zero
        }
        if (plain) {
          add_plain(codes, part, widened_scale(scale), sums);
        } else {
          add_carefully<Value>(codes, part, scale, sums);
        }
      }
      if (is_finite) {
        narrow_sums(sums, part, sum + begin);
      } else {
        for (std::int64_t i = 0; i < part; ++i) {
          store_carefully(with_canonical_nan(sums[i]), sum[begin + i]);
        }
      }
    }
  }
}

struct LaneSums {
  double errors[kMeasureLanes] = {};
  double values[kMeasureLanes] = {};
};

TESSERA_INLINE void add_square(double& sum, double value) { sum += value * value; }

// From lane 0 on.
template <int kBits, typename Value>
TESSERA_INLINE void add_squares(const Value* __restrict values, const std::int8_t* __restrict codes,
                                std::int64_t numel, std::uint16_t scale, LaneSums& lanes) {
  std::int64_t begin = 0;
  if (is_plain<kBits, Value>(scale)) {
    const float wide = widened_scale(scale);
    for (; begin + kMeasureLanes <= numel; begin += kMeasureLanes) {
      for (int lane = 0; lane < kMeasureLanes; ++lane) {
        const double value = widened(values[begin + lane]);
        const double found = static_cast<float>(codes[begin + lane]) * wide;
        const double error = found - value;
        lanes.errors[lane] += error * error;
        lanes.values[lane] += value * value;
      }
    }
  }
  for (std::int64_t i = begin; i < numel; ++i) {
    const double value = widened(values[i]);
    add_square(lanes.errors[i % kMeasureLanes], decoded<Value>(codes[i], scale) - value);
    add_square(lanes.values[i % kMeasureLanes], value);
  }
}

TESSERA_INLINE double total_of(double* lanes) {
  for (int half = kMeasureLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

template <int kBits, typename Value>
TESSERA_INLINE void chunk_squares_of(const BlockFormat& format, const Value* values,
                                     std::int64_t numel, const std::byte* wire, std::int64_t chunk,
                                     double* sums) {
  const std::byte* const scales = wire + code_bytes(format, numel);
  alignas(64) std::int8_t space[kTile];
  LaneSums lanes;
  const std::int64_t end = std::min((chunk + 1) * kMeasureChunk, numel);
  for (std::int64_t begin = chunk * kMeasureChunk; begin < end;) {
    // Blocks and tiles are whole rows of lanes.
    const std::int64_t block = begin / format.block_numel;
    const std::int64_t block_end = std::min((block + 1) * format.block_numel, end);
    const std::int64_t part = std::min(kTile, block_end - begin);
    const std::int8_t* const codes = codes_at<kBits>(wire, begin, part, space);
    add_squares<kBits>(values + begin, codes, part, scale_at(scales, block), lanes);
    begin += part;
  }
  sums[0] = total_of(lanes.errors);
  sums[1] = total_of(lanes.values);
}

// Calls TESSERA_CALL<bits, type>(...) for a format and a DType. A macro, since what stands between
// must be inlined as well, and a lambda has no instruction set.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define TESSERA_WITH_TYPE(format, dtype, call) \
  if ((dtype) == DType::kFloat32) {            \
    using Value = float;                       \
    TESSERA_WITH_BITS(format, call);           \
  } else if ((dtype) == DType::kBFloat16) {    \
    using Value = BFloat16;                    \
    TESSERA_WITH_BITS(format, call);           \
  } else {                                     \
    using Value = Float16;                     \
    TESSERA_WITH_BITS(format, call);           \
  }
#define TESSERA_WITH_BITS(format, call) \
  if ((format).bits == 8) {             \
    constexpr int kBits = 8;            \
    call;                               \
  } else {                              \
    constexpr int kBits = 4;            \
    call;                               \
  }

// An attribute cannot stand in parentheses.
#define TESSERA_BLOCK_LOOPS(suffix, name, attribute)                                             \
  attribute void encode_##suffix(const BlockFormat& format, const void* values, DType dtype,     \
                                 std::int64_t numel, std::byte* wire) {                          \
    TESSERA_WITH_TYPE(                                                                           \
        format, dtype,                                                                           \
        (encode_blocks<kBits>(format, static_cast<const Value*>(values), numel, wire)));         \
  }                                                                                              \
  attribute void decode_##suffix(const BlockFormat& format, const std::byte* wire,               \
                                 std::int64_t numel, void* values, DType dtype) {                \
    TESSERA_WITH_TYPE(format, dtype,                                                             \
                      (decode_blocks<kBits>(format, wire, numel, static_cast<Value*>(values)))); \
  }                                                                                              \
  attribute void decode_sum_##suffix(const BlockFormat& format, const std::byte* wires,          \
                                     std::size_t stride, int num_wires, std::int64_t numel,      \
                                     void* sum, DType dtype) {                                   \
    TESSERA_WITH_TYPE(format, dtype,                                                             \
                      (decode_sum_blocks<kBits>(format, wires, stride, num_wires, numel,         \
                                                static_cast<Value*>(sum))));                     \
  }                                                                                              \
  attribute void chunk_squares_##suffix(const BlockFormat& format, const void* values,           \
                                        DType dtype, std::int64_t numel, const std::byte* wire,  \
                                        std::int64_t chunk, double* sums) {                      \
    TESSERA_WITH_TYPE(format, dtype,                                                             \
                      (chunk_squares_of<kBits>(format, static_cast<const Value*>(values), numel, \
                                               wire, chunk, sums)));                             \
  }                                                                                              \
  constexpr BlockLoops block_loops_##suffix = {name, encode_##suffix, decode_##suffix,           \
                                               decode_sum_##suffix, chunk_squares_##suffix};
#define TESSERA_TABLE_ENTRY(suffix, name, attribute) block_loops_##suffix,
// NOLINTEND(bugprone-macro-parentheses)

TESSERA_PER_INSTRUCTION_SET(TESSERA_BLOCK_LOOPS)
constexpr BlockLoops kLoops[] = {TESSERA_PER_INSTRUCTION_SET(TESSERA_TABLE_ENTRY)};

}  // namespace

std::span<const BlockLoops> runnable_block_loops() {
  static const std::size_t num_runnable = count_runnable_sets();
  return std::span<const BlockLoops>(kLoops).first(num_runnable);
}

void measure_blocks(const BlockLoops& loops, const BlockFormat& format, const void* values,
                    DType dtype, std::int64_t numel, const std::byte* wire, double* result,
                    bool continues) {
  const std::int64_t num_chunks = (numel + kMeasureChunk - 1) / kMeasureChunk;
  // Slots without a chunk are zeros, which change no sum; most of them need not be there.
  const auto num_slots = std::bit_ceil(
      static_cast<std::size_t>(std::clamp<std::int64_t>(num_chunks, 1, kMeasureSlots)));
  std::vector<std::array<double, 2>> slots(num_slots);
  for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::array<double, 2> sums{};
    loops.chunk_squares(format, values, dtype, numel, wire, chunk, sums.data());
    std::array<double, 2>& slot = slots[static_cast<std::size_t>(chunk % kMeasureSlots)];
    slot[0] += sums[0];
    slot[1] += sums[1];
  }
  for (std::size_t half = num_slots / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) {
      slots[i][0] += slots[i + half][0];
      slots[i][1] += slots[i + half][1];
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    result[i] = (continues ? result[i] : 0.0) + slots[0][i];
  }
}

}  // namespace tessera::quant
