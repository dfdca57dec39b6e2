// What a backward may lend of a GPU's memory: each of the bounds, alone.
#include <gtest/gtest.h>

#include "tessera/engine/memory_lender.h"

namespace tessera::engine {
namespace {

// 100 were taken, 40 are, and 20 of those are lent.
SpareMemory memory() { return {40, 100, 100, 1000, 10, 20}; }

TEST(SpareMemory, IsWhatBackwardHasFreedButForTheReserve) {
  EXPECT_TRUE(is_spare(memory(), 50));
  EXPECT_FALSE(is_spare(memory(), 51));
  SpareMemory later = memory();
  later.taken = 30;
  EXPECT_TRUE(is_spare(later, 60));
}

TEST(SpareMemory, IsNoneBeforeItIsKnownWhatABackwardNeeds) {
  SpareMemory first = memory();
  first.reserve = 0;
  EXPECT_FALSE(is_spare(first, 1));
}

TEST(SpareMemory, IsHeldByTorch) {
  SpareMemory scarce = memory();
  scarce.held = 60;
  EXPECT_TRUE(is_spare(scarce, 20));
  EXPECT_FALSE(is_spare(scarce, 21));
}

TEST(SpareMemory, IsNotMoreThanTheDeviceCouldGiveInItsPlace) {
  SpareMemory nearly_full = memory();
  nearly_full.free_at_begin = 30;
  EXPECT_TRUE(is_spare(nearly_full, 10));
  EXPECT_FALSE(is_spare(nearly_full, 11));
}

}  // namespace
}  // namespace tessera::engine
