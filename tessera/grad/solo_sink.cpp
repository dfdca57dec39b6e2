#include "tessera/grad/solo_sink.h"

#include <cstring>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

bool is_on_nvme(const shard::Param& param) { return param.placement().gradient == Tier::kNvme; }

// Memory of autograd that we hold, charged as long as we do.
class Adopted {
 public:
  Adopted(std::shared_ptr<void> owner, Ledger* ledger, std::size_t bytes)
      : owner_(std::move(owner)), ledger_(ledger), bytes_(bytes) {
    if (ledger_ != nullptr) {
      ledger_->charge(Tier::kDevice, Role::kGradient, bytes_);
    }
  }
  ~Adopted() {
    owner_.reset();
    if (ledger_ != nullptr) {
      ledger_->discharge(Tier::kDevice, Role::kGradient, bytes_);
    }
  }
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;

 private:
  std::shared_ptr<void> owner_;
  Ledger* const ledger_;
  const std::size_t bytes_;
};

}  // namespace

SoloSink::SoloSink(GradientStream& stream)
    : stream_(stream), sums_(static_cast<std::size_t>(stream.parts().params.num_params())) {
  const ReducerParts& parts = stream_.parts();
  if (parts.sum_of_squares) {
    squares_ =
        stream_.device().allocate(Tier::kPinned, sums_.size() * sizeof(double), Role::kOther);
  }
  for (int id = 0; id < parts.params.num_params(); ++id) {
    const shard::Param& param = parts.params[id];
    if (!param.trainable() || is_on_nvme(param)) {
      continue;
    }
    Sum& sum = sum_of(param);
    if (stream_.leaves_for_host(param)) {
      sum.host = stream_.device().allocate(
          Tier::kPinned,
          static_cast<std::size_t>(param.layout().shard_numel()) * bytes_of(param.layout().dtype()),
          Role::kGradient);
    } else if (parts.is_planned && !parts.one_backward &&
               param.layout().dtype() != DType::kFloat32) {
      own_memory(sum, param);
    }
  }
}

SoloSink::~SoloSink() {
  clear();
  stream_.drain();
}

void SoloSink::begin_backward(bool is_first) {
  if (is_first) {
    return;
  }
  stream_.check_can_add();
  TESSERA_CHECK(!stream_.parts().one_backward, ConfigError,
                "a second backward before step(): memory was planned for one micro-batch per step, "
                "whose gradients leave the device; set batch.accumulate to the number of "
                "backwards per step");
}

