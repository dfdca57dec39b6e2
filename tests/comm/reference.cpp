#include "tests/comm/reference.h"

#include <cmath>
#include <cstring>

namespace tessera::comm::reference {
namespace {

std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

double value(std::uint64_t seed, int rank, std::size_t index) {
  const std::uint64_t bits =
      mix(seed * 1000003ULL + static_cast<std::uint64_t>(rank) * 8191ULL + mix(index));
  const double mantissa = 1.0 + static_cast<double>(bits >> 40) / 16777216.0;
  const double magnitude = std::ldexp(mantissa, static_cast<int>(bits % 25) - 12);
  return (bits & 64U) != 0 ? -magnitude : magnitude;
}

void store(std::byte* at, DType dtype, double number) {
  const auto put = [at](auto stored) { std::memcpy(at, &stored, sizeof(stored)); };
  switch (dtype) {
    case DType::kFloat32:
      return put(static_cast<float>(number));
    case DType::kBFloat16:
      return put(to_bfloat16(static_cast<float>(number)));
    case DType::kFloat16:
      return put(to_float16(static_cast<float>(number)));
    case DType::kFloat64:
      return put(number);
    case DType::kInt64:
      return put(static_cast<std::int64_t>(number * 4096.0));
    case DType::kInt32:
      return put(static_cast<std::int32_t>(number * 256.0));
    case DType::kUInt8:
      return put(static_cast<std::uint8_t>(static_cast<std::int64_t>(number * 256.0) & 0xff));
  }
}

template <typename T>
T load(const std::vector<std::byte>& bytes, std::size_t index) {
  T result;
  std::memcpy(&result, bytes.data() + index * sizeof(T), sizeof(T));
  return result;
}

}  // namespace

std::vector<std::byte> array(std::uint64_t seed, int rank, std::size_t begin, std::size_t numel,
                             DType dtype) {
  std::vector<std::byte> bytes(numel * bytes_of(dtype));
  for (std::size_t i = 0; i < numel; ++i) {
    store(bytes.data() + i * bytes_of(dtype), dtype, value(seed, rank, begin + i));
  }
  return bytes;
}

std::vector<std::byte> arrays(std::uint64_t seed, int num_ranks, std::size_t numel, DType dtype) {
  std::vector<std::byte> all;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::vector<std::byte> part = array(seed, rank, 0, numel, dtype);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::vector<std::byte> rank_order_sum(std::uint64_t seed, int num_ranks, std::size_t begin,
                                      std::size_t numel, DType dtype, DType out_dtype) {
  std::vector<std::vector<std::byte>> parts;
  for (int rank = 0; rank < num_ranks; ++rank) {
    parts.push_back(array(seed, rank, begin, numel, dtype));
  }
  std::vector<std::byte> out(numel * bytes_of(out_dtype));
  for (std::size_t i = 0; i < numel; ++i) {
    const auto put = [&](auto stored) {
      std::memcpy(out.data() + i * sizeof(stored), &stored, sizeof(stored));
    };
    if (dtype == DType::kFloat64) {
      double sum = load<double>(parts[0], i);
      for (std::size_t r = 1; r < parts.size(); ++r) {
        sum += load<double>(parts[r], i);
      }
      put(sum);
    } else if (dtype == DType::kInt64) {
      std::int64_t sum = 0;
      for (const auto& part : parts) {
        sum += load<std::int64_t>(part, i);
      }
      put(sum);
    } else {
      float sum = 0;
      for (std::size_t r = 0; r < parts.size(); ++r) {
        const float next = dtype == DType::kFloat32    ? load<float>(parts[r], i)
                           : dtype == DType::kBFloat16 ? to_float(load<BFloat16>(parts[r], i))
                                                       : to_float(load<Float16>(parts[r], i));
        sum = r == 0 ? next : sum + next;
      }
      if (out_dtype == DType::kFloat32) {
        put(sum);
      } else if (out_dtype == DType::kBFloat16) {
        put(to_bfloat16(sum));
      } else {
        put(to_float16(sum));
      }
    }
  }
  return out;
}

bool same_bytes(const std::vector<std::byte>& left, const std::vector<std::byte>& right) {
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), left.size()) == 0);
}

}  // namespace tessera::comm::reference
