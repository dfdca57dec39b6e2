#include "testing/plain_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

namespace tessera::comm {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(std::int32_t);
constexpr std::size_t kBlockBytes = kHeaderBytes + PlainCodec::kBlockNumel;
constexpr std::int32_t kNotFinite = std::numeric_limits<std::int32_t>::max();

void encode_floats(const std::vector<float>& values, std::byte* wire) {
  for (std::size_t begin = 0; begin < values.size(); begin += PlainCodec::kBlockNumel) {
    const std::size_t end = std::min(values.size(), begin + PlainCodec::kBlockNumel);
    std::int32_t exponent = -126;
    for (std::size_t i = begin; i < end; ++i) {
      int own = exponent;
      if (values[i] != 0.0F) {
        std::frexp(values[i], &own);
      }
      const bool is_lost = exponent == kNotFinite || !std::isfinite(values[i]);
      exponent = is_lost ? kNotFinite : std::max<std::int32_t>(exponent, own);
    }
    std::memcpy(wire, &exponent, kHeaderBytes);
    const double scale = exponent == kNotFinite ? 0 : std::ldexp(1.0, 7 - exponent);
    for (std::size_t i = begin; i < end; ++i) {
      const auto cut = exponent == kNotFinite
                           ? std::int8_t{0}
                           : static_cast<std::int8_t>(static_cast<double>(values[i]) * scale);
      std::memcpy(wire + kHeaderBytes + (i - begin), &cut, 1);
    }
    wire += kBlockBytes;
  }
}

std::vector<float> decode_floats(const std::byte* wire, std::size_t numel) {
  std::vector<float> values(numel);
  for (std::size_t begin = 0; begin < numel; begin += PlainCodec::kBlockNumel) {
    std::int32_t exponent = 0;
    std::memcpy(&exponent, wire, kHeaderBytes);
    const double scale = exponent == kNotFinite ? std::numeric_limits<double>::quiet_NaN()
                                                : std::ldexp(1.0, exponent - 7);
    for (std::size_t i = begin; i < std::min<std::size_t>(numel, begin + PlainCodec::kBlockNumel);
         ++i) {
      std::int8_t cut = 0;
      std::memcpy(&cut, wire + kHeaderBytes + (i - begin), 1);
      values[i] = static_cast<float>(cut * scale);
    }
    wire += kBlockBytes;
  }
  return values;
}

// Work on memory that the host may not touch: what it reads is copied to `in`, and what it leaves
// in `out` is copied back. Without a device, and without a stream, it is done at once.
struct Work {
  const void* from = nullptr;
  std::vector<std::byte> in;
  const void* more_from = nullptr;
  std::vector<std::byte> more_in;
  void* to = nullptr;
  std::vector<std::byte> out;
  void (*run)(Work& work) = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t numel = 0;
  std::size_t stride = 0;
  int num_wires = 1;
  bool continues = false;
};

device::Pending start(device::Device* device, device::Stream* stream, Work given) {
  const auto work = std::make_shared<Work>(std::move(given));
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) {
      return;
    }
    if (stream != nullptr && device != nullptr) {
      static_cast<void>(device->start_copy(to, from, bytes, *stream));
    } else if (stream != nullptr) {
      static_cast<void>(stream->enqueue([=] { std::memcpy(to, from, bytes); }));
    } else {
      std::memcpy(to, from, bytes);
    }
  };
  copy(work->in.data(), work->from, work->in.size());
  copy(work->more_in.data(), work->more_from, work->more_in.size());
  if (work->continues) {
    copy(work->out.data(), work->to, work->out.size());
  }
  if (stream == nullptr) {
    work->run(*work);
  } else {
    static_cast<void>(stream->enqueue([work] { work->run(*work); }));
  }
  copy(work->to, work->out.data(), work->out.size());
  return stream != nullptr ? stream->enqueue([work] {}) : device::Pending();
}

std::size_t bytes_for(std::int64_t numel, DType dtype) {
  return static_cast<std::size_t>(numel) * bytes_of(dtype);
}

}  // namespace

std::vector<float> to_floats(const void* values, DType dtype, std::int64_t numel) {
  std::vector<float> floats(static_cast<std::size_t>(numel));
  const auto* at = static_cast<const std::byte*>(values);
  for (float& value : floats) {
    if (dtype == DType::kFloat32) {
      std::memcpy(&value, at, sizeof(value));
    } else {
      BFloat16 low;
      Float16 half;
      std::memcpy(&low, at, sizeof(low));
      std::memcpy(&half, at, sizeof(half));
      value = dtype == DType::kBFloat16 ? to_float(low) : to_float(half);
    }
    at += bytes_of(dtype);
  }
  return floats;
}

