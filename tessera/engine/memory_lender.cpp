#include "tessera/engine/memory_lender.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/ATen.h>

#include "tessera/engine/tensor_memory.h"

namespace tessera::engine {

MemoryLender::MemoryLender(Runtime& runtime, optim::DeviceExecutor& borrower)
    : runtime_(runtime), borrower_(borrower) {}

void MemoryLender::begin_backward(bool lends) {
  take_all_back();
  lends_ = lends;
  if (lends_ && runtime_.on_cuda()) {
    taken_at_begin_ = torch_memory(runtime_.cuda_device()).taken_bytes;
    free_at_begin_ = static_cast<std::int64_t>(runtime_.device().memory_info().free_bytes);
    last_bytes_ = taken_at_begin_;
    reserve_bytes_ = std::exchange(freed_bytes_, 0);
  }
}

void MemoryLender::note_freed() {
  if (runtime_.on_cuda()) {
    const std::int64_t now = torch_memory(runtime_.cuda_device()).taken_bytes;
    freed_bytes_ = std::max(freed_bytes_, last_bytes_ - now);
    last_bytes_ = now;
  }
}

bool MemoryLender::has_spare_memory() const {
  if (!runtime_.on_cuda()) {
    return true;  // a CPU that stands in for a device
  }
  const TorchMemory now = torch_memory(runtime_.cuda_device());
  const auto bytes = static_cast<std::int64_t>(borrower_.slot_bytes());
  const SpareMemory memory{.taken = now.taken_bytes,
                           .held = now.held_bytes,
                           .taken_at_begin = taken_at_begin_,
                           .free_at_begin = free_at_begin_,
                           .reserve = reserve_bytes_,
                           .lent = static_cast<std::int64_t>(num_lent_) * bytes};
  return is_spare(memory, bytes);
}

void MemoryLender::end_backward_of(int unit) {
  if (!lends_) {
    return;
  }
  note_freed();
  lent_before_.emplace(unit, num_lent_);
  while (borrower_.wants_slot() && has_spare_memory()) {
    const auto memory = std::make_shared<at::Tensor>(
        at::empty({static_cast<std::int64_t>(borrower_.slot_bytes())},
                  at::TensorOptions(runtime_.on_cuda() ? at::kCUDA : at::kCPU).dtype(at::kByte)));
    // Whoever had it before has been given to the compute stream.
    borrower_.lend(static_cast<std::byte*>(memory->data_ptr()),
                   runtime_.device().stream(device::StreamKind::kCompute).record(), memory);
    last_bytes_ += static_cast<std::int64_t>(borrower_.slot_bytes());
    ++num_lent_;
  }
}

void MemoryLender::begin_forward_of(int unit) {
  if (const auto found = lent_before_.find(unit); found != lent_before_.end()) {
    keep_lent(found->second);
  }
}

void MemoryLender::keep_lent(std::size_t num_slots) {
  if (num_lent_ <= num_slots) {
    return;
  }
  const SpanScope span(runtime_.spans(), "wait for lent memory");
  const std::int64_t begin_ns = runtime_.clock().now_ns();
  borrower_.keep_lent(num_slots);
  num_lent_ = num_slots;
  wait_s_ += static_cast<double>(runtime_.clock().now_ns() - begin_ns) * 1e-9;
}

void MemoryLender::take_all_back() {
  lends_ = false;
  keep_lent(0);
  lent_before_.clear();
}

}  // namespace tessera::engine
