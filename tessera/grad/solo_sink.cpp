#include "tessera/grad/solo_sink.h"

#include <utility>

namespace tessera::grad {

SoloSink::SoloSink(GradientStream& stream)
    : stream_(stream), sums_(static_cast<std::size_t>(stream.parts().params.num_params())) {}

SoloSink::~SoloSink() {
  clear();
  stream_.drain();
}

void SoloSink::begin_backward(bool is_first) {
  if (!is_first) {
    stream_.check_can_add();
  }
}

float* SoloSink::own_memory(Sum& sum, const shard::Param& param) {
  const auto bytes = static_cast<std::size_t>(param.layout().numel()) * sizeof(float);
  if (sum.own.bytes() != bytes) {
    sum.own = stream_.device().allocate(device::MemoryKind::kDevice, bytes, Role::kGradient);
  }
  return reinterpret_cast<float*>(sum.own.data());
}

void SoloSink::check(const shard::Param& param, const FullGradient& gradient) const {
  stream_.check_convertible(param.name(), gradient.dtype, DType::kFloat32);
}

void SoloSink::take(const shard::Param& param, FullGradient gradient) {
  const std::int64_t numel = param.layout().numel();
  if (numel == 0) {
    return;
  }
  Sum& sum = sums_[static_cast<std::size_t>(param.id())];
  stream_.order_behind_compute();
  if (sum.data != nullptr) {
    stream_.add(sum.data, gradient.data, gradient.dtype, numel);
    stream_.retire(std::move(gradient.owner));
  } else if (gradient.dtype == DType::kFloat32) {
    sum.data = static_cast<float*>(gradient.data);
    sum.owner = std::move(gradient.owner);
  } else {
    float* data = own_memory(sum, param);
    sum.own_is_zero = false;
    stream_.copy(data, DType::kFloat32, gradient.data, gradient.dtype, numel);
    sum.data = data;
    stream_.retire(std::move(gradient.owner));
  }
}

ShardGradient SoloSink::shard_gradient(const shard::Param& param, bool /*is_zero*/) {
  Sum& sum = sums_[static_cast<std::size_t>(param.id())];
  if (sum.data != nullptr || param.layout().numel() == 0) {
    return {sum.data, param.layout().numel()};
  }
  float* zeros = own_memory(sum, param);
  if (!sum.own_is_zero) {
    stream_.zero(zeros, sum.own.bytes());
    stream_.synchronize();
    sum.own_is_zero = true;
  }
  return {zeros, param.layout().numel()};
}

void SoloSink::clear() noexcept {
  for (Sum& sum : sums_) {
    sum.data = nullptr;
    if (sum.owner) {
      stream_.retire(std::move(sum.owner));  // an update on the stream may still read it
    }
  }
}

}  // namespace tessera::grad
