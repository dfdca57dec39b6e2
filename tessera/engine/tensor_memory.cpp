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

class TensorAllocator final : public c10::Allocator {
 public:
  explicit TensorAllocator(c10::Allocator& small)
      : small_(small), free_small_(small.raw_deleter()) {
    instance() = this;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kKeptTensorBytes) {
      return small_.allocate(bytes);
    }
    void* const data = cache().take(bytes);
    return {data, data, &TensorAllocator::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &TensorAllocator::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static TensorAllocator*& instance() {
    static TensorAllocator* one = nullptr;
    return one;
  }
  static void free(void* data) {
    if (data != nullptr && !cache().give_back(data)) {
      instance()->free_small_(data);
    }
  }

  c10::Allocator& small_;
  const c10::DeleterFnPtr free_small_;
};

}  // namespace

void keep_tensor_memory() {
  static auto* const allocator = new TensorAllocator(*c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

}  // namespace tessera
