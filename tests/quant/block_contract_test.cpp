// What every codec of blocks does, bit for bit as the reference: each instruction set that this
// machine can run, the codec of the host with and without a stream, and the codec of a GPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "tessera/quant/block_loops.h"
#include "tessera/quant/checked_codec.h"
#include "tests/quant/reference.h"

namespace tessera::quant {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// The loops of one instruction set.
class LoopsCodec final : public CheckedCodec {
 public:
  LoopsCodec(const BlockFormat& format, const BlockLoops& loops)
      : CheckedCodec(format), loops_(loops) {}

  device::Pending encode(const void* values, DType dtype, std::int64_t numel, std::byte* wire,
                         device::Stream* /*stream*/) const override {
    loops_.encode(format(), values, dtype, numel, wire);
    return {};
  }
  device::Pending decode(const std::byte* wire, std::int64_t numel, void* values, DType dtype,
                         device::Stream* /*stream*/) const override {
    loops_.decode(format(), wire, numel, values, dtype);
    return {};
  }
  device::Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                             std::int64_t numel, void* sum, DType dtype,
                             device::Stream* /*stream*/) const override {
    loops_.decode_sum(format(), wires, stride, num_wires, numel, sum, dtype);
    return {};
  }
  device::Pending measure(const void* values, DType dtype, std::int64_t numel,
                          const std::byte* wire, double* result, bool continues,
                          device::Stream* /*stream*/) const override {
    measure_blocks(loops_, format(), values, dtype, numel, wire, result, continues);
    return {};
  }

 private:
  const BlockLoops& loops_;
};

// A codec with the device whose memory it works on.
struct Subject {
  std::function<std::unique_ptr<device::Device>()> make_device;
  std::function<std::unique_ptr<comm::Codec>(const BlockFormat&, device::Device&)> make_codec;
  bool has_stream = false;
};

std::vector<std::pair<std::string, Subject>> host_subjects() {
  const auto cpu = [] { return device::make_cpu_device(); };
  const auto codec = [](const BlockFormat& format, device::Device&) {
    return make_cpu_block_codec(format);
  };
  std::vector<std::pair<std::string, Subject>> subjects = {{"codec", {cpu, codec, true}},
                                                           {"without_stream", {cpu, codec, false}}};
  for (const BlockLoops& loops : runnable_block_loops()) {
    std::string name(loops.name);
    std::replace(name.begin(), name.end(), '-', '_');
    subjects.push_back({name,
                        {cpu,
                         [&loops](const BlockFormat& format, device::Device&) {
                           return std::make_unique<LoopsCodec>(format, loops);
                         },
                         false}});
  }
  return subjects;
}

const auto make_gpu = [] {
  return device::num_cuda_devices() > 0 ? device::make_cuda_device() : nullptr;
};

// Bytes with 16 more around them, which must keep what they hold, `shift` bytes from alignment.
class Guarded {
 public:
  Guarded(device::Device& device, const Bytes& bytes, std::size_t shift)
      : device_(device), bytes_(bytes.size()), shift_(shift) {
    Bytes all(kGuard + shift, kFill);
    all.insert(all.end(), bytes.begin(), bytes.end());
    all.insert(all.end(), kGuard, kFill);
    memory_ = device.allocate(Tier::kDevice, all.size(), Role::kOther);
    device.start_copy(memory_.data(), all.data(), all.size(), stream()).wait();
  }
  std::byte* data() const { return memory_.data() + kGuard + shift_; }
  Bytes read() const {
    Bytes all(memory_.bytes());
    device_.start_copy(all.data(), memory_.data(), all.size(), stream()).wait();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(kGuard + shift_);
    const auto end = begin + static_cast<std::ptrdiff_t>(bytes_);
    const auto is_kept = [](std::byte byte) { return byte == kFill; };
    EXPECT_TRUE(std::all_of(all.begin(), begin, is_kept)) << "something is written in front";
    EXPECT_TRUE(std::all_of(end, all.end(), is_kept)) << "something is written behind";
    return {begin, end};
  }

