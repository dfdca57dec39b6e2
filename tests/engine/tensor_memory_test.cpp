#include "tessera/engine/tensor_memory.h"

#include <gtest/gtest.h>

#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

namespace tessera {
namespace {

constexpr std::int64_t kLarge = static_cast<std::int64_t>(kKeptTensorBytes / sizeof(float));

class TensorMemoryTest : public ::testing::Test {
 protected:
  TensorMemoryTest() { keep_tensor_memory(); }
};

TEST_F(TensorMemoryTest, ALargeTensorGetsTheMemoryOfTheOneBeforeIt) {
  const void* before = nullptr;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tensor = at::empty({kLarge});
    EXPECT_TRUE(before == nullptr || tensor.data_ptr() == before);
    before = tensor.data_ptr();
  }
}

TEST_F(TensorMemoryTest, TensorsMadeBeforeAndOfAnySizeAreFreedByWhoMadeThem) {
  const at::Tensor large = at::ones({3 * kLarge});
  const at::Tensor small = at::ones({kLarge - 1});
  const at::Tensor none = at::empty({0});
  EXPECT_EQ(large.sum().item<float>(), static_cast<float>(3 * kLarge));
  EXPECT_EQ(small.sum().item<float>(), static_cast<float>(kLarge - 1));
  EXPECT_EQ(none.numel(), 0);
  keep_tensor_memory();
  EXPECT_EQ((large + 1).sum().item<float>(), static_cast<float>(6 * kLarge));
}

TEST_F(TensorMemoryTest, RawMemoryAndGrowingStoragesWork) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  for (const std::size_t bytes : {std::size_t{100}, kKeptTensorBytes}) {
    void* const data = allocator->raw_allocate(bytes);
    ASSERT_NE(data, nullptr);
    allocator->raw_deallocate(data);
  }
  at::Tensor growing = at::ones({10});
  growing.resize_({2 * kLarge});
  growing.resize_({4 * kLarge});
  EXPECT_EQ(growing.narrow(0, 0, 10).sum().item<float>(), 10.0F);
}

}  // namespace
}  // namespace tessera
