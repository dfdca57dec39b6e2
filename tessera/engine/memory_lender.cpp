#include "tessera/engine/memory_lender.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/ATen.h>

#include "tessera/engine/tensor_memory.h"

namespace tessera::engine {

MemoryLender::MemoryLender(Runtime& runtime, optim::DeviceUpdate& borrower)
    : runtime_(runtime), borrower_(borrower) {}

void MemoryLender::begin_backward(bool lends) {
  take_all_back();
  lends_ = lends;
  if (lends_) {
    num_last_ended_ = std::exchange(num_ended_, 0);
  }
  if (lends_ && runtime_.on_cuda()) {
    bytes_at_begin_ = torch_memory(runtime_.cuda_device()).taken_bytes;
    last_bytes_ = bytes_at_begin_;
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

// Torch's allocator must have it, too: what it would have to ask the device for is not spare.
bool MemoryLender::has_spare_memory() const {
  if (!runtime_.on_cuda()) {
    return true;  // a CPU that stands in for a device
  }
  const TorchMemory now = torch_memory(runtime_.cuda_device());
  const auto bytes = static_cast<std::int64_t>(borrower_.slot_bytes());
  return reserve_bytes_ > 0 && now.taken_bytes + bytes + reserve_bytes_ <= bytes_at_begin_ &&
         now.taken_bytes + bytes <= now.held_bytes;
}

void MemoryLender::end_backward_of(int unit) {
  if (!lends_) {
    return;
  }
  note_freed();
  if (2 * ++num_ended_ > num_last_ended_) {
    return;
  }
  while (borrower_.wants_slot() && has_spare_memory()) {
    const auto memory = std::make_shared<at::Tensor>(
        at::empty({static_cast<std::int64_t>(borrower_.slot_bytes())},
                  at::TensorOptions(runtime_.on_cuda() ? at::kCUDA : at::kCPU).dtype(at::kByte)));
    // Whoever had it before has been given to the compute stream.
    borrower_.lend(unit, static_cast<std::byte*>(memory->data_ptr()),
                   runtime_.device().stream(device::StreamKind::kCompute).record(), memory);
    last_bytes_ += static_cast<std::int64_t>(borrower_.slot_bytes());
    ++num_lent_;
  }
}

void MemoryLender::begin_forward_of(int unit) {
  if (num_lent_ > 0) {
    take_back(unit);
  }
}

void MemoryLender::take_back(int unit) {
  const SpanScope span(runtime_.spans(), "wait for lent memory");
  const std::int64_t begin_ns = runtime_.clock().now_ns();
  borrower_.give_back(unit);
  wait_s_ += static_cast<double>(runtime_.clock().now_ns() - begin_ns) * 1e-9;
}

void MemoryLender::take_all_back() {
  lends_ = false;
  if (std::exchange(num_lent_, 0) > 0) {
    take_back(-1);
  }
}

}  // namespace tessera::engine