 private:
  static constexpr std::size_t kGuard = 16;
  static constexpr std::byte kFill{0xa5};
  device::Stream& stream() const { return device_.stream(device::StreamKind::kReduce); }

  device::Device& device_;
  device::Memory memory_;
  const std::size_t bytes_;
  const std::size_t shift_;
};

Bytes as_bytes(const std::array<double, 2>& numbers) {
  Bytes bytes(sizeof(numbers));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

class BlockContract : public ::testing::TestWithParam<std::pair<std::string, Subject>> {
 protected:
  void SetUp() override {
    device_ = GetParam().second.make_device();
    if (device_ == nullptr) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
  }

  void use(const BlockFormat& format) {
    format_ = format;
    codec_ = GetParam().second.make_codec(format, *device_);
  }
  device::Stream* stream() {
    return GetParam().second.has_stream ? &device_->stream(device::StreamKind::kReduce) : nullptr;
  }

  Bytes encode(const Bytes& values, DType dtype, std::int64_t numel, std::size_t shift = 0) {
    const Guarded from(*device_, values, shift);
    const Guarded wire(*device_, Bytes(codec_->wire_bytes(numel), std::byte{0x5a}), 0);
    codec_->encode(from.data(), dtype, numel, wire.data(), stream()).wait();
    return wire.read();
  }
  Bytes decode(const Bytes& wire, std::int64_t numel, DType dtype, std::size_t shift = 0) {
    const Guarded from(*device_, wire, 0);
    const Guarded to(*device_, Bytes(static_cast<std::size_t>(numel) * bytes_of(dtype)), shift);
    codec_->decode(from.data(), numel, to.data(), dtype, stream()).wait();
    return to.read();
  }
  // With 32 bytes between the wires.
  Bytes decode_sum(const std::vector<Bytes>& wires, std::int64_t numel, DType dtype,
                   std::size_t shift = 0) {
    const std::size_t stride = codec_->wire_bytes(numel) + 32;
    Bytes all(stride * wires.size(), std::byte{0x5a});
    for (std::size_t rank = 0; rank < wires.size(); ++rank) {
      std::copy(wires[rank].begin(), wires[rank].end(),
                all.begin() + static_cast<std::ptrdiff_t>(rank * stride));
    }
    const Guarded from(*device_, all, 0);
    const Guarded to(*device_, Bytes(static_cast<std::size_t>(numel) * bytes_of(dtype)), shift);
    codec_
        ->decode_sum(from.data(), stride, static_cast<int>(wires.size()), numel, to.data(), dtype,
                     stream())
        .wait();
    return to.read();
  }
  std::array<double, 2> measure(const Bytes& values, DType dtype, std::int64_t numel,
                                const Bytes& wire, const std::array<double, 2>& before,
                                bool continues, std::size_t shift = 0) {
    const Guarded from(*device_, values, shift);
    const Guarded encoded(*device_, wire, 0);
    const Guarded result(*device_, as_bytes(before), 0);
    codec_
        ->measure(from.data(), dtype, numel, encoded.data(),
                  reinterpret_cast<double*>(result.data()), continues, stream())
        .wait();
    std::array<double, 2> found{};
    const Bytes bytes = result.read();
    std::memcpy(found.data(), bytes.data(), bytes.size());
    return found;
  }

  Reference reference() const { return {format_}; }

  BlockFormat format_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<comm::Codec> codec_;
};

// Kinds of values. Blocks of the last kind are of different sizes and some are not finite.
enum class Kind : std::uint8_t {
  kAlike,
  kAnyBits,
  kTiny,
  kHuge,
  kConstant,
  kTies,
  kSparse,
  kMixed
};
constexpr Kind kKinds[] = {Kind::kAlike,    Kind::kAnyBits, Kind::kTiny,   Kind::kHuge,
                           Kind::kConstant, Kind::kTies,    Kind::kSparse, Kind::kMixed};

float random_value(Kind kind, DType dtype, std::mt19937_64& random, float constant) {
  const auto bits = static_cast<std::uint32_t>(random());
  const float unit = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31F;
  switch (kind) {
    case Kind::kAlike:
      return unit;
    case Kind::kAnyBits: {  // every exponent, finite
      const auto any = std::bit_cast<float>(bits);
      return std::isfinite(any) ? any : unit;
    }
    case Kind::kTiny:  // subnormal, and what is a few times larger
      return std::bit_cast<float>((bits & 0x80000000U) | (bits & 0x7fffffffU) >> (4 + bits % 23)) *
             (dtype == DType::kFloat16 ? 0x1p102F : 1.0F);
    case Kind::kHuge:  // up to the largest
      return std::copysign(largest_of(dtype) * (1 - std::fabs(unit) / 16), unit);
    case Kind::kConstant:
      return std::copysign(constant, unit);
    case Kind::kTies:  // halves of codes
      return std::trunc(unit * 254) * 0.5F;
    case Kind::kSparse:
      return bits % 64 == 0 ? unit : 0.0F;
    case Kind::kMixed:
      return unit;
  }
  return 0;
}

Bytes random_values(Kind kind, DType dtype, std::int64_t numel, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto constant = static_cast<float>(
      std::ldexp(1 + random() % 1000 * 0.001, static_cast<int>(random() % 30) - 15));
  Bytes values(static_cast<std::size_t>(numel) * bytes_of(dtype));
  float factor = 1;
  for (std::int64_t i = 0; i < numel; ++i) {
    float value = random_value(kind, dtype, random, constant);
    if (kind == Kind::kMixed) {
      if (i % 32 == 0) {
        factor = std::ldexp(1.0F, static_cast<int>(random() % 40) - 20);
      }
      value *= factor;
      const float special[] = {
          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0xff812345U), -0.0F};
      value = random() % 300 == 0 ? special[random() % 5] : value;
    }
    set_value(values, dtype, i, value);
  }
  return values;
}

