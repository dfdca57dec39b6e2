// What kernels over lists of spans are tried on, on the host and on a GPU: spans of all types, with
// odd sizes, that begin anywhere; and what each kernel should give, one element after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tessera/optim/content_hash.cuh"
#include "tessera/optim/kernels.h"
#include "tessera/optim/update_loops.h"

namespace tessera::optim {

inline constexpr DType kElementTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

inline float widened_at(const void* values, DType dtype, std::size_t i) {
  const auto* bytes = static_cast<const std::byte*>(values) + i * bytes_of(dtype);
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == DType::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
}

inline void narrow_at(void* values, DType dtype, std::size_t i, float value) {
  auto* bytes = static_cast<std::byte*>(values) + i * bytes_of(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kBFloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
  std::memcpy(bytes, &bits, sizeof(bits));
}

// Small numbers of both signs with all bits in use.
class QuickRandom {
 public:
  explicit QuickRandom(std::uint64_t seed) : state_(seed * 2 + 1) {}
  float next() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-33F;
  }

 private:
  std::uint64_t state_;
};

// Sizes of what is hashed: none, less than a word, words with a rest, and several chunks.
inline constexpr std::size_t kHashedBytes[] = {0, 1, 7, 8, 9, 4099, 1'000'006};

inline std::vector<std::byte> hashed_bytes(std::size_t bytes) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    values[i] = static_cast<std::byte>(hash_term(i, bytes));
  }
  return values;
}
// One word after the other.
inline std::uint64_t reference_hash(const std::vector<std::byte>& values) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i * 8 < values.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, values.data() + i * 8, std::min<std::size_t>(8, values.size() - i * 8));
    sum += hash_term(word, i);
  }
  return sum;
}

// Arrays of elements in one piece of memory, each so many elements behind a place that is aligned
// for everything, with bytes in between that nobody may write. The piece is the same wherever it
// lies: on the host, or copied to a device.
class Slab {
 public:
  static constexpr std::size_t kAlignment = 64;

  // Returns where the array begins, in bytes.
  std::size_t add(DType dtype, std::size_t skew, const std::vector<float>& values) {
    const std::size_t begin = bytes_.size() + skew * bytes_of(dtype);
    const std::size_t end = begin + values.size() * bytes_of(dtype) + kAlignment;
    bytes_.resize((end + kAlignment - 1) / kAlignment * kAlignment, std::byte{0xa5});
    for (std::size_t i = 0; i < values.size(); ++i) {
      narrow_at(bytes_.data() + begin, dtype, i, values[i]);
    }
    arrays_.push_back({begin, dtype, values.size()});
    return begin;
  }
  std::size_t add_random(DType dtype, std::size_t skew, std::size_t numel, std::uint64_t seed,
                         bool is_positive = false) {
    QuickRandom random(seed);
    std::vector<float> values(numel);
    for (float& value : values) {
      const float next = random.next();
      value = is_positive ? std::abs(next) : next;
    }
    return add(dtype, skew, values);
  }

  std::vector<std::byte>& bytes() { return bytes_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  // All bits, but any NaN is as good as another.
  bool same_as(Slab other) const {
    Slab own = *this;
    own.unify_nans();
    other.unify_nans();
    return own.bytes_ == other.bytes_;
  }

 private:
  struct Array {
    std::size_t begin = 0;
    DType dtype = DType::kFloat32;
    std::size_t numel = 0;
  };
  void unify_nans() {
    for (const Array& array : arrays_) {
      std::byte* data = bytes_.data() + array.begin;
      for (std::size_t i = 0; i < array.numel; ++i) {
        if (std::isnan(widened_at(data, array.dtype, i))) {
          narrow_at(data, array.dtype, i, std::numeric_limits<float>::quiet_NaN());
        }
      }
    }
  }

  std::vector<std::byte> bytes_;
  std::vector<Array> arrays_;
};

// Memory that is aligned as the slabs within are.
class AlignedBytes {
 public:
  explicit AlignedBytes(const std::vector<std::byte>& bytes)
      : storage_(bytes.size() / Slab::kAlignment), numel_(bytes.size()) {
    if (numel_ > 0) {
      std::memcpy(storage_.data(), bytes.data(), numel_);
    }
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(storage_.data()); }
  std::vector<std::byte> bytes() { return {data(), data() + numel_}; }

