#include "tessera/grad/solo_sink.h"

#include <utility>

#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

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
  if (!stream_.parts().is_planned && stream_.parts().tier == nullptr) {
    return;
  }
  for (int id = 0; id < stream_.parts().params.num_params(); ++id) {
    const shard::Param& param = stream_.parts().params[id];
    if (param.trainable() && !is_stored(param) && param.layout().dtype() != DType::kFloat32) {
      own_memory(sums_[static_cast<std::size_t>(id)], param);
    }
  }
}

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

bool SoloSink::is_stored(const shard::Param& param) const {
  const GradientTier* tier = stream_.parts().tier;
  return tier != nullptr && tier->stores(param.id());
}

void SoloSink::take(const shard::Param& param, FullGradient gradient) {
  const std::int64_t numel = param.layout().numel();
  if (numel == 0) {
    return;
  }
  Sum& sum = sums_[static_cast<std::size_t>(param.id())];
  stream_.order_behind_compute();
  if (is_stored(param)) {
    stream_.store({param.id(), 0, numel}, gradient.data, gradient.dtype, sum.is_put);
    stream_.retire(std::move(gradient.owner));
    sum.is_put = true;
  } else if (sum.data != nullptr) {
    stream_.add(sum.data, gradient.data, gradient.dtype, numel);
    stream_.retire(std::move(gradient.owner));
  } else if (gradient.dtype == DType::kFloat32) {
    sum.data = static_cast<float*>(gradient.data);
    if (sum.own.data() != nullptr) {  // zeros of a step without it
      stream_.retire(std::make_shared<device::Memory>(std::move(sum.own)));
      sum.own_is_zero = false;
    }
    const auto bytes = static_cast<std::size_t>(numel) * sizeof(float);
    sum.owner = std::make_shared<Adopted>(std::move(gradient.owner), stream_.parts().ledger,
                                          taken_bytes(bytes));
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
    sum.is_put = false;
    if (sum.owner) {
      stream_.retire(std::move(sum.owner));  // an update on the stream may still read it
    }
  }
}

}  // namespace tessera::grad
