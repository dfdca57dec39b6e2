#include "tessera/comm/exact_sum.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "tessera/comm/combine.cuh"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Small enough for the first-level cache, large enough for full vectors.
constexpr std::size_t kBlockNumel = 2048;

template <typename Stored>
auto widen(Stored value) {
  if constexpr (std::is_same_v<Stored, BFloat16> || std::is_same_v<Stored, Float16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <typename Stored, typename Wide>
Stored narrow(Wide value) {
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    return to_bfloat16(value);
  } else if constexpr (std::is_same_v<Stored, Float16>) {
    return to_float16(value);
  } else {
    return static_cast<Stored>(value);
  }
}

// Arrays of `numel` elements, by rank.
struct Parts {
  std::span<const std::byte* const> data;
  std::size_t numel = 0;
};

template <typename Stored, typename Out, typename Combine>
void reduce(const Parts& parts, void* out, Combine combine) {
  using Wide = decltype(widen(Stored{}));
  const auto part = [&](std::size_t rank) {
    return reinterpret_cast<const Stored*>(parts.data[rank]);
  };
  auto* result = static_cast<Out*>(out);
  std::array<Wide, kBlockNumel> sums;
  for (std::size_t begin = 0; begin < parts.numel; begin += kBlockNumel) {
    const std::size_t count = std::min(kBlockNumel, parts.numel - begin);
    const Stored* first = part(0) + begin;
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = widen(first[i]);
    }
    for (std::size_t rank = 1; rank < parts.data.size(); ++rank) {
      const Stored* next = part(rank) + begin;
      for (std::size_t i = 0; i < count; ++i) {
        sums[i] = combine(sums[i], static_cast<Wide>(widen(next[i])));
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      result[begin + i] = narrow<Out>(sums[i]);
    }
  }
}

template <typename Stored, typename Out>
void reduce(const Parts& parts, void* out, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return reduce<Stored, Out>(parts, out, Add{});
    case Reduction::kMax:
      return reduce<Stored, Out>(parts, out, Max{});
    case Reduction::kMin:
      return reduce<Stored, Out>(parts, out, Min{});
  }
}

}  // namespace

void check_reduction(DType dtype, DType out_dtype) {
  const bool half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  TESSERA_CHECK(out_dtype == dtype || (half && out_dtype == DType::kFloat32), ConfigError,
                "reduction from ", to_string(dtype), " into ", to_string(out_dtype),
                ": the result must have the dtype of the parts, or fp32 for bf16 and fp16");
}

void reduce_in_rank_order(const RankParts& parts, void* out, DType out_dtype, Reduction reduction) {
  std::vector<const std::byte*> data(static_cast<std::size_t>(parts.num_parts));
  for (std::size_t rank = 0; rank < data.size(); ++rank) {
    data[rank] =
        static_cast<const std::byte*>(parts.data) + rank * parts.numel * bytes_of(parts.dtype);
  }
  reduce_in_rank_order(data, parts.dtype, parts.numel, out, out_dtype, reduction);
}

void reduce_in_rank_order(std::span<const std::byte* const> data, DType dtype, std::size_t numel,
                          void* out, DType out_dtype, Reduction reduction) {
  check_reduction(dtype, out_dtype);
  const Parts parts{data, numel};
  const bool widens = out_dtype != dtype;
  switch (dtype) {
    case DType::kFloat32:
      return reduce<float, float>(parts, out, reduction);
    case DType::kBFloat16:
      return widens ? reduce<BFloat16, float>(parts, out, reduction)
                    : reduce<BFloat16, BFloat16>(parts, out, reduction);
    case DType::kFloat16:
      return widens ? reduce<Float16, float>(parts, out, reduction)
                    : reduce<Float16, Float16>(parts, out, reduction);
    case DType::kFloat64:
      return reduce<double, double>(parts, out, reduction);
    case DType::kInt64:
      return reduce<std::int64_t, std::int64_t>(parts, out, reduction);
    case DType::kInt32:
      return reduce<std::int32_t, std::int32_t>(parts, out, reduction);
    case DType::kUInt8:
      return reduce<std::uint8_t, std::uint8_t>(parts, out, reduction);
  }
}

}  // namespace tessera::comm
