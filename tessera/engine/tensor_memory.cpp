#include "tessera/engine/tensor_memory.h"

#include <c10/core/CPUAllocator.h>

#include "tessera/device/block_cache.h"

namespace tessera {
namespace {

// Never destroyed: tensors of static storage may outlive everything else.
device::BlockCache& cache() {
  static auto* const blocks = new device::BlockCache();
  return *blocks;
}

// Small tensors stay with torch's own allocator.
class TensorAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kKeptTensorBytes) {
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    }
    void* const data = cache().take(bytes);
    return {data, data, &TensorAllocator::free, c10::Device(c10::DeviceType::CPU)};
  }
  // Of what raw_allocate() gave, large or small.
  c10::DeleterFnPtr raw_deleter() const override { return &TensorAllocator::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free(void* data) {
    if (data != nullptr && !cache().give_back(data)) {
      c10::GetDefaultCPUAllocator()->raw_deleter()(data);
    }
  }
};

}  // namespace

void keep_tensor_memory() {
  static auto* const allocator = new TensorAllocator();
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

}  // namespace tessera
