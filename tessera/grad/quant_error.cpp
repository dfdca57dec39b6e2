#include "tessera/grad/quant_error.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {

double QuantErrorStats::relative() const {
  return value_squares > 0 ? std::sqrt(error_squares / value_squares) : 0;
}

QuantErrorStats& QuantErrorStats::operator+=(const QuantErrorStats& other) {
  error_squares += other.error_squares;
  value_squares += other.value_squares;
  if (other.worst_param >= 0 && (worst_param < 0 || other.worst_error > worst_error)) {
    worst_param = other.worst_param;
    worst_error = other.worst_error;
  }
  return *this;
}

QuantError::QuantError(GradientStream& stream, const comm::Codec& codec, std::size_t scratch_bytes)
    : stream_(stream),
      codec_(codec),
      scratch_bytes_(scratch_bytes),
      is_measured_(static_cast<std::size_t>(stream.parts().params.num_params()), false) {}

void QuantError::reserve() {
  if (scratch_.data() == nullptr && scratch_bytes_ > 0) {
    scratch_ = stream_.device().allocate(Tier::kDevice, scratch_bytes_, Role::kGradient);
    static_assert(sizeof(Squares) == 2 * sizeof(double));
    squares_ = stream_.device().allocate(Tier::kPinned, quant_sums_bytes(is_measured_.size()),
                                         Role::kOther);
  }
}

void QuantError::measure(const Piece& piece, const void* values, DType dtype) {
  const shard::Param& param = stream_.parts().params[piece.param];
  const std::int64_t numel =
      std::clamp<std::int64_t>(param.range().numel - piece.shard_begin, 0, piece.numel);
  if (numel == 0) {
    return;
  }
  reserve();
  const auto id = static_cast<std::size_t>(piece.param);
  device::Stream* const stream = &stream_.stream();
  std::ignore = codec_.encode(values, dtype, numel, scratch_.data(), stream);
  last_ = codec_.measure(values, dtype, numel, scratch_.data(), &squares()[id].error,
                         is_measured_[id], stream);
  is_measured_[id] = true;
}

QuantErrorStats QuantError::take() {
  device::wait_ignoring_failure(std::exchange(last_, {}));
  QuantErrorStats stats;
  for (std::size_t id = 0; id < is_measured_.size(); ++id) {
    if (!is_measured_[id]) {
      continue;
    }
    is_measured_[id] = false;
    const Squares& found = squares()[id];
    if (!std::isfinite(found.error) || !std::isfinite(found.value) || found.value == 0) {
      continue;
    }
    stats += {found.error, found.value, static_cast<int>(id), std::sqrt(found.error / found.value)};
  }
  return stats;
}

}  // namespace tessera::grad