 private:
  struct alignas(Slab::kAlignment) Line {
    std::byte bytes[Slab::kAlignment];
  };
  std::vector<Line> storage_;
  std::size_t numel_;
};

// One span of a list of updates.
struct UpdateShape {
  std::size_t numel = 0;
  std::size_t skew = 0;            // of all arrays
  std::size_t parameter_skew = 0;  // of the parameter, in addition
  DType gradient = DType::kFloat32;
  DType parameter = DType::kFloat32;  // fp32: none
};

class UpdateList {
 public:
  explicit UpdateList(const std::vector<UpdateShape>& shapes) {
    std::uint64_t seed = 1;
    for (const UpdateShape& shape : shapes) {
      Places places;
      places.master = slab.add_random(DType::kFloat32, shape.skew, shape.numel, ++seed);
      places.gradient = slab.add_random(shape.gradient, shape.skew, shape.numel, ++seed);
      places.first = slab.add_random(DType::kFloat32, shape.skew, shape.numel, ++seed);
      places.second = slab.add_random(DType::kFloat32, shape.skew, shape.numel, ++seed, true);
      if (shape.parameter != DType::kFloat32) {
        places.parameter = slab.add_random(shape.parameter, shape.skew + shape.parameter_skew,
                                           shape.numel, ++seed);
      }
      // Infinities and NaNs must not spread.
      if (shape.numel > 9) {
        std::byte* gradient = slab.bytes().data() + places.gradient;
        narrow_at(gradient, shape.gradient, 3, std::numeric_limits<float>::infinity());
        narrow_at(gradient, shape.gradient, 8, std::numeric_limits<float>::quiet_NaN());
      }
      shapes_.push_back(shape);
      places_.push_back(places);
    }
  }

  // The list for a slab that lies at `base`.
  std::vector<UpdateTask> tasks(std::byte* base) const {
    std::vector<UpdateTask> out;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const UpdateShape& shape = shapes_[i];
      const Places& places = places_[i];
      UpdateTask task;
      task.scalars.step = 1 + static_cast<std::int64_t>(i % 3);
      task.scalars.lr = 1e-3 * static_cast<double>(i + 1);
      task.scalars.weight_decay_scale = i % 2 == 0 ? 1 : 0;
      task.scalars.gradient_scale = 0.37;
      task.span.master = reinterpret_cast<float*>(base + places.master);
      task.span.gradient = base + places.gradient;
      task.span.gradient_dtype = shape.gradient;
      task.span.states = {reinterpret_cast<float*>(base + places.first),
                          reinterpret_cast<float*>(base + places.second)};
      task.span.parameter = shape.parameter == DType::kFloat32 ? nullptr : base + places.parameter;
      task.span.parameter_dtype = shape.parameter;
      task.span.numel = static_cast<std::int64_t>(shape.numel);
      out.push_back(task);
    }
    return out;
  }

  // What the slab should hold afterwards.
  Slab expected(const RuleOptions& rule) const {
    Slab out = slab;
    AlignedBytes memory(out.bytes());
    for (const UpdateTask& task : tasks(memory.data())) {
      update_one_by_one(rule, task);
    }
    out.bytes() = memory.bytes();
    return out;
  }

  Slab slab;

 private:
  struct Places {
    std::size_t master = 0;
    std::size_t gradient = 0;
    std::size_t first = 0;
    std::size_t second = 0;
    std::size_t parameter = 0;
  };

  template <typename Rule>
  static void update_by(const ElementScalars& scalars, const UpdateSpan& span) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(span.numel); ++i) {
      const float gradient =
          widened_at(span.gradient, span.gradient_dtype, i) * scalars.gradient_scale;
      Rule::update(scalars, gradient, span.master[i], span.states[0][i], span.states[1][i]);
      if (span.parameter != nullptr) {
        narrow_at(span.parameter, span.parameter_dtype, i, span.master[i]);
      }
    }
  }
  static void update_one_by_one(const RuleOptions& rule, const UpdateTask& task) {
    const ElementScalars scalars = element_scalars(rule, task.scalars);
    switch (element_rule(rule)) {
      case ElementRule::kAdamW:
        return update_by<AdamWElement>(scalars, task.span);
      case ElementRule::kAdam:
        return update_by<AdamElement>(scalars, task.span);
      case ElementRule::kSgd:
        return update_by<SgdElement>(scalars, task.span);
      case ElementRule::kMomentum:
        return update_by<MomentumElement>(scalars, task.span);
      case ElementRule::kLion:
        return update_by<LionElement>(scalars, task.span);
    }
  }

  std::vector<UpdateShape> shapes_;
  std::vector<Places> places_;
};

