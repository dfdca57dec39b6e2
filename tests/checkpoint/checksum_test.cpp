#include "tessera/checkpoint/checksum.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/optim/content_hash.cuh"

namespace tessera::checkpoint {
namespace {

// The bytes that xxHash's own checks are made of.
std::vector<std::byte> xxhash_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  std::uint64_t state = 2654435761U;
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(state >> 56);
    state *= 11400714785074694797U;
  }
  return bytes;
}

// The definition, byte by byte.
std::uint64_t content_by_definition(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  for (std::size_t begin = 0; begin < bytes.size(); begin += 8) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < 8 && begin + i < bytes.size(); ++i) {
      word += std::to_integer<std::uint64_t>(bytes[begin + i]) << (8 * i);
    }
    sum += optim::hash_term(word, begin / 8);
  }
  return sum;
}

TEST(Checksum, Xxh3IsThePublishedFunction) {
  // From xxHash's own checks; each is another path of the function.
  const std::array<std::pair<std::size_t, std::uint64_t>, 12> known = {{
      {0, 0x2d06800538d394c2U},
      {1, 0xc44bdff4074eecdbU},
      {6, 0x27b56a84cd2d7325U},
      {12, 0xa713daf0dfbb77e7U},
      {24, 0xa3fe70bf9d3510ebU},
      {48, 0x397da259ecba1f11U},
      {80, 0xbcdefbbb2c47c90aU},
      {195, 0xcd94217ee362ec3aU},
      {403, 0xcdeb804d65c6dea4U},
      {512, 0x617e49599013cb6bU},
      {2048, 0xdd59e2c3a5f038e0U},
      {2367, 0xcb37aeb9e5d361edU},
  }};
  for (const auto& [count, value] : known) {
    EXPECT_EQ(xxh3(xxhash_bytes(count)), value) << count << " bytes";
  }
}

TEST(Checksum, InWhateverPiecesBytesComeTheirSumsAreTheSame) {
  std::mt19937_64 random(1);
  for (const std::size_t count : {1U, 7U, 8U, 9U, 255U, 1024U, 5003U}) {
    const auto bytes = xxhash_bytes(count);
    for (int round = 0; round < 20; ++round) {
      Xxh3 hash;
      ContentHash content;
      std::span<const std::byte> rest(bytes);
      while (!rest.empty()) {
        const auto piece =
            rest.first(random() % std::min<std::size_t>(rest.size() + 1, 40 << round));
        hash.add(piece);
        content.add(piece);
        rest = rest.subspan(piece.size());
      }
      EXPECT_EQ(hash.value(), xxh3(bytes)) << count << " bytes, round " << round;
      EXPECT_EQ(content.value(), content_by_definition(bytes)) << count << ", round " << round;
    }
  }
  EXPECT_EQ(Xxh3().value(), xxh3({}));
  EXPECT_EQ(ContentHash().value(), 0U) << "nothing adds nothing";
}

TEST(Checksum, AValueMayBeAskedForBeforeTheEnd) {
  const auto bytes = xxhash_bytes(100);
  Xxh3 hash;
  ContentHash content;
  hash.add(std::span(bytes).first(13));
  content.add(std::span(bytes).first(13));
  EXPECT_EQ(hash.value(), xxh3(std::span(bytes).first(13)));
  EXPECT_EQ(content.value(), content_by_definition(std::span(bytes).first(13)));
  hash.add(std::span(bytes).subspan(13));
  content.add(std::span(bytes).subspan(13));
  EXPECT_EQ(hash.value(), xxh3(bytes));
  EXPECT_EQ(content.value(), content_by_definition(bytes));
  Xxh3 moved(std::move(hash));
  EXPECT_EQ(moved.value(), xxh3(bytes));
}

TEST(Checksum, PartsOfATensorAddUpToTheWholeWhoeverHadWhich) {
  std::mt19937_64 random(2);
  for (const std::size_t count :
       {8U, 40U, 43U, 1000U, 4097U}) {  // also with a word that is not full
    const auto bytes = xxhash_bytes(count);
    for (int round = 0; round < 20; ++round) {
      std::uint64_t sum = 0;
      for (std::size_t begin = 0; begin < count;) {
        const std::size_t end = std::min<std::size_t>(count, begin + 8 * (1 + random() % 20));
        ContentHash part(begin);
        part.add(std::span(bytes).subspan(begin, end - begin));
        sum += part.value();
        begin = end;
      }
      EXPECT_EQ(sum, content_by_definition(bytes)) << count << " bytes, round " << round;
    }
  }
}

TEST(Checksum, ExchangedWordsAndASingleBitChangeTheContentHash) {
  auto bytes = xxhash_bytes(64);
  const std::uint64_t before = content_by_definition(bytes);
  for (std::size_t bit = 0; bit < 64 * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    ContentHash hash;
    hash.add(bytes);
    EXPECT_NE(hash.value(), before) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 16);
  ContentHash hash;
  hash.add(bytes);
  EXPECT_NE(hash.value(), before);
}

TEST(Checksum, APartThatBeginsInsideAWordIsRefused) { EXPECT_THROW(ContentHash(4), InternalError); }

}  // namespace
}  // namespace tessera::checkpoint
