#include "tessera/grad/gradient_stream.h"

#include <tuple>

#include "tessera/core/error.h"
#include "tessera/grad/element_loops.h"

namespace tessera::grad {

using device::Pending;
using device::StreamKind;

namespace {

std::unique_ptr<NvmeGradients> make_nvme(const ReducerParts& parts) {
  bool any = false;
  for (int id = 0; id < parts.params.num_params(); ++id) {
    any |= parts.params[id].placement().gradient == Tier::kNvme && parts.params[id].trainable();
  }
  return any ? std::make_unique<NvmeGradients>(parts) : nullptr;
}

ReducerParts without_lone_replica(ReducerParts parts) {
  if (parts.replicas != nullptr && parts.replicas->size() == 1) {
    parts.replicas = nullptr;
  }
  return parts;
}

}  // namespace

GradientStream::GradientStream(const ReducerParts& parts)
    : parts_(without_lone_replica(parts)),
      replica_sums_{parts.replicas != nullptr ? parts.replicas->size() : 1,
                    parts.num_micro_batches},
      compute_(parts.device.stream(StreamKind::kCompute)),
      reduce_(parts.device.stream(StreamKind::kReduce)),
      is_discrete_(parts.device.is_discrete()),
      nvme_(make_nvme(parts)) {
  if (nvme_ && is_discrete_) {
    nvme_work_ = std::make_unique<HostWork>(parts.spans, "gradients on NVMe");
  }
  for (int id = 0; id < parts.params.num_params(); ++id) {
    const shard::Param& param = parts.params[id];
    leaves_device_ |= param.trainable() && param.placement().gradient != Tier::kDevice;
  }
}

void GradientStream::check_convertible(const std::string& name, DType from, DType to) const {
  TESSERA_CHECK(is_gradient_dtype(from), ConfigError, "the gradient of parameter '", name, "' is ",
                to_string(from), "; fp32, bf16 and fp16 can be reduced");
  TESSERA_INVARIANT(from == to || parts_.convert || !is_discrete_, "the gradient of parameter '",
                    name, "' is ", to_string(from), " and must become ", to_string(to), ", and ",
                    parts_.device.name(), " was given no kernel for it");
}

void GradientStream::check_can_add() const {
  TESSERA_INVARIANT(parts_.add || !is_discrete_, "gradients of several micro-batches on ",
                    parts_.device.name(), " need a kernel that adds them, and none was given");
}

void GradientStream::order_behind_compute() { reduce_.wait(compute_.record()); }

void GradientStream::copy(void* to, DType to_dtype, const void* from, DType from_dtype,
                          std::int64_t numel) {
  const auto count = static_cast<std::size_t>(numel);
  if (to_dtype == from_dtype) {
    std::ignore = parts_.device.start_copy(to, from, count * bytes_of(to_dtype), reduce_);
  } else if (parts_.convert) {
    std::ignore = parts_.convert(to, to_dtype, from, from_dtype, numel, reduce_);
  } else {
    std::ignore = reduce_.enqueue([=] { convert_elements(to, to_dtype, from, from_dtype, count); });
  }
}

void GradientStream::zero(void* to, std::size_t bytes) {
  if (bytes > 0) {
    std::ignore = parts_.device.start_fill(to, 0, bytes, reduce_);
  }
}

void GradientStream::add(float* sum, const void* value, DType value_dtype, std::int64_t numel) {
  if (numel == 0) {
    return;
  }
  if (parts_.add) {
    std::ignore = parts_.add(sum, value, value_dtype, numel, reduce_);
  } else {
    std::ignore = reduce_.enqueue(
        [=] { add_elements(sum, value, value_dtype, static_cast<std::size_t>(numel)); });
  }
}

Pending GradientStream::put_on_nvme(const ShardPiece& piece, const void* values, DType dtype,
                                    bool adds) {
  auto work = [nvme = nvme_.get(), piece, values, dtype, adds] {
    nvme->put(piece, values, dtype, adds);
  };
  if (nvme_work_) {
    stats_.host_bytes += static_cast<std::uint64_t>(piece.numel) * bytes_of(dtype);
    return nvme_work_->start(reduce_.record(), std::move(work));
  }
  std::ignore = reduce_.enqueue(std::move(work));
  return {};
}

void GradientStream::get_from_nvme(const ShardPiece& piece, void* to, DType dtype) {
  auto work = [nvme = nvme_.get(), piece, to, dtype] { nvme->get(piece, to, dtype); };
  if (nvme_work_) {
    stats_.loaded_bytes += static_cast<std::uint64_t>(piece.numel) * bytes_of(dtype);
    wait_for(nvme_work_->start(reduce_.record(), std::move(work)));
  } else {
    std::ignore = reduce_.enqueue(std::move(work));
  }
}

void GradientStream::wait_nvme() {
  const std::int64_t start_ns = parts_.clock.now_ns();
  if (nvme_work_) {
    nvme_work_->drain();
  }
  if (nvme_) {
    nvme_->wait();
  }
  if (nvme_work_) {
    stats_.exposed_wait_s += static_cast<double>(parts_.clock.now_ns() - start_ns) * 1e-9;
  }
}

void GradientStream::clear_nvme() noexcept {
  if (nvme_) {
    drain();
    nvme_->clear();
  }
}

Pending GradientStream::start_to_host(void* to, const void* from, std::size_t bytes,
                                      const Pending& made) {
  device::Stream& d2h = parts_.device.stream(StreamKind::kWrite);
  d2h.wait(made);
  last_to_host_ = parts_.device.start_copy(to, from, bytes, d2h);
  return last_to_host_;
}

void GradientStream::retire(std::shared_ptr<void> owner, const Pending& also, std::int64_t bytes) {
  free_retired();
  if (!owner) {
    return;
  }
  Pending used = reduce_.record();
  if (also.state()) {
    used = Pending::all({std::move(used), also});
  }
  if (!used.done()) {
    keep({std::move(used), std::move(owner), bytes});
  }
}

void GradientStream::count_kept(Pending reduced, std::shared_ptr<const std::atomic<bool>> met,
                                std::int64_t bytes) {
  free_retired();
  if (!reduced.done()) {
    keep({std::move(reduced), nullptr, bytes, std::move(met)});
  }
}

void GradientStream::keep(Kept kept) {
  kept_bytes_ += kept.bytes;
  retired_.push_back(std::move(kept));
  const auto must_wait = [this] {
    if (retired_.empty() || kept_bytes_ <= parts_.most_kept_bytes) {
      return false;
    }
    const Kept& oldest = retired_.front();
    return !oldest.met || *oldest.met;
  };
  if (must_wait()) {
    const SpanScope span(parts_.spans, "wait for gradients to leave");
    while (must_wait()) {
      wait_ignoring_failure(retired_.front().used);  // the owner of the work is told
      free_oldest();
    }
  }
}

void GradientStream::free_oldest() {
  kept_bytes_ -= retired_.front().bytes;
  retired_.pop_front();
}

// Only when memory is freed depends on what is done by now, never what is started.
void GradientStream::free_retired() {
  while (!retired_.empty() && retired_.front().used.done()) {
    free_oldest();
  }
}

void GradientStream::wait_for(const Pending& pending) {
  const std::int64_t start_ns = parts_.clock.now_ns();
  reduce_.wait(pending);
  stats_.exposed_wait_s += static_cast<double>(parts_.clock.now_ns() - start_ns) * 1e-9;
}

void GradientStream::wait_on_host(std::span<const Pending> pendings) {
  const std::int64_t start_ns = parts_.clock.now_ns();
  for (const Pending& pending : pendings) {
    pending.wait();
  }
  stats_.exposed_wait_s += static_cast<double>(parts_.clock.now_ns() - start_ns) * 1e-9;
}

void GradientStream::synchronize() {
  const std::int64_t start_ns = parts_.clock.now_ns();
  reduce_.synchronize();
  stats_.exposed_wait_s += static_cast<double>(parts_.clock.now_ns() - start_ns) * 1e-9;
  free_retired();
}

ReducerStats GradientStream::take_stats() {
  ReducerStats taken = std::exchange(stats_, {});
  if (nvme_) {
    nvme_->take_stats(taken);
  }
  note_held();
  return taken;
}

void GradientStream::drain() noexcept {
  if (nvme_work_) {
    nvme_work_->drain();
  }
  try {
    synchronize();
  } catch (...) {  // whoever waited for the result has been told
  }
  wait_ignoring_failure(last_to_host_);  // those before it are done, too
  free_retired();
}

}  // namespace tessera::grad
