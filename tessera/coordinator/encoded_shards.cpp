#include "tessera/coordinator/encoded_shards.h"

#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;

namespace {

constexpr std::size_t kSumsBytes = 2 * sizeof(double);  // of one parameter

}  // namespace

EncodedShards::EncodedShards(const comm::Codec& codec, device::Device& device,
                             shard::ParamTable& params)
    : codec_(codec),
      device_(device),
      params_(params),
      gather_(device.stream(device::StreamKind::kGather)),
      read_(device.stream(device::StreamKind::kRead)),
      slots_(static_cast<std::size_t>(params.num_params())),
      sums_(device.allocate(Tier::kDevice, slots_.size() * kSumsBytes, Role::kOther)),
      copied_(device.allocate(Tier::kPinned, slots_.size() * kSumsBytes, Role::kOther)),
      is_copied_(slots_.size()) {}

EncodedShards::~EncodedShards() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) {
    worker_.join();
  }
  for (const Slot& slot : slots_) {
    wait_ignoring_failure(slot.made);
  }
  wait_ignoring_failure(copied_when_);
}

bool EncodedShards::covers(const Param& param) const {
  const shard::Layout& layout = param.layout();
  const DType dtype = layout.dtype();
  return layout.num_ranks() > 1 && layout.numel() > 0 && !layout.is_encoded() &&
         (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16);
}

bool EncodedShards::has(const Param& param) const {
  const Slot& slot = slot_of(param);
  return slot.is_made && slot.version == param.version();
}

std::size_t EncodedShards::wire_bytes(const Param& param) const {
  return codec_.wire_bytes(param.layout().shard_numel());
}

void EncodedShards::start_encode(const Param& param, const std::byte* values, Pending ready) {
  Slot& slot = slots_[static_cast<std::size_t>(param.id())];
  if (slot.wire.data() == nullptr) {
    slot.wire = device_.allocate(Tier::kDevice, wire_bytes(param), Role::kShard);
  }
  slot.version = param.version();
  slot.is_made = true;
  if (gather_.can_order_behind(ready)) {
    try {
      if (ready.done()) {
        ready.wait();  // a failure is the parameter's own, not the stream's
      } else {
        gather_.wait(ready);
      }
      slot.made = encode(param, values, gather_);
    } catch (...) {
      slot.made = Pending::failed(std::current_exception());
    }
    return;
  }
  Job job{&param, values, std::move(ready), copied_when_, std::make_shared<device::HandedOver>()};
  slot.made = Pending(job.owner);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  if (!worker_.joinable()) {
    worker_ = std::thread([this] { carry_out(); });
  }
  changed_.notify_all();
}

Pending EncodedShards::encode(const Param& param, const std::byte* values, device::Stream& stream) {
  const shard::Layout& layout = param.layout();
  std::byte* const wire = slot_of(param).wire.data();
  auto* const sums =
      reinterpret_cast<double*>(sums_.data() + static_cast<std::size_t>(param.id()) * kSumsBytes);
  std::ignore = codec_.encode(values, layout.dtype(), layout.shard_numel(), wire, &stream);
  return codec_.measure(values, layout.dtype(), layout.shard_numel(), wire, sums, false, &stream);
}

void EncodedShards::forget_failures() noexcept {
  for (Slot& slot : slots_) {
    if (slot.made.done()) {
      try {
        slot.made.wait();
      } catch (...) {  // whoever waited for the gather was told
        slot.is_made = false;
      }
    }
  }
}

void EncodedShards::carry_out() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    try {
      job.ready.wait();
      job.copied.wait();
      job.owner->hand_over(encode(*job.param, job.values, read_));
    } catch (...) {
      job.owner->fail(std::current_exception());
    }
  }
}

comm::Gather EncodedShards::gather(const Param& param, void* full) const {
  const Slot& slot = slot_of(param);
  TESSERA_INVARIANT(has(param), "the encoded shard of parameter '", param.name(),
                    slot.is_made ? detail::concat("' is of update ", slot.version)
                                 : std::string("' was never made"),
                    "; the parameter is at update ", param.version());
  const shard::Layout& layout = param.layout();
  return {slot.wire.data(), full, layout.shard_numel(), layout.dtype(), param.name(), &codec_};
}

std::uint64_t EncodedShards::hash_of_versions(std::span<const int> ids) const {
  std::uint64_t hash = 0;
  for (const int id : ids) {
    const std::uint64_t version = slot_of(params_[id]).version;
    hash = comm::hash_bytes(&version, sizeof(version), hash);
  }
  return hash;
}

void EncodedShards::end_step() {
  for (std::size_t id = 0; id < slots_.size(); ++id) {
    is_copied_[id] = slots_[id].is_made;
    if (slots_[id].is_made && !slots_[id].made.done()) {
      gather_.wait(slots_[id].made);
    }
  }
  copied_when_ = device_.start_copy(copied_.data(), sums_.data(), sums_.bytes(), gather_);
}

QuantError EncodedShards::error() {
  copied_when_.wait();
  QuantError error;
  double error_sum = 0;
  double value_sum = 0;
  for (std::size_t id = 0; id < slots_.size(); ++id) {
    if (!is_copied_[id]) {
      continue;
    }
    double sums[2];
    std::memcpy(sums, copied_.data() + id * kSumsBytes, kSumsBytes);
    error_sum += sums[0];
    value_sum += sums[1];
    const double relative = sums[1] == 0 ? 0 : std::sqrt(sums[0] / sums[1]);
    // What is no number is the worst there is.
    if (error.param.empty() || (!std::isnan(error.worst) && !(relative <= error.worst))) {
      error.worst = relative;
      error.param = params_[static_cast<int>(id)].name();
    }
  }
  error.relative = value_sum == 0 ? 0 : std::sqrt(error_sum / value_sum);
  return error;
}

}  // namespace tessera::coordinator