std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> all = {0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1023, 4999};
  std::mt19937_64 random(24);
  for (int i = 0; i < 9; ++i) {
    all.push_back(static_cast<std::int64_t>(random() % 5001));
  }
  return all;
}

struct Case {
  BlockFormat format;
  DType dtype = DType::kFloat32;
  Kind kind = Kind::kAlike;
  std::int64_t numel = 0;
  std::uint64_t seed = 0;
  std::size_t shift = 0;  // of the values, in bytes

  Bytes values(std::uint64_t more = 0) const {
    return random_values(kind, dtype, numel, seed + more);
  }
  std::string text() const {
    return detail::concat(to_string(format), ", ", to_string(dtype), ", kind ",
                          static_cast<int>(kind), ", ", numel, " values, ", shift,
                          " bytes from alignment");
  }
};

// `work(format)` first, then `each(case)`: all formats, types and kinds, with sizes in turn.
template <typename Use, typename Each>
void for_cases(const Use& use, const Each& each) {
  const std::vector<std::int64_t> numels = sizes();
  std::uint64_t seed = 0;
  for (const int bits : {8, 4}) {
    for (const std::int64_t block_numel : {32, 96, 128, 256, 1024}) {
      const BlockFormat format{bits, block_numel};
      use(format);
      for (const DType dtype : kTypes) {
        for (const Kind kind : kKinds) {
          for (int i = 0; i < 6; ++i) {
            const std::int64_t numel = numels[seed % numels.size()];
            ++seed;
            each(Case{format, dtype, kind, numel, seed, seed % 5 == 0 ? bytes_of(dtype) : 0});
            if (::testing::Test::HasFailure()) {
              return;  // the first one says enough
            }
          }
        }
      }
    }
  }
}

