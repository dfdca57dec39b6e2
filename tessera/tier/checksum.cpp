#include "tessera/tier/checksum.h"

#include <array>
#include <cstring>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::size_t kLanes = 4;
struct Pair {
  std::uint64_t first;
  std::uint64_t second;
};
using Row = std::array<Pair, kLanes>;
constexpr std::size_t kRows = kBlockBytes / sizeof(Row);
static_assert(kRows * sizeof(Row) == kBlockBytes);

// Digits of pi, one word more than there are lanes.
constexpr std::array<std::uint64_t, kLanes + 1> kKeys = {0x243f6a8885a308d3, 0x13198a2e03707344,
                                                         0xa4093822299f31d0, 0x082efa98ec4e6c89,
                                                         0x452821e638d01377};

// Both halves of the product: every bit of either factor reaches all bits of the result, and what
// one changes depends on the other, so that no pattern of two changes cancels for all data.
std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

// Lanes do not depend on each other, so that their products overlap.
std::uint64_t block_checksum(const std::byte* block) {
  std::array<std::uint64_t, kLanes> sums{};
  for (std::size_t row = 0; row < kRows; ++row) {
    Row words;
    std::memcpy(words.data(), block + row * sizeof(words), sizeof(words));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] = folded_product(words[lane].first ^ kKeys[lane],
                                  words[lane].second ^ kKeys[lane + 1] ^ sums[lane]);
    }
  }
  std::uint64_t checksum = kBlockBytes;
  for (const std::uint64_t sum : sums) {
    checksum = folded_product(checksum ^ kKeys.front(), sum ^ kKeys.back());
  }
  return checksum;
}

std::uint64_t zero_checksum() {
  static const std::uint64_t checksum = [] {
    const std::array<std::byte, kBlockBytes> zeros{};
    return block_checksum(zeros.data());
  }();
  return checksum;
}

}  // namespace tessera::tier
