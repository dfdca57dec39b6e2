#include "tests/quant/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::quant {

float value_at(const Bytes& values, DType dtype, std::int64_t i) {
  const std::byte* const at = values.data() + i * static_cast<std::int64_t>(bytes_of(dtype));
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
}

void set_value(Bytes& values, DType dtype, std::int64_t i, float value) {
  std::byte* const at = values.data() + i * static_cast<std::int64_t>(bytes_of(dtype));
  if (dtype == DType::kFloat32) {
    std::memcpy(at, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kBFloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
  std::memcpy(at, &bits, sizeof(bits));
}

float largest_of(DType dtype) {
  return dtype == DType::kFloat32    ? std::numeric_limits<float>::max()
         : dtype == DType::kBFloat16 ? to_float(BFloat16{0x7f7f})
                                     : to_float(Float16{0x7bff});
}

Bytes Reference::encode(const Bytes& values, DType dtype, std::int64_t numel) const {
  Bytes wire(wire_bytes(format, numel), std::byte{0});
  const float most = format.bits == 8 ? 127 : 7;
  for (std::int64_t begin = 0; begin < numel; begin += format.block_numel) {
    const std::int64_t end = std::min(begin + format.block_numel, numel);
    float largest = 0;
    bool is_finite = true;
    for (std::int64_t i = begin; i < end; ++i) {
      const float magnitude = std::fabs(value_at(values, dtype, i));
      is_finite = is_finite && std::isfinite(magnitude);
      largest = magnitude > largest ? magnitude : largest;
    }
    BFloat16 scale{0x7fc0};
    if (is_finite) {
      const float quotient = largest / most;
      scale = to_bfloat16(quotient);
      if (to_float(scale) < quotient) {
        ++scale.bits;
      }
      if (largest > 0 && to_float(scale) < std::numeric_limits<float>::min()) {
        scale = to_bfloat16(std::numeric_limits<float>::min());
      }
    }
    const auto block = static_cast<std::size_t>(begin / format.block_numel);
    std::memcpy(wire.data() + code_bytes(format, numel) + 2 * block, &scale.bits, 2);
    if (!is_finite || largest == 0) {
      continue;
    }
    const float inverse = 1 / to_float(scale);
    for (std::int64_t i = begin; i < end; ++i) {
      const float rounded = std::nearbyint(value_at(values, dtype, i) * inverse);
      const int code = static_cast<int>(std::clamp(rounded, -most, most));
      if (format.bits == 8) {
        wire[static_cast<std::size_t>(i)] = static_cast<std::byte>(code & 0xff);
      } else {
        wire[static_cast<std::size_t>(i / 2)] |=
            static_cast<std::byte>((code & 0xf) << (i % 2 == 0 ? 0 : 4));
      }
    }
  }
  return wire;
}

int Reference::code_at(const Bytes& wire, std::int64_t i) const {
  if (format.bits == 8) {
    const int byte = std::to_integer<int>(wire[static_cast<std::size_t>(i)]);
    return byte < 128 ? byte : byte - 256;
  }
  const int byte = std::to_integer<int>(wire[static_cast<std::size_t>(i / 2)]);
  const int nibble = i % 2 == 0 ? byte % 16 : byte / 16;
  return nibble < 8 ? nibble : nibble - 16;
}

BFloat16 Reference::scale_of(const Bytes& wire, std::int64_t numel, std::int64_t i) const {
  const auto block = static_cast<std::size_t>(i / format.block_numel);
  BFloat16 scale{};
  std::memcpy(&scale.bits, wire.data() + code_bytes(format, numel) + 2 * block, 2);
  return scale;
}

float Reference::decoded(const Bytes& wire, std::int64_t numel, std::int64_t i, DType dtype) const {
  const BFloat16 scale = scale_of(wire, numel, i);
  if (scale.bits >= 0x7f80) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const double step = to_float(scale);
  const double product = code_at(wire, i) * step;
  const double largest = largest_of(dtype);
  const double half_less = std::fabs(product) - step / 2;
  if (std::fabs(product) > largest && half_less <= largest) {
    return std::copysign(largest_of(dtype), static_cast<float>(code_at(wire, i)));
  }
  return std::fabs(product) > std::numeric_limits<float>::max()
             ? std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(product))
             : static_cast<float>(product);
}

Bytes Reference::decode(const Bytes& wire, std::int64_t numel, DType dtype) const {
  return decode_sum({wire}, numel, dtype);
}

Bytes Reference::decode_sum(const std::vector<Bytes>& wires, std::int64_t numel,
                            DType dtype) const {
  Bytes out(static_cast<std::size_t>(numel) * bytes_of(dtype));
  for (std::int64_t i = 0; i < numel; ++i) {
    float sum = decoded(wires[0], numel, i, dtype);
    for (std::size_t rank = 1; rank < wires.size(); ++rank) {
      sum += decoded(wires[rank], numel, i, dtype);
    }
    set_value(out, dtype, i, std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : sum);
  }
  return out;
}

std::array<double, 2> Reference::measure(const Bytes& values, DType dtype, std::int64_t numel,
                                         const Bytes& wire) const {
  const auto tree = [](std::vector<double>& sums) {
    for (std::size_t half = sums.size() / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        sums[i] += sums[i + half];
      }
    }
    return sums[0];
  };
  std::array<std::vector<double>, 2> slots;
  slots.fill(std::vector<double>(kMeasureSlots));
  for (std::int64_t begin = 0; begin < numel; begin += kMeasureChunk) {
    std::array<std::vector<double>, 2> lanes;
    lanes.fill(std::vector<double>(kMeasureLanes));
    for (std::int64_t i = begin; i < std::min(begin + kMeasureChunk, numel); ++i) {
      const auto lane = static_cast<std::size_t>((i - begin) % kMeasureLanes);
      const double value = value_at(values, dtype, i);
      const double error = decoded(wire, numel, i, dtype) - value;
      lanes[0][lane] += error * error;
      lanes[1][lane] += value * value;
    }
    const auto slot = static_cast<std::size_t>(begin / kMeasureChunk % kMeasureSlots);
    slots[0][slot] += tree(lanes[0]);
    slots[1][slot] += tree(lanes[1]);
  }
  return {tree(slots[0]), tree(slots[1])};
}

}  // namespace tessera::quant