TEST_P(BlockContract, EncodesToTheBytesOfTheReference) {
  for_cases([&](const BlockFormat& format) { use(format); },
            [&](const Case& each) {
              const Bytes values = each.values();
              const Bytes expected = reference().encode(values, each.dtype, each.numel);
              EXPECT_TRUE(encode(values, each.dtype, each.numel, each.shift) == expected)
                  << each.text();
            });
}

TEST_P(BlockContract, DecodesToTheBytesOfTheReferenceInEveryType) {
  for_cases(
      [&](const BlockFormat& format) { use(format); },
      [&](const Case& each) {
        const Bytes wire = reference().encode(each.values(), each.dtype, each.numel);
        for (const DType dtype : kTypes) {
          EXPECT_TRUE(decode(wire, each.numel, dtype, each.shift == 0 ? 0 : bytes_of(dtype)) ==
                      reference().decode(wire, each.numel, dtype))
              << each.text() << " to " << to_string(dtype);
        }
      });
}

// What nobody has encoded: the lowest code, any scale.
TEST_P(BlockContract, AnyBytesDecodeAsInTheReference) {
  for (const int bits : {8, 4}) {
    use({bits, 32});
    const std::int64_t numel = 32 * 2048;
    for (std::uint64_t seed = 0; seed < 2; ++seed) {
      std::mt19937_64 random(seed);
      std::vector<Bytes> wires(2, Bytes(codec_->wire_bytes(numel)));
      for (Bytes& wire : wires) {
        std::generate(wire.begin(), wire.end(), [&] { return static_cast<std::byte>(random()); });
      }
      for (const DType dtype : kTypes) {
        EXPECT_TRUE(decode(wires[0], numel, dtype) == reference().decode(wires[0], numel, dtype))
            << codec_->name() << " to " << to_string(dtype);
        EXPECT_TRUE(decode_sum(wires, numel, dtype) == reference().decode_sum(wires, numel, dtype))
            << codec_->name() << " to " << to_string(dtype);
      }
    }
  }
}

TEST_P(BlockContract, SumsInTheOrderOfTheWiresAndRoundsOnce) {
  for_cases([&](const BlockFormat& format) { use(format); },
            [&](const Case& each) {
              std::vector<Bytes> wires;
              for (std::uint64_t rank = 0; rank < 1 + each.seed % 5; ++rank) {
                wires.push_back(reference().encode(each.values(rank), each.dtype, each.numel));
              }
              EXPECT_TRUE(decode_sum(wires, each.numel, each.dtype, each.shift) ==
                          reference().decode_sum(wires, each.numel, each.dtype))
                  << wires.size() << " wires of " << each.text();
            });
}

