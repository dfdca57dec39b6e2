#include "tessera/tier/checksum.h"

#include <algorithm>
#include <set>
#include <utility>

#include <gtest/gtest.h>

#include "tests/tier/blocks.h"

namespace tessera::tier {
namespace {

using testing::Blocks;

TEST(Checksum, EveryFlippedBitOfABlockIsSeen) {
  for (const bool zero : {true, false}) {
    const Blocks blocks(1);
    if (!zero) {
      blocks.number(9);
    }
    const std::uint64_t before = block_checksum(blocks.data());
    std::set<std::uint64_t> seen{before};
    for (std::size_t bit = 0; bit < 8 * kBlockBytes; ++bit) {
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      blocks.data()[bit / 8] ^= mask;
      EXPECT_TRUE(seen.insert(block_checksum(blocks.data())).second) << "bit " << bit;
      blocks.data()[bit / 8] ^= mask;
    }
    EXPECT_EQ(block_checksum(blocks.data()), before);
  }
}

// Signs of two floats, the kind of pair that sums and products without a rotation do not see.
TEST(Checksum, PairsOfFlippedBitsAreSeen) {
  const Blocks blocks(1);
  blocks.number(3);
  std::set<std::uint64_t> seen{block_checksum(blocks.data())};
  const auto flip = [&](std::size_t byte) { blocks.data()[byte] ^= std::byte{0x80}; };
  for (std::size_t first = 3; first < kBlockBytes; first += 52) {
    for (std::size_t second = first + 4; second < kBlockBytes; second += 4) {
      flip(first);
      flip(second);
      EXPECT_TRUE(seen.insert(block_checksum(blocks.data())).second) << first << ", " << second;
      flip(first);
      flip(second);
    }
  }
}

TEST(Checksum, ExchangedWordsAreSeen) {
  const Blocks blocks(1);
  blocks.number(5);
  const std::uint64_t before = block_checksum(blocks.data());
  auto* const words = reinterpret_cast<std::uint64_t*>(blocks.data());
  constexpr std::size_t kWords = kBlockBytes / sizeof(std::uint64_t);
  for (std::size_t distance = 1; distance < kWords; ++distance) {
    for (std::size_t first = 0; first + distance < kWords; first += 31) {
      std::swap(words[first], words[first + distance]);
      EXPECT_NE(block_checksum(blocks.data()), before) << first << " and +" << distance;
      std::swap(words[first], words[first + distance]);
    }
  }
}

TEST(Checksum, ZeroBlocksHaveTheirs) {
  EXPECT_EQ(block_checksum(Blocks(1).data()), zero_checksum());
  EXPECT_NE(block_checksum(Blocks(1, 1).data()), zero_checksum());
}

}  // namespace
}  // namespace tessera::tier