void from_floats(const std::vector<float>& floats, void* values, DType dtype) {
  auto* at = static_cast<std::byte*>(values);
  for (const float value : floats) {
    const BFloat16 low = to_bfloat16(value);
    const Float16 half = to_float16(value);
    if (dtype == DType::kFloat32) {
      std::memcpy(at, &value, sizeof(value));
    } else if (dtype == DType::kBFloat16) {
      std::memcpy(at, &low, sizeof(low));
    } else {
      std::memcpy(at, &half, sizeof(half));
    }
    at += bytes_of(dtype);
  }
}

std::vector<float> through_plain_codec(const std::vector<float>& values) {
  std::vector<std::byte> wire(PlainCodec().wire_bytes(static_cast<std::int64_t>(values.size())));
  encode_floats(values, wire.data());
  return decode_floats(wire.data(), values.size());
}

std::size_t PlainCodec::wire_bytes(std::int64_t numel) const {
  const auto num_blocks = static_cast<std::size_t>((numel + kBlockNumel - 1) / kBlockNumel);
  return (num_blocks * kBlockBytes + 15) / 16 * 16;
}

device::Pending PlainCodec::encode(const void* values, DType dtype, std::int64_t numel,
                                   std::byte* wire, device::Stream* stream) const {
  Work work;
  work.from = values;
  work.in.resize(bytes_for(numel, dtype));
  work.to = wire;
  work.out.resize(wire_bytes(numel));
  work.dtype = dtype;
  work.numel = numel;
  work.run = [](Work& it) {
    std::fill(it.out.begin(), it.out.end(), std::byte{0});
    encode_floats(to_floats(it.in.data(), it.dtype, it.numel), it.out.data());
  };
  return start(device_, stream, std::move(work));
}

device::Pending PlainCodec::decode(const std::byte* wire, std::int64_t numel, void* values,
                                   DType dtype, device::Stream* stream) const {
  return decode_sum(wire, wire_bytes(numel), 1, numel, values, dtype, stream);
}

device::Pending PlainCodec::decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                                       std::int64_t numel, void* sum, DType dtype,
                                       device::Stream* stream) const {
  Work work;
  work.from = wires;
  work.in.resize(numel == 0 ? 0
                            : stride * static_cast<std::size_t>(num_wires - 1) + wire_bytes(numel));
  work.to = sum;
  work.out.resize(bytes_for(numel, dtype));
  work.dtype = dtype;
  work.numel = numel;
  work.stride = stride;
  work.num_wires = num_wires;
  work.run = [](Work& it) {
    std::vector<float> total = decode_floats(it.in.data(), static_cast<std::size_t>(it.numel));
    for (int wire = 1; wire < it.num_wires; ++wire) {
      const std::vector<float> next =
          decode_floats(it.in.data() + static_cast<std::size_t>(wire) * it.stride, total.size());
      for (std::size_t i = 0; i < total.size(); ++i) {
        total[i] += next[i];
      }
    }
    from_floats(total, it.out.data(), it.dtype);
  };
  return start(device_, stream, std::move(work));
}

device::Pending PlainCodec::measure(const void* values, DType dtype, std::int64_t numel,
                                    const std::byte* wire, double* result, bool continues,
                                    device::Stream* stream) const {
  Work work;
  work.from = values;
  work.in.resize(bytes_for(numel, dtype));
  work.more_from = wire;
  work.more_in.resize(wire_bytes(numel));
  work.to = result;
  work.out.resize(2 * sizeof(double));
  work.dtype = dtype;
  work.numel = numel;
  work.continues = continues;
  work.run = [](Work& it) {
    const std::vector<float> truth = to_floats(it.in.data(), it.dtype, it.numel);
    const std::vector<float> decoded = decode_floats(it.more_in.data(), truth.size());
    double sums[2] = {0, 0};
    if (it.continues) {
      std::memcpy(sums, it.out.data(), sizeof(sums));
    }
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const double error = static_cast<double>(decoded[i]) - static_cast<double>(truth[i]);
      sums[0] += error * error;
      sums[1] += static_cast<double>(truth[i]) * static_cast<double>(truth[i]);
    }
    std::memcpy(it.out.data(), sums, sizeof(sums));
  };
  return start(device_, stream, std::move(work));
}

}  // namespace tessera::comm