bool are_same(double a, double b) {
  return std::isnan(a) ? std::isnan(b)
                       : std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

TEST_P(BlockContract, MeasuresInTheOrderOfTheReference) {
  for_cases(
      [&](const BlockFormat& format) { use(format); },
      [&](const Case& each) {
        const Bytes values = each.values();
        const Bytes wire = reference().encode(values, each.dtype, each.numel);
        const auto expected = reference().measure(values, each.dtype, each.numel, wire);
        const auto alone = measure(values, each.dtype, each.numel, wire, {3, 5}, false, each.shift);
        const auto further =
            measure(values, each.dtype, each.numel, wire, {3, 5}, true, each.shift);
        EXPECT_TRUE(are_same(alone[0], expected[0]) && are_same(alone[1], expected[1]))
            << each.text() << ": " << alone[0] << " " << expected[0] << ", " << alone[1] << " "
            << expected[1];
        EXPECT_TRUE(are_same(further[0], 3 + expected[0]) && are_same(further[1], 5 + expected[1]))
            << each.text();
      });
}

TEST_P(BlockContract, MeasuresMoreChunksThanThereAreSlots) {
  const std::int64_t numel = (kMeasureSlots + 1) * kMeasureChunk + 77;
  use({4, 96});
  Bytes values(static_cast<std::size_t>(numel) * 2);
  std::uint64_t state = 24;
  for (std::int64_t i = 0; i < numel; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto bits = static_cast<std::uint16_t>(0x3000 + (state >> 52));  // small halves
    std::memcpy(values.data() + 2 * i, &bits, sizeof(bits));
  }
  const Bytes wire = encode(values, DType::kFloat16, numel);
  const auto found = measure(values, DType::kFloat16, numel, wire, {0, 0}, false);
  const auto expected = reference().measure(values, DType::kFloat16, numel, wire);
  EXPECT_TRUE(are_same(found[0], expected[0]) && are_same(found[1], expected[1]))
      << found[0] << " " << expected[0] << ", " << found[1] << " " << expected[1];
}

// Long enough to be stored past the caches, aligned and not, with a rest behind the last line.
TEST_P(BlockContract, LongSpansDecodeAsShortOnes) {
  for (const int bits : {8, 4}) {
    use({bits, 128});
    const std::int64_t numel = (std::int64_t{2} << 20) + 128 + 37;
    const Bytes values = random_values(Kind::kMixed, DType::kBFloat16, numel, 24);
    const Bytes wire = reference().encode(values, DType::kBFloat16, numel);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Bytes expected = reference().decode(wire, numel, dtype);
      for (const std::size_t shift : {std::size_t{0}, std::size_t{48}}) {  // 16 are in front
        EXPECT_TRUE(decode(wire, numel, dtype, shift) == expected)
            << codec_->name() << " to " << to_string(dtype) << ", " << shift;
      }
    }
  }
}

// Half a code, and what the inverse and the product of fp32 move the quotient by: each at most
// 2^-24 of a quotient of at most c * (1 + 2^-24), which is below c * 2^-23 codes together. The
// decoded value is exact but where it is rounded to a shorter type, so it is compared in fp32.
TEST_P(BlockContract, TheErrorOfEveryFiniteValueIsBelowItsBound) {
  for_cases(
      [&](const BlockFormat& format) { use(format); },
      [&](const Case& each) {
        const Bytes values = each.values();
        const Bytes wire = encode(values, each.dtype, each.numel);
        const Bytes found = decode(wire, each.numel, DType::kFloat32);
        const double most = each.format.bits == 8 ? 127 : 7;
        for (std::int64_t begin = 0; begin < each.numel; begin += each.format.block_numel) {
          const std::int64_t end = std::min(begin + each.format.block_numel, each.numel);
          const double scale = to_float(reference().scale_of(wire, each.numel, begin));
          double largest = 0;
          for (std::int64_t i = begin; i < end; ++i) {
            const double value = value_at(values, each.dtype, i);
            const double decoded = value_at(found, DType::kFloat32, i);
            ASSERT_EQ(std::isfinite(decoded), std::isfinite(scale)) << each.text();
            ASSERT_TRUE(std::isfinite(value) || !std::isfinite(decoded)) << each.text();
            ASSERT_TRUE(std::isnan(scale) ||
                        std::fabs(value - decoded) <= scale * (0.5 + most * 0x1p-23))
                << each.text() << ", value " << i << ": " << value << " becomes " << decoded
                << " with scale " << scale;
            largest = std::max(largest, std::fabs(value));
          }
          ASSERT_TRUE(std::isnan(scale) ||
                      scale <= std::max(0x1p-126, largest / most * (1 + 0x1p-7) * (1 + 0x1p-23)))
              << each.text() << ": scale " << scale << " for " << largest;
        }
      });
}

