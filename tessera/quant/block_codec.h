// Values as blocks of integers with a scale each: int8 in a quarter, int4 in an eighth of the bytes
// of fp32, for gathers, reductions and frozen weights.
//
// [Note: quantised bytes]
// `numel` values are cut into blocks of block_numel; the last one may be short. Their wire is one
// run of bytes, decoded without anything else, little-endian:
//
//   codes     ceil(numel * bits / 8) bytes, with zeros to a multiple of 16. int8: byte i is the
//             code of value i, in two's complement. int4: byte i has the code of value 2i in its
//             low half and that of value 2i + 1 in its high half.
//   scales    2 bytes for each block, bf16, with zeros to a multiple of 16
//
// A value is decoded as code * scale, which fp32 holds exactly. With c the largest code, 127 or 7,
// the scale of a block is the largest of its magnitudes, divided by c in fp32 and rounded up to
// bf16, but at least 2^-126; the code of x is x * (1 / scale), both in fp32, rounded to nearest
// even. A block of zeros has scale zero. One with a NaN or an infinity has the scale NaN (0x7fc0)
// and codes of zero: all of it decodes to NaN, so that it is found whoever looks.
//
// Since no magnitude exceeds c * scale * (1 + 2^-24), no code exceeds c. The error of a value is at
// most scale * (1/2 + c * 2^-23): half a code, and what two roundings of fp32 move the quotient by.
// A block whose largest magnitude is at least 2^-126 * c has a scale of at most (1 + 2^-7) / c of
// it. What was decoded to fp32 encodes to the same codes in a block that keeps its scale, as every
// block does in which c is in use.
//
// Where code * scale is beyond the largest finite number of the type that is decoded to, while half
// a code less is not, that number is taken: what was finite stays finite. What is further away is
// rounded as ever, to infinity. A scale with its sign set, which nobody writes, decodes to NaN.
//
// CPU and CUDA give the same bits: block_rules.cuh. Checkpoints may hold such bytes
// (docs/formats.md): a change of the format is one of theirs.
//
// Threads: a codec may be used from any thread, and outlives what it has enqueued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/codec.h"
#include "tessera/device/device.h"

namespace tessera::quant {

struct BlockFormat {
  int bits = 8;                    // of a code: 4 or 8
  std::int64_t block_numel = 128;  // that share a scale: a multiple of 32, at most kMaxBlockNumel

  bool operator==(const BlockFormat&) const = default;
};
inline constexpr std::int64_t kMaxBlockNumel = 1 << 20;

// Throws ConfigError for what is no format.
void check_block_format(const BlockFormat& format);
// "int8 blocks of 128"
std::string to_string(const BlockFormat& format);

// Sizes, for formats that are. REQUIRES: numel >= 0.
constexpr std::int64_t num_blocks(const BlockFormat& format, std::int64_t numel) {
  return numel / format.block_numel + (numel % format.block_numel == 0 ? 0 : 1);
}
// Where the scales begin.
constexpr std::size_t code_bytes(const BlockFormat& format, std::int64_t numel) {
  const auto values_per_line = 128 / format.bits;  // of 16 bytes
  return static_cast<std::size_t>(numel / values_per_line +
                                  (numel % values_per_line == 0 ? 0 : 1)) *
         16;
}
constexpr std::size_t wire_bytes(const BlockFormat& format, std::int64_t numel) {
  const std::int64_t blocks = num_blocks(format, numel);
  return code_bytes(format, numel) +
         static_cast<std::size_t>(blocks / 8 + (blocks % 8 == 0 ? 0 : 1)) * 16;
}

// The measure of a codec adds in this order. Chunks of kMeasureChunk values: value i of one is
// added to lane i % kMeasureLanes, then lane k + half to lane k, for half = 16, 8, 4, 2, 1. Chunk j
// is added to slot j % kMeasureSlots, in the order of j, and the slots like the lanes.
inline constexpr std::int64_t kMeasureChunk = 1024;
inline constexpr int kMeasureLanes = 32;
inline constexpr std::int64_t kMeasureSlots = 16384;

// For memory of the host; on one core, on the thread that runs the stream. Both throw ConfigError
// for what is no format.
std::unique_ptr<comm::Codec> make_cpu_block_codec(const BlockFormat& format);
// For memory of `device`, which must be a CUDA device and outlive the codec; without a stream for
// memory of the host. Throws DeviceError in a build without CUDA.
std::unique_ptr<comm::Codec> make_cuda_block_codec(const BlockFormat& format,
                                                   device::Device& device);

}  // namespace tessera::quant