float* SoloSink::own_memory(Sum& sum, const shard::Param& param) {
  const auto bytes = static_cast<std::size_t>(param.layout().numel()) * sizeof(float);
  if (sum.own.bytes() != bytes) {
    sum.own = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
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
  Sum& sum = sum_of(param);
  stream_.order_behind_compute();
  if (is_on_nvme(param)) {
    stream_.put_on_nvme({param.id(), 0, numel}, gradient.data, gradient.dtype, sum.is_put);
    stream_.retire(std::move(gradient.owner));
    sum.is_put = true;
  } else if (stream_.leaves_for_host(param)) {
    send_to_host(sum, param, std::move(gradient));
  } else if (sum.values != nullptr) {
    add(sum, param, std::move(gradient));
  } else if (gradient.dtype == DType::kFloat32 ||
             (stream_.is_discrete() && sum.own.data() == nullptr)) {
    adopt(sum, param, std::move(gradient));
  } else {
    make_own(sum, param, std::move(gradient));
  }
}

// Before the values go, or are changed.
void SoloSink::start_square(Sum& sum, const shard::Param& param, const void* values, DType dtype) {
  if (squares_.data() != nullptr) {
    std::ignore = stream_.parts().sum_of_squares(
        values, dtype, param.layout().numel(),
        reinterpret_cast<double*>(squares_.data()) + param.id(), stream_.stream());
    sum.has_square = true;
  }
}

void SoloSink::send_to_host(Sum& sum, const shard::Param& param, FullGradient gradient) {
  TESSERA_INVARIANT(gradient.dtype == param.layout().dtype(), "the gradient of parameter '",
                    param.name(), "' is ", to_string(gradient.dtype), ", the parameter is ",
                    to_string(param.layout().dtype()));
  start_square(sum, param, gradient.data, gradient.dtype);
  sum.values = sum.host.data();
  sum.dtype = gradient.dtype;
  sum.left = stream_.start_to_host(
      sum.host.data(), gradient.data,
      static_cast<std::size_t>(param.layout().numel()) * bytes_of(gradient.dtype));
  const std::int64_t bytes = bytes_of_full(param, gradient);
  stream_.stats().host_bytes += static_cast<std::uint64_t>(bytes);
  stream_.retire(std::move(gradient.owner), sum.left, bytes);
}

void SoloSink::adopt(Sum& sum, const shard::Param& param, FullGradient gradient) {
  if (stream_.is_discrete()) {  // else it costs a pass whenever it is made
    start_square(sum, param, gradient.data, gradient.dtype);
  }
  sum.values = gradient.data;
  sum.dtype = gradient.dtype;
  if (sum.own.data() != nullptr) {  // zeros of a step without it
    stream_.retire(std::make_shared<device::Memory>(std::move(sum.own)));
    sum.own_is_zero = false;
  }
  const auto bytes = static_cast<std::size_t>(bytes_of_full(param, gradient));
  sum.owner = std::make_shared<Adopted>(std::move(gradient.owner), stream_.parts().ledger,
                                        stream_.is_discrete() ? bytes : taken_bytes(bytes));
}

void SoloSink::widen(Sum& sum, const shard::Param& param, const void* values, DType dtype) {
  float* const data = own_memory(sum, param);
  sum.own_is_zero = false;
  stream_.copy(data, DType::kFloat32, values, dtype, param.layout().numel());
  sum.values = data;
  sum.dtype = DType::kFloat32;
}

void SoloSink::make_own(Sum& sum, const shard::Param& param, FullGradient gradient) {
  widen(sum, param, gradient.data, gradient.dtype);
  const std::int64_t bytes = bytes_of_full(param, gradient);
  stream_.retire(std::move(gradient.owner), {}, bytes);
}

void SoloSink::add(Sum& sum, const shard::Param& param, FullGradient gradient) {
  const std::int64_t numel = param.layout().numel();
  if (sum.dtype != DType::kFloat32) {  // adopted, and not alone any more
    widen(sum, param, sum.values, sum.dtype);
    stream_.retire(std::move(sum.owner));
  }
  sum.has_square = false;
  // Adopted memory is the reducer's, and written to.
  auto* const data = static_cast<float*>(const_cast<void*>(sum.values));
  stream_.add(data, gradient.data, gradient.dtype, numel);
  const std::int64_t bytes = bytes_of_full(param, gradient);
  stream_.retire(std::move(gradient.owner), {}, bytes);
}

ShardGradient SoloSink::shard_gradient(const shard::Param& param, bool /*is_zero*/) {
  const ShardGradient gradient = ordered_gradient(param);
  if (std::exchange(zeros_are_made_, false)) {
    stream_.synchronize();
  }
  return gradient;
}

ShardGradient SoloSink::ordered_gradient(const shard::Param& param) {
  Sum& sum = sum_of(param);
  TESSERA_INVARIANT(!sum.is_freed, "the gradient of parameter '", param.name(),
                    "' is asked for after it was freed");
  ShardGradient gradient;
  gradient.numel = param.layout().numel();
  if (gradient.numel == 0) {
    return gradient;
  }
  gradient.is_on_host = stream_.leaves_for_host(param);
  if (gradient.is_on_host) {
    gradient.dtype = param.layout().dtype();
    gradient.values = sum.host.data();
    gradient.ready = sum.left;
    if (sum.values == nullptr) {
      std::memset(sum.host.data(), 0, sum.host.bytes());
    }
    return gradient;
  }
  if (sum.values == nullptr) {
    float* const zeros = own_memory(sum, param);
    if (!sum.own_is_zero) {
      stream_.zero(zeros, sum.own.bytes());
      zeros_are_made_ = true;
      sum.own_is_zero = true;
    }
    gradient.values = zeros;
  } else {
    gradient.values = sum.values;
    gradient.dtype = sum.dtype;
    if (sum.has_square) {
      gradient.squares = reinterpret_cast<const double*>(squares_.data()) + param.id();
    }
  }
  if (gradient.dtype == DType::kFloat32) {
    gradient.data = static_cast<float*>(const_cast<void*>(gradient.values));
  }
  return gradient;
}

std::optional<double> SoloSink::sum_of_squares(const shard::Param& param) {
  const Sum& sum = sum_of(param);
  if (sum.has_square) {
    return reinterpret_cast<const double*>(squares_.data())[param.id()];
  }
  if (sum.values == nullptr) {
    return 0.0;  // there is no gradient
  }
  return std::nullopt;
}

void SoloSink::free_gradient(const shard::Param& param) {
  Sum& sum = sum_of(param);
  sum.values = nullptr;
  sum.is_freed = true;
  stream_.retire(std::move(sum.owner), param.updated());
}

void SoloSink::clear() noexcept {
  for (Sum& sum : sums_) {
    sum.values = nullptr;
    sum.is_put = false;
    sum.has_square = false;
    sum.is_freed = false;
    if (sum.owner) {
      stream_.retire(std::move(sum.owner));  // an update on the stream may still read it
    }
  }
}

}  // namespace tessera::grad
