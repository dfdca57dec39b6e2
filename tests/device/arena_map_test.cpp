// The map against a model too simple to be wrong: an array with the owner of each unit of bytes.
#include "tessera/device/arena_map.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::device {
namespace {

constexpr std::size_t kUnit = kArenaAlignment;

class OwnerArray {
 public:
  explicit OwnerArray(std::size_t num_units) : owners_(num_units, 0) {}

  // Best fit by looking at every hole; -1 if there is none.
  std::int64_t best_fit(std::size_t num_units) const {
    std::int64_t best = -1;
    std::size_t best_units = std::numeric_limits<std::size_t>::max();
    for (const auto& [start, units] : holes()) {
      if (units >= num_units && units < best_units) {
        best = static_cast<std::int64_t>(start);
        best_units = units;
      }
    }
    return best;
  }

  bool is_free(std::size_t start, std::size_t num_units) const {
    if (start + num_units > owners_.size()) {
      return false;
    }
    return std::all_of(owners_.begin() + static_cast<std::ptrdiff_t>(start),
                       owners_.begin() + static_cast<std::ptrdiff_t>(start + num_units),
                       [](int owner) { return owner == 0; });
  }

  void set(std::size_t start, std::size_t num_units, int owner) {
    std::fill_n(owners_.begin() + static_cast<std::ptrdiff_t>(start), num_units, owner);
  }

  std::vector<std::pair<std::size_t, std::size_t>> holes() const {
    std::vector<std::pair<std::size_t, std::size_t>> holes;
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      if (owners_[i] != 0) {
        continue;
      }
      if (i > 0 && owners_[i - 1] == 0) {
        ++holes.back().second;
      } else {
        holes.emplace_back(i, 1);
      }
    }
    return holes;
  }

  void expect_agrees(const ArenaMap& map, std::size_t num_blocks, std::size_t peak_units) const {
    const ArenaMapStats stats = map.stats();
    std::size_t largest = 0;
    std::size_t free_units = 0;
    for (const auto& hole : holes()) {
      largest = std::max(largest, hole.second);
      free_units += hole.second;
    }
    ASSERT_EQ(stats.capacity_bytes, owners_.size() * kUnit);
    ASSERT_EQ(stats.free_bytes(), free_units * kUnit);
    ASSERT_EQ(stats.num_holes, holes().size());
    ASSERT_EQ(stats.largest_hole_bytes, largest * kUnit);
    ASSERT_EQ(stats.num_blocks, num_blocks);
    ASSERT_EQ(stats.peak_used_bytes, peak_units * kUnit);
  }

 private:
  std::vector<int> owners_;
};

TEST(ArenaMap, AgreesWithTheModelOverRandomSequences) {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    std::mt19937 random(seed);
    const std::size_t num_units = 1 + random() % 64;
    ArenaMap map(num_units * kUnit + random() % kUnit);
    OwnerArray model(num_units);
    std::vector<Extent> live;
    std::size_t used_units = 0;
    std::size_t peak_units = 0;
    for (int step = 1; step <= 400; ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " step " + std::to_string(step));
      const std::size_t bytes = 1 + random() % (12 * kUnit);
      const std::size_t units = (bytes + kUnit - 1) / kUnit;
      const std::size_t choice = random() % 4;
      if (choice == 0) {
        const std::int64_t expected = model.best_fit(units);
        const auto extent = map.place(bytes);
        ASSERT_EQ(extent.has_value(), expected >= 0);
        if (extent) {
          ASSERT_EQ(*extent, (Extent{static_cast<std::size_t>(expected) * kUnit, units * kUnit}));
          live.push_back(*extent);
        }
      } else if (choice == 1) {
        const std::size_t start = random() % (num_units + 2);
        const bool is_free = model.is_free(start, units);
        ASSERT_EQ(map.can_claim(start * kUnit, bytes), is_free);
        if (is_free) {
          live.push_back(map.claim(start * kUnit, bytes));
          ASSERT_EQ(live.back(), (Extent{start * kUnit, units * kUnit}));
        } else {
          ASSERT_THROW(map.claim(start * kUnit, bytes), InternalError);
        }
      } else if (!live.empty()) {
        const std::size_t i = random() % live.size();
        map.release(live[i]);
        model.set(live[i].offset / kUnit, live[i].bytes / kUnit, 0);
        used_units -= live[i].bytes / kUnit;
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
        ASSERT_NO_FATAL_FAILURE(model.expect_agrees(map, live.size(), peak_units));
        continue;
      }
      if (!live.empty() && model.is_free(live.back().offset / kUnit, live.back().bytes / kUnit)) {
        model.set(live.back().offset / kUnit, live.back().bytes / kUnit, step);
        used_units += live.back().bytes / kUnit;
        peak_units = std::max(peak_units, used_units);
      }
      ASSERT_NO_FATAL_FAILURE(model.expect_agrees(map, live.size(), peak_units));
    }
  }
}