// The largest finite values of every type, with everything that is nearly as large.
TEST_P(BlockContract, FiniteValuesStayFinite) {
  for (const int bits : {8, 4}) {
    use({bits, 32});
    for (const DType dtype : kTypes) {
      const int step = dtype == DType::kFloat32 ? 4096 : 1;
      Bytes values(32 * bytes_of(dtype) * 512);
      for (std::int64_t i = 0; i < 512 * 32; ++i) {
        const std::int64_t below = (i / 32 + i % 32) * step;
        float value = 0;
        if (dtype == DType::kFloat32) {
          value = std::bit_cast<float>(0x7f7fffffU - static_cast<std::uint32_t>(below));
        } else if (dtype == DType::kBFloat16) {
          value = to_float(BFloat16{static_cast<std::uint16_t>(0x7f7f - below)});
        } else {
          value = to_float(Float16{static_cast<std::uint16_t>(0x7bff - below)});
        }
        set_value(values, dtype, i, i % 2 == 0 ? value : -value);
      }
      const std::int64_t numel = 512 * 32;
      const Bytes found = decode(encode(values, dtype, numel), numel, dtype);
      for (std::int64_t i = 0; i < numel; ++i) {
        ASSERT_TRUE(std::isfinite(value_at(found, dtype, i)))
            << codec_->name() << ", " << to_string(dtype) << ": " << value_at(values, dtype, i);
      }
    }
  }
}

// In a block that keeps its scale, as all do in which the largest code is in use: the largest
// decoded magnitude is then that code times the scale. In fp32, where nothing else is rounded.
TEST_P(BlockContract, WhatWasDecodedEncodesToItself) {
  for_cases([&](const BlockFormat& format) { use(format); },
            [&](const Case& each) {
              const Bytes wire = encode(each.values(), each.dtype, each.numel);
              const Bytes once = decode(wire, each.numel, DType::kFloat32);
              const Bytes again = encode(once, DType::kFloat32, each.numel);
              const int most = each.format.bits == 8 ? 127 : 7;
              for (std::int64_t i = 0; i < each.numel; ++i) {
                const BFloat16 scale = reference().scale_of(wire, each.numel, i);
                if (scale.bits == reference().scale_of(again, each.numel, i).bits) {
                  ASSERT_EQ(reference().code_at(wire, i), reference().code_at(again, i))
                      << each.text() << ", value " << i;
                } else {
                  ASSERT_LT(std::abs(reference().code_at(wire, i)), most) << each.text();
                }
              }
            });
}

TEST_P(BlockContract, RefusesWhatItCannotDo) {
  use({});
  alignas(16) std::byte wire[64] = {};
  float values[4] = {};
  double sums[2] = {};
  const auto fp32 = DType::kFloat32;
  EXPECT_EQ(codec_->name(), "int8 blocks of 128");
  EXPECT_THROW(static_cast<void>(codec_->wire_bytes(-1)), InternalError);
  if (GetParam().first != "codec" && GetParam().first != "cuda") {
    return;
  }
  EXPECT_THROW(static_cast<void>(codec_->encode(values, DType::kInt32, 4, wire, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->encode(values, fp32, -1, wire, stream())), InternalError);
  EXPECT_THROW(static_cast<void>(codec_->encode(values, fp32, 4, wire + 8, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->decode(wire, 4, values, DType::kFloat64, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->decode_sum(wire, 32, 0, 4, values, fp32, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->decode_sum(wire, 16, 2, 4, values, fp32, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->decode_sum(wire, 40, 2, 4, values, fp32, stream())),
               InternalError);
  EXPECT_THROW(static_cast<void>(codec_->measure(values, fp32, 4, wire + 1, sums, false, stream())),
               InternalError);
}

std::string name_of(const ::testing::TestParamInfo<std::pair<std::string, Subject>>& info) {
  return info.param.first;
}
INSTANTIATE_TEST_SUITE_P(Host, BlockContract, ::testing::ValuesIn(host_subjects()), name_of);
INSTANTIATE_TEST_SUITE_P(Cuda, BlockContract,
                         ::testing::Values(std::pair<std::string, Subject>{
                             "cuda",
                             {make_gpu,
                              [](const BlockFormat& format, device::Device& device) {
                                return make_cuda_block_codec(format, device);
                              },
                              true}}),
                         name_of);

}  // namespace
}  // namespace tessera::quant