// More spans than one launch takes, all pairs of types, aligned and not.
inline std::vector<UpdateShape> odd_update_shapes() {
  constexpr std::size_t kSizes[] = {0, 1, 3, 4, 5, 63, 1003, 4096, 4099, 20011};
  std::vector<UpdateShape> shapes;
  for (const DType gradient : kElementTypes) {
    for (const DType parameter : kElementTypes) {
      for (std::size_t i = 0; i < std::size(kSizes); ++i) {
        const std::size_t numel = kSizes[(i + shapes.size()) % std::size(kSizes)];
        shapes.push_back({numel, i % 5, i % 3 == 2 ? std::size_t{1} : 0, gradient, parameter});
      }
    }
  }
  return shapes;
}

// The definition in kernels.h, word by word.
inline double defined_sum_of_squares(const void* values, DType dtype, std::size_t numel) {
  double total = 0;
  for (std::size_t begin = 0; begin < numel; begin += kNormBlock) {
    const std::size_t end = std::min(begin + kNormBlock, numel);
    std::vector<double> lanes(kNormLanes, 0.0);
    for (std::size_t lane = 0; lane < kNormLanes; ++lane) {
      for (std::size_t i = begin + lane; i < end; i += kNormLanes) {
        const double value = widened_at(values, dtype, i);
        lanes[lane] += value * value;
      }
    }
    for (std::size_t half = kNormLanes / 2; half >= 1; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane) {
        lanes[lane] += lanes[lane + half];
      }
    }
    total += lanes[0];
  }
  return total;
}

// Spans of the norm in one slab.
struct NormList {
  Slab slab;
  std::vector<std::size_t> begins;
  std::vector<NormSpan> spans;  // without addresses

  explicit NormList(std::size_t num_spans) {
    constexpr std::size_t kSizes[] = {1, 0, 15, 16, 17, 4095, 4096, 4097, 13001};
    for (std::size_t i = 0; i < num_spans; ++i) {
      const DType dtype = kElementTypes[i % 3];
      const std::size_t numel = kSizes[i / 3 % std::size(kSizes)];
      begins.push_back(slab.add_random(dtype, i % 7, numel, i));
      spans.push_back({nullptr, dtype, static_cast<std::int64_t>(numel)});
    }
  }
  std::vector<NormSpan> at(const std::byte* base) const {
    std::vector<NormSpan> out = spans;
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i].values = base + begins[i];
    }
    return out;
  }
  std::vector<double> expected() const {
    std::vector<double> out;
    for (const NormSpan& span : at(slab.bytes().data())) {
      out.push_back(
          defined_sum_of_squares(span.values, span.dtype, static_cast<std::size_t>(span.numel)));
    }
    return out;
  }
};