// Every way to take and give back three blocks in an arena of six units, in every order.
TEST(ArenaMap, CoalescesInEveryOrderOfRelease) {
  std::vector<std::size_t> order{0, 1, 2};
  for (std::size_t a = 1; a <= 4; ++a) {
    for (std::size_t b = 1; a + b <= 5; ++b) {
      for (std::size_t c = 1; a + b + c <= 6; ++c) {
        std::sort(order.begin(), order.end());
        do {
          ArenaMap map(6 * kUnit);
          const std::vector<Extent> blocks{*map.place(a * kUnit), *map.place(b * kUnit),
                                           *map.place(c * kUnit)};
          for (const std::size_t i : order) {
            map.release(blocks[i]);
          }
          ASSERT_EQ(map.stats().num_holes, 1U) << a << b << c;
          ASSERT_EQ(map.stats().largest_hole_bytes, 6 * kUnit);
          ASSERT_TRUE(map.place(6 * kUnit).has_value());
        } while (std::next_permutation(order.begin(), order.end()));
      }
    }
  }
}

TEST(ArenaMap, NamesTheBlockThatIsInTheWay) {
  ArenaMap map(10 * kUnit);
  map.claim(2 * kUnit, 3 * kUnit);
  try {
    map.claim(4 * kUnit, kUnit);
    FAIL() << "expected InternalError";
  } catch (const InternalError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("[512, 1280)"), std::string::npos) << message;
    EXPECT_NE(message.find("[1024, 1280)"), std::string::npos) << message;
  }
}

TEST(ArenaMap, RefusesOffsetsThatAreMisalignedOrOutside) {
  ArenaMap map(4 * kUnit);
  EXPECT_THROW(map.claim(1, kUnit), InternalError);
  EXPECT_THROW(map.claim(4 * kUnit, 1), InternalError);
  EXPECT_THROW(map.claim(0, 4 * kUnit + 1), InternalError);
  EXPECT_THROW(map.claim(kUnit, std::numeric_limits<std::size_t>::max()), InternalError);
  EXPECT_FALSE(map.place(std::numeric_limits<std::size_t>::max()).has_value());
  EXPECT_EQ(map.stats().used_bytes, 0U);
}

TEST(ArenaMap, RefusesToReleaseWhatIsNotABlock) {
  ArenaMap map(4 * kUnit);
  const Extent block = map.claim(0, 2 * kUnit);
  EXPECT_THROW(map.release({0, kUnit}), InternalError);
  EXPECT_THROW(map.release({kUnit, kUnit}), InternalError);
  map.release(block);
  EXPECT_THROW(map.release(block), InternalError);
}

TEST(ArenaMap, HoldsBlocksOfZeroBytesWithoutTakingAnything) {
  ArenaMap map(kUnit);
  const Extent full = *map.place(kUnit);
  const auto nothing = map.place(0);
  ASSERT_TRUE(nothing.has_value());
  EXPECT_TRUE(map.can_claim(0, 0));
  const Extent planned = map.claim(0, 0);
  map.release(*nothing);
  map.release(planned);
  EXPECT_EQ(map.stats().used_bytes, kUnit);
  map.release(full);
}

TEST(ArenaMap, OfNoBytesPlacesOnlyNothing) {
  ArenaMap map(kUnit - 1);
  EXPECT_EQ(map.stats().capacity_bytes, 0U);
  EXPECT_FALSE(map.place(1).has_value());
  EXPECT_TRUE(map.place(0).has_value());
}

TEST(ArenaMap, ForgetsItsPeakWhenTold) {
  ArenaMap map(4 * kUnit);
  const Extent first = *map.place(3 * kUnit);
  map.release(first);
  EXPECT_EQ(map.stats().peak_used_bytes, 3 * kUnit);
  map.reset_peak();
  EXPECT_EQ(map.stats().peak_used_bytes, 0U);
}

}  // namespace
}  // namespace tessera::device
