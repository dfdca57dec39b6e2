#include "tessera/tier/checksum.h"

#include <array>
#include <bit>
#include <cstring>

#include "tessera/tier/io_engine.h"

namespace tessera::tier {
namespace {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kRows = kBlockBytes / (kLanes * sizeof(std::uint64_t));
constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
using Row = std::array<std::uint64_t, kLanes>;

constexpr Row make_keys() {
  Row keys{};
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    std::uint64_t key = (lane + 1) * kOdd;
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
    key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
    keys[lane] = key ^ (key >> 31);
  }
  return keys;
}
constexpr Row kKeys = make_keys();

}  // namespace

// Per lane the plain sum of the words, in which no change of one word is lost, and the sum of
// products of their halves under keys that depend on the place, in which order counts. A product of
// 32-bit halves is what vector units have: the inner loop is theirs.
std::uint64_t block_checksum(const std::byte* block) {
  Row sums{};
  Row products{};
  Row keys = kKeys;
  for (std::size_t row = 0; row < kRows; ++row) {
    Row words;
    std::memcpy(words.data(), block + row * sizeof(words), sizeof(words));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t keyed = words[lane] ^ keys[lane];
      sums[lane] += words[lane];
      products[lane] += (keyed & 0xffffffff) * (keyed >> 32);
      keys[lane] += kOdd;
    }
  }
  std::uint64_t mixed = kOdd;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    mixed = (std::rotl(mixed, 29) ^ sums[lane]) * kOdd;
    mixed = (std::rotl(mixed, 29) ^ products[lane]) * kOdd;
  }
  return mixed ^ (mixed >> 32);
}

std::uint64_t zero_checksum() {
  static const std::uint64_t checksum = [] {
    const std::array<std::byte, kBlockBytes> zeros{};
    return block_checksum(zeros.data());
  }();
  return checksum;
}

}  // namespace tessera::tier
