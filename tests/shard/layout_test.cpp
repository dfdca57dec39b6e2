// Every small layout there is, against the promises of the header, and the sizes that break
// arithmetic.
#include "tessera/shard/layout.h"

#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::shard {
namespace {

constexpr std::int64_t kLargestNumel = 200;
constexpr int kLargestRanks = 9;

template <typename Check>
void for_every_small_layout(const Check& check) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64,
                            DType::kInt64, DType::kInt32, DType::kUInt8}) {
    for (int num_ranks = 1; num_ranks <= kLargestRanks; ++num_ranks) {
      for (std::int64_t numel = 0; numel <= kLargestNumel; ++numel) {
        SCOPED_TRACE(testing::Message() << numel << " elements of " << to_string(dtype) << " over "
                                        << num_ranks << " ranks");
        check(Layout(numel, num_ranks, dtype));
        if (testing::Test::HasFailure()) {
          return;  // one layout that is wrong says enough
        }
      }
    }
  }
}

TEST(Layout, EveryElementBelongsToExactlyOneRankInOrder) {
  for_every_small_layout([](const Layout& layout) {
    std::int64_t next = 0;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
      const ElementRange range = layout.range(rank);
      EXPECT_EQ(range.begin, next);
      EXPECT_GE(range.numel, 0);
      EXPECT_LE(range.numel, layout.shard_numel());
      // Where it lies in the full parameter is where the gather puts it.
      if (range.numel > 0) {
        EXPECT_EQ(range.begin, rank * layout.shard_numel());
      }
      next += range.numel;
    }
    EXPECT_EQ(next, layout.numel());
  });
}

TEST(Layout, PiecesAreAlignedAndAsSmallAsTheyCanBe) {
  for_every_small_layout([](const Layout& layout) {
    const auto granule = static_cast<std::int64_t>(kShardAlignment / bytes_of(layout.dtype()));
    EXPECT_EQ(layout.shard_bytes() % kShardAlignment, 0U);
    EXPECT_EQ(layout.padded_numel(), layout.shard_numel() * layout.num_ranks());
    EXPECT_GE(layout.padded_numel(), layout.numel());
    // One granule less, and the pieces would not hold the parameter.
    EXPECT_TRUE(layout.numel() == 0
                    ? layout.shard_numel() == 0
                    : (layout.shard_numel() - granule) * layout.num_ranks() < layout.numel());
    EXPECT_EQ(layout.full_bytes(), layout.shard_bytes() * layout.num_ranks());
  });
}

TEST(Layout, HoldsParametersLargerThanFourGibielements) {
  const std::int64_t numel = (std::int64_t{5} << 32) + 1;
  const Layout layout(numel, 8, DType::kBFloat16);
  EXPECT_EQ(layout.shard_numel(), (std::int64_t{5} << 29) + 8);
  EXPECT_EQ(layout.range(7).begin, 7 * layout.shard_numel());
  EXPECT_EQ(layout.range(7).numel, numel - 7 * layout.shard_numel());
  EXPECT_EQ(layout.full_bytes(), static_cast<std::size_t>(layout.padded_numel()) * 2);
}

TEST(Layout, RefusesWhatIsNoParameter) {
  EXPECT_THROW(Layout(-1, 2, DType::kFloat32), ConfigError);
  EXPECT_THROW(Layout(4, 0, DType::kFloat32), ConfigError);
  EXPECT_THROW(Layout(4, -3, DType::kFloat32), ConfigError);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(Layout(most, 3, DType::kUInt8), ConfigError);
  EXPECT_THROW(Layout(most / 4, 3, DType::kFloat32), ConfigError);
  EXPECT_NO_THROW(Layout(most / 4 - 12, 3, DType::kFloat32));
}

TEST(Layout, KnowsOnlyItsOwnRanks) {
  const Layout layout(10, 2, DType::kFloat32);
  EXPECT_THROW(layout.range(2), InternalError);
  EXPECT_THROW(layout.range(-1), InternalError);
}

}  // namespace
}  // namespace tessera::shard
