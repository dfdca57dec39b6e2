// The shared heap, and who takes memory from it.
#include "tessera/device/shared_heap.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/ledger.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/host_memory.h"

namespace tessera::device {
namespace {

// What the file takes of memory.
std::size_t used_bytes(const SharedHeap& heap) {
  struct stat status {};
  EXPECT_EQ(fstat(heap.fd(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(SharedHeap, IsOneForAllAndGoesWithTheLastWhoHoldsIt) {
  EXPECT_EQ(SharedHeap::current(), nullptr);
  auto heap = SharedHeap::open();
  EXPECT_EQ(SharedHeap::open(), heap);
  EXPECT_EQ(SharedHeap::current(), heap);
  heap.reset();
  EXPECT_EQ(SharedHeap::current(), nullptr);
}

TEST(SharedHeap, BlocksAreAlignedAndSeparateAndKnownByTheirOffset) {
  const auto heap = SharedHeap::open();
  std::vector<std::byte*> blocks;
  for (const std::size_t alignment : {std::size_t{256}, page_bytes(), kHugePageBytes}) {
    for (const std::size_t bytes : {1U, 255U, 4097U, 300000U}) {
      std::byte* const block = heap->allocate(bytes, alignment);
      ASSERT_NE(block, nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignment, 0U);
      EXPECT_EQ(heap->offset_of(block, bytes), static_cast<std::size_t>(block - heap->data()));
      std::memset(block, static_cast<int>(blocks.size()), bytes);
      blocks.push_back(block);
    }
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(std::to_integer<std::size_t>(*blocks[i]), i);
  }
  for (std::byte* const block : blocks) {
    heap->free(block);
  }
  EXPECT_EQ(heap->allocate(heap->bytes() + 1, 256), nullptr);
}

TEST(SharedHeap, MemoryThatIsNotAllInsideHasNoOffset) {
  const auto heap = SharedHeap::open();
  const int outside = 0;
  EXPECT_FALSE(heap->offset_of(&outside, sizeof(outside)));
  EXPECT_FALSE(heap->offset_of(heap->data() + heap->bytes() - 8, 16));
  EXPECT_FALSE(heap->offset_of(heap->data() - 1, 4));
  EXPECT_TRUE(heap->offset_of(heap->data() + heap->bytes() - 8, 8));
}

TEST(SharedHeap, AnotherMappingSeesWhatIsWritten) {
  const auto heap = SharedHeap::open();
  std::byte* const block = heap->allocate(10000, 256);
  void* const mapped = mmap(nullptr, heap->bytes(), PROT_READ, MAP_SHARED, heap->fd(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::memset(block, 7, 10000);
  const auto* const other = static_cast<const std::byte*>(mapped) + *heap->offset_of(block, 10000);
  EXPECT_EQ(std::memcmp(other, block, 10000), 0);
  munmap(mapped, heap->bytes());
  heap->free(block);
}

TEST(SharedHeap, FreedPagesGoBackToTheSystem) {
  const auto heap = SharedHeap::open();
  const std::size_t bytes = 64 * page_bytes();
  const std::size_t before = used_bytes(*heap);
  std::byte* const block = heap->allocate(bytes, page_bytes());
  std::memset(block, 1, bytes);
  EXPECT_EQ(used_bytes(*heap), before + bytes);
  heap->free(block);
  EXPECT_EQ(used_bytes(*heap), before);
}

TEST(SharedHeap, HoldsShardsAndGradientsOfCpuDevicesAndNothingElse) {
  Ledger ledger;
  const auto device = make_cpu_device({&ledger, {}, nullptr});
  const std::vector<std::size_t> sizes = {100, kPagesFromBytes - 1, kPagesFromBytes + 1,
                                          kHugePageBytes + 1};
  const Memory before = device->allocate(Tier::kDevice, 1000, Role::kShard);
  auto heap = SharedHeap::open();
  EXPECT_FALSE(heap->offset_of(before.data(), 1000)) << "it was private before";
  for (const Role role : {Role::kShard, Role::kFull, Role::kGradient, Role::kOptimizer}) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kPinned}) {
      for (const std::size_t bytes : sizes) {
        const std::size_t charged = ledger.current_bytes(tier, role);
        const Memory memory = device->allocate(tier, bytes, role);
        const bool is_shared = role == Role::kShard || role == Role::kGradient;
        EXPECT_EQ(heap->offset_of(memory.data(), bytes).has_value(), is_shared);
        std::memset(memory.data(), 1, bytes);
        // As much as it would be if it were private.
        const bool has_pages = tier == Tier::kPinned || bytes >= kPagesFromBytes;
        const std::size_t page = has_pages ? page_bytes() : 1;
        EXPECT_EQ(ledger.current_bytes(tier, role) - charged, (bytes + page - 1) / page * page);
      }
    }
  }
}

TEST(SharedHeap, LivesAsLongAsWhatWasTakenFromIt) {
  const auto device = make_cpu_device();
  auto heap = SharedHeap::open();
  Memory memory = device->allocate(Tier::kDevice, 1000, Role::kGradient);
  const std::weak_ptr<SharedHeap> held = heap;
  heap.reset();
  std::memset(memory.data(), 1, 1000);
  EXPECT_FALSE(held.expired());
  memory.reset();
  EXPECT_TRUE(held.expired());
}

}  // namespace
}  // namespace tessera::device
