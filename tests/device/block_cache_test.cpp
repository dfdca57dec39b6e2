#include "tessera/device/block_cache.h"

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::device {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(BlockCacheTest, ABlockThatCameBackServesTheNextOfItsSize) {
  BlockCache cache;
  void* const first = cache.take(3 * kMiB);
  EXPECT_TRUE(cache.give_back(first));
  EXPECT_EQ(cache.held_bytes(), 3 * kMiB);
  EXPECT_EQ(cache.take(3 * kMiB), first);
  EXPECT_EQ(cache.num_mapped(), 1U);
  EXPECT_TRUE(cache.give_back(first));
}

TEST(BlockCacheTest, ABlockServesALittleLessThanItsSizeAndNotMuchLess) {
  BlockCache cache;
  void* const first = cache.take(8 * kMiB);
  EXPECT_TRUE(cache.give_back(first));
  void* const nearly = cache.take(7 * kMiB);
  EXPECT_EQ(nearly, first);
  EXPECT_EQ(cache.live_bytes(), 8 * kMiB);  // the whole block, not what was asked for
  EXPECT_TRUE(cache.give_back(nearly));
  void* const less = cache.take(7 * kMiB - 1 - page_bytes());
  EXPECT_EQ(cache.num_mapped(), 2U);
  EXPECT_TRUE(cache.give_back(less));
}

TEST(BlockCacheTest, TheSmallestBlockThatFitsIsTaken) {
  BlockCache cache;
  void* const large = cache.take(33 * kMiB);
  void* const small = cache.take(32 * kMiB);
  EXPECT_TRUE(cache.give_back(small));
  EXPECT_TRUE(cache.give_back(large));
  EXPECT_EQ(cache.take(31 * kMiB), small);
  EXPECT_TRUE(cache.give_back(small));
}

TEST(BlockCacheTest, NeverHoldsMoreThanWasOnceInUseAndGivesUpTheOldestFirst) {
  BlockCache cache;
  void* const a = cache.take(10 * kMiB);
  void* const b = cache.take(20 * kMiB);
  EXPECT_TRUE(cache.give_back(a));
  EXPECT_TRUE(cache.give_back(b));
  EXPECT_EQ(cache.held_bytes(), 30 * kMiB);
  void* const c = cache.take(4 * kMiB);  // no block is near: the one idle longest makes room
  EXPECT_EQ(cache.held_bytes(), 24 * kMiB);
  EXPECT_EQ(cache.take(20 * kMiB), b);
  EXPECT_EQ(cache.peak_bytes(), 30 * kMiB);
  EXPECT_TRUE(cache.give_back(b));
  EXPECT_TRUE(cache.give_back(c));
}

TEST(BlockCacheTest, WhatIsNotItsOwnIsLeftAlone) {
  BlockCache cache;
  int other = 0;
  EXPECT_FALSE(cache.give_back(&other));
  void* const block = cache.take(kMiB);
  EXPECT_TRUE(cache.give_back(block));
  EXPECT_FALSE(cache.give_back(block));  // it is idle: nobody's to give
}

TEST(BlockCacheTest, WhatCannotBeHadIsAnErrorThatLosesNothing) {
  BlockCache cache;
  void* const block = cache.take(kMiB);
  EXPECT_THROW(cache.take(std::size_t{1} << 60), DeviceError);
  EXPECT_EQ(cache.live_bytes(), kMiB);
  EXPECT_EQ(cache.peak_bytes(), kMiB);
  EXPECT_TRUE(cache.give_back(block));
}

// A step over and over: from the second on nothing is mapped, whatever its order of releases.
TEST(BlockCacheTest, AStepThatRepeatsMapsNothingAfterItsFirst) {
  BlockCache cache;
  const std::vector<std::size_t> sizes = {3 * kMiB, 12 * kMiB, 3 * kMiB, 50 * kMiB, 205 * kMiB};
  std::uint64_t after_first = 0;
  for (int step = 0; step < 3; ++step) {
    std::vector<void*> saved;
    for (const std::size_t bytes : sizes) {
      saved.push_back(cache.take(bytes));
    }
    for (; !saved.empty(); saved.pop_back()) {
      EXPECT_TRUE(cache.give_back(saved.back()));
    }
    after_first = step == 0 ? cache.num_mapped() : after_first;
  }
  EXPECT_EQ(cache.num_mapped(), after_first);
  EXPECT_EQ(after_first, sizes.size());
}

TEST(BlockCacheTest, RandomUseFromSeveralThreadsKeepsItsPromises) {
  BlockCache cache;
  const auto work = [&cache](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<unsigned char*, std::size_t>> mine;
    for (int i = 0; i < 400; ++i) {
      if (mine.empty() || (mine.size() < 8 && random() % 2 == 0)) {
        const std::size_t bytes = (std::size_t{1} << 16) + random() % (std::size_t{1} << 18);
        auto* const data = static_cast<unsigned char*>(cache.take(bytes));
        std::memset(data, static_cast<int>(seed), bytes);
        mine.emplace_back(data, bytes);
      } else {
        const auto which = static_cast<std::ptrdiff_t>(random() % mine.size());
        const auto [data, bytes] = mine[static_cast<std::size_t>(which)];
        EXPECT_EQ(data[0], seed);  // nobody else was given the same memory
        EXPECT_EQ(data[bytes - 1], seed);
        EXPECT_TRUE(cache.give_back(data));
        mine.erase(mine.begin() + which);
      }
      EXPECT_LE(cache.held_bytes(), 4 * 8 * (std::size_t{1} << 19));
    }
    for (const auto& [data, bytes] : mine) {
      EXPECT_TRUE(cache.give_back(data));
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back(work, seed);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(cache.live_bytes(), 0U);
  EXPECT_LE(cache.held_bytes(), cache.peak_bytes());
}

}  // namespace
}  // namespace tessera::device
