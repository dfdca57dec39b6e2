#include "tessera/device/host_threads.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/device/host_memory.h"
#include "tests/device/device_support.h"

namespace tessera::device {
namespace {

TEST(HostThreads, DoEveryPieceOnce) {
  for (const std::size_t num_pieces : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> counts(num_pieces);
    for_each_piece(num_pieces, [&](std::size_t piece) { ++counts[piece]; });
    EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](const auto& n) { return n == 1; }));
  }
}

TEST(HostThreads, ThrowWhatAPieceHasThrown) {
  for (const std::size_t num_pieces : {1, 100}) {
    std::atomic<std::size_t> num_done{0};
    try {
      for_each_piece(num_pieces, [&](std::size_t piece) {
        if (piece == num_pieces / 2) {
          throw std::runtime_error("piece " + std::to_string(piece));
        }
        ++num_done;
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "piece " + std::to_string(num_pieces / 2));
    }
    EXPECT_LT(num_done, num_pieces);
  }
}

TEST(HostThreads, CopyWholePiecesAndTheRest) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, (std::size_t{20} << 20) + 3}) {
    std::vector<unsigned char> from(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      from[i] = static_cast<unsigned char>(i * 31 >> 4);
    }
    std::vector<unsigned char> to(bytes + 1, 7);
    copy_host(to.data(), from.data(), bytes);
    EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin()));
    EXPECT_EQ(to.back(), 7) << "and nothing behind them";
  }
}

TEST(HostThreads, FillWholePiecesAndTheRest) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, 2 * kTouchedPieceBytes + 3}) {
    std::vector<unsigned char> memory(bytes + 1, 7);
    fill_host(memory.data(), 3, bytes);
    EXPECT_TRUE(is_all(memory.data(), bytes, 3));
    EXPECT_EQ(memory.back(), 7) << "and nothing behind them";
  }
}

}  // namespace
}  // namespace tessera::device