// What rounding can meet, as fp32: halves of both kinds all over their range, what lies between
// them, the ends of the range, and what is no number.
inline std::vector<float> hard_to_round() {
  using Limits = std::numeric_limits<float>;
  std::vector<float> values = {0.0F,
                               -0.0F,
                               Limits::infinity(),
                               -Limits::infinity(),
                               Limits::max(),
                               Limits::denorm_min(),
                               Limits::quiet_NaN(),
                               std::bit_cast<float>(0x7f800001U),  // NaNs with little in them
                               std::bit_cast<float>(0xff80a000U),
                               65504.0F,
                               65519.996F,
                               65520.0F,
                               0x1p-14F,
                               0x1.ffcp-15F,
                               0x1p-24F,
                               0x1p-25F,
                               0x1.000002p-25F};
#if defined(__SANITIZE_THREAD__)
  constexpr std::uint32_t kStep = 251;  // it looks for races, and takes a minute for all of them
#else
  constexpr std::uint32_t kStep = 7;
#endif
  for (std::uint32_t high = 0; high < 0x10000U; high += kStep) {
    for (const std::uint32_t low : {0x0U, 0x1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
    const float half = to_float(Float16{static_cast<std::uint16_t>(high)});
    const auto bits = std::bit_cast<std::uint32_t>(half);
    for (const std::uint32_t low : {0x0U, 0xfffU, 0x1000U, 0x1001U}) {
      values.push_back(std::bit_cast<float>(bits | low));
    }
  }
  return values;
}

// A sum within one slab: values += addend.
struct AddCase {
  static constexpr std::size_t kNumel = 70001;
  Slab slab;
  std::size_t values = 0;
  std::size_t addend = 0;
  DType dtype;  // of the addend

  AddCase(DType type, std::size_t skew) : dtype(type) {
    values = slab.add_random(DType::kFloat32, 1, kNumel, 1);
    addend = slab.add_random(dtype, skew, kNumel, 2);
  }
  Slab expected() const {
    Slab out = slab;
    for (std::size_t i = 0; i < kNumel; ++i) {
      narrow_at(out.bytes().data() + values, DType::kFloat32, i,
                widened_at(slab.bytes().data() + values, DType::kFloat32, i) +
                    widened_at(slab.bytes().data() + addend, dtype, i));
    }
    return out;
  }
  device::Pending start(Kernels& kernels, std::byte* base, device::Stream& stream) const {
    return kernels.start_add(reinterpret_cast<float*>(base + values), base + addend, dtype, kNumel,
                             stream);
  }
};

// Halves of a sum, which are no elements themselves, within one slab.
struct JoinCase {
  static constexpr std::size_t kNumel = 70001;
  Slab slab;
  std::size_t high = 0;
  std::size_t low = 0;
  std::size_t to = 0;
  std::vector<float> sums;

  explicit JoinCase(std::size_t skew) {
    QuickRandom random(7);
    high = slab.add(DType::kBFloat16, skew, std::vector<float>(kNumel));
    low = slab.add(DType::kBFloat16, skew, std::vector<float>(kNumel));
    to = slab.add(DType::kFloat32, 1, std::vector<float>(kNumel));
    for (std::size_t i = 0; i < kNumel; ++i) {
      sums.push_back(random.next());
      const auto bits = std::bit_cast<std::uint32_t>(sums.back());
      const std::uint16_t halves[] = {static_cast<std::uint16_t>(bits >> 16),
                                      static_cast<std::uint16_t>(bits)};
      std::memcpy(slab.bytes().data() + high + 2 * i, &halves[0], 2);
      std::memcpy(slab.bytes().data() + low + 2 * i, &halves[1], 2);
    }
  }
  Slab expected() const {
    Slab out = slab;
    std::memcpy(out.bytes().data() + to, sums.data(), kNumel * sizeof(float));
    return out;
  }
  device::Pending start(Kernels& kernels, std::byte* base, device::Stream& stream) const {
    return kernels.start_join(reinterpret_cast<float*>(base + to), base + high, base + low, kNumel,
                              stream);
  }
};

// A conversion within one slab.
struct ConvertCase {
  Slab slab;
  std::size_t from = 0;
  std::size_t to = 0;
  DType from_dtype;
  DType to_dtype;
  std::size_t numel;

  ConvertCase(DType from_type, DType to_type, std::size_t from_skew, std::size_t to_skew)
      : from_dtype(from_type), to_dtype(to_type) {
    const std::vector<float> values = hard_to_round();
    numel = values.size();
    from = slab.add(from_dtype, from_skew, values);
    to = slab.add(to_dtype, to_skew, std::vector<float>(numel));
    if (from_dtype != DType::kFloat32) {  // narrow_at() makes no signalling NaNs
      const std::uint16_t signalling = from_dtype == DType::kBFloat16 ? 0x7f81 : 0xfc01;
      std::memcpy(slab.bytes().data() + from, &signalling, sizeof(signalling));
    }
  }
  Slab expected(float scale) const {
    Slab out = slab;
    if (scale == 1.0F && from_dtype == to_dtype) {
      std::memcpy(out.bytes().data() + to, slab.bytes().data() + from, numel * bytes_of(to_dtype));
      return out;
    }
    for (std::size_t i = 0; i < numel; ++i) {
      const float wide = widened_at(slab.bytes().data() + from, from_dtype, i);
      narrow_at(out.bytes().data() + to, to_dtype, i, scale == 1.0F ? wide : wide * scale);
    }
    return out;
  }
};

}  // namespace tessera::optim
