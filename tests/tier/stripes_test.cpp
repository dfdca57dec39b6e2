// Against a model that deals the bytes out one by one.
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/tier/file_store.h"

namespace tessera::tier {
namespace {

// By byte of the store: which file, and where in it.
std::vector<std::pair<std::size_t, std::uint64_t>> deal(std::size_t num_files, std::uint64_t stripe,
                                                        std::uint64_t bytes) {
  std::vector<std::uint64_t> filled(num_files, 0);
  std::vector<std::pair<std::size_t, std::uint64_t>> places;
  for (std::uint64_t byte = 0; byte < bytes; ++byte) {
    const std::size_t file = num_files == 1 ? 0 : byte / stripe % num_files;
    places.emplace_back(file, filled[file]++);
  }
  return places;
}

TEST(Stripes, EveryRangeLiesWhereTheModelPutsIt) {
  constexpr std::uint64_t kBytes = 37;
  for (const std::size_t num_files : {1, 2, 3, 5}) {
    for (const std::uint64_t stripe : {1, 4, 7, 64}) {
      const Stripes stripes(num_files, stripe);
      const auto places = deal(num_files, stripe, kBytes);
      for (std::uint64_t begin = 0; begin <= kBytes; ++begin) {
        for (std::uint64_t end = begin; end <= kBytes; ++end) {
          std::uint64_t at = begin;
          for (const Stripes::Piece& piece : stripes.cut(begin, end - begin)) {
            ASSERT_EQ(piece.offset, at);
            ASSERT_GT(piece.bytes, 0U);
            for (std::size_t i = 0; i < piece.bytes; ++i, ++at) {
              ASSERT_EQ(places.at(at), std::make_pair(piece.file, piece.offset_in_file + i));
            }
          }
          ASSERT_EQ(at, end);
        }
      }
    }
  }
}

TEST(Stripes, FilesHaveExactlyTheBytesOfTheStore) {
  for (const std::size_t num_files : {1, 2, 3, 5}) {
    for (const std::uint64_t stripe : {1, 4, 7, 64}) {
      const Stripes stripes(num_files, stripe);
      for (std::uint64_t bytes = 0; bytes < 70; ++bytes) {
        std::vector<std::uint64_t> expected(num_files, 0);
        for (const auto& [file, offset] : deal(num_files, stripe, bytes)) {
          expected[file] = offset + 1;
        }
        for (std::size_t file = 0; file < num_files; ++file) {
          ASSERT_EQ(stripes.file_bytes(file, bytes), expected[file])
              << num_files << " files, stripe " << stripe << ", " << bytes << " bytes";
        }
      }
    }
  }
}

TEST(Stripes, ARangeInOneFileIsOnePiece) {
  EXPECT_EQ(Stripes(1, 4096).cut(8192, std::size_t{1} << 30).size(), 1U);
}

}  // namespace
}  // namespace tessera::tier
