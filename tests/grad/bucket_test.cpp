// Every small set of parameters there is, against the promises of the header.
#include "tessera/grad/bucket.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::grad {
namespace {

// Shard sizes of up to four parameters, ids with holes as frozen parameters leave them.
void for_every_small_model(
    const std::function<void(const std::vector<BucketParam>&, std::int64_t)>& check) {
  const std::vector<std::int64_t> numels = {0, 1, 2, 3, 5, 13};
  for (std::size_t num_params = 0; num_params <= 4; ++num_params) {
    std::vector<std::size_t> choice(num_params, 0);
    while (true) {
      std::vector<BucketParam> params;
      for (std::size_t i = 0; i < num_params; ++i) {
        params.push_back({static_cast<int>(2 * i + 1), numels[choice[i]]});
      }
      for (const std::int64_t capacity : {0, 1, 3, 4, 7, 16}) {
        check(params, capacity);
        if (testing::Test::HasFailure()) {
          return;  // one layout that is wrong says enough
        }
      }
      std::size_t digit = 0;
      while (digit < num_params && ++choice[digit] == numels.size()) {
        choice[digit++] = 0;
      }
      if (digit == num_params) {
        break;
      }
    }
  }
}

constexpr int kNumRanks = 3;
constexpr std::size_t kWireBytes = 4;

BucketLayout plan(const std::vector<BucketParam>& params, std::int64_t capacity) {
  // The remainder of the division must not matter.
  return plan_buckets(params, kNumRanks, capacity * kNumRanks * 4 + 11, kWireBytes);
}

TEST(Bucket, EveryElementOfEveryParameterIsInExactlyOnePiece) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout = plan(params, capacity);
    std::map<int, std::vector<int>> seen;
    for (const BucketParam& param : params) {
      seen[param.id].resize(static_cast<std::size_t>(param.shard_numel));
    }
    for (const Bucket& bucket : layout.buckets) {
      std::int64_t offset = 0;
      for (const Piece& piece : bucket.pieces) {
        ASSERT_TRUE(seen.contains(piece.param));
        EXPECT_GT(piece.numel, 0);
        EXPECT_EQ(piece.bucket_offset, offset) << "pieces lie behind each other";
        offset += piece.numel;
        for (std::int64_t i = 0; i < piece.numel; ++i) {
          ++seen[piece.param].at(static_cast<std::size_t>(piece.shard_begin + i));
        }
      }
      EXPECT_EQ(bucket.shard_numel, offset);
    }
    for (const auto& [id, counts] : seen) {
      EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; }));
    }
  });
}

// So a block of what travels quantised has the elements of one piece, whatever the buckets.
TEST(Bucket, PiecesBeginAtBlocksAndZerosFillTheirLastOne) {
  constexpr std::int64_t kBlock = 4;
  for_every_small_model([&](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout =
        plan_buckets(params, kNumRanks, capacity * kNumRanks * 4 + 11, kWireBytes, kBlock);
    std::int64_t end = 0;
    std::map<int, std::int64_t> numel;
    for (const Bucket& bucket : layout.buckets) {
      std::int64_t offset = 0;
      EXPECT_EQ(bucket.region_offset, end);
      EXPECT_LE(bucket.shard_numel, std::max(kBlock, capacity / kBlock * kBlock));
      for (const Piece& piece : bucket.pieces) {
        EXPECT_EQ(piece.bucket_offset, offset);
        EXPECT_EQ(piece.bucket_offset % kBlock, 0);
        EXPECT_EQ(piece.shard_begin % kBlock, 0);
        EXPECT_EQ((piece.numel + piece.padding) % kBlock, 0);
        EXPECT_LT(piece.padding, kBlock);
        EXPECT_EQ(bucket.region_offset + piece.bucket_offset,
                  layout.region_offset[static_cast<std::size_t>(piece.param)] + piece.shard_begin);
        offset += piece.numel + piece.padding;
        numel[piece.param] += piece.numel;
      }
      EXPECT_EQ(bucket.shard_numel, offset);
      end += offset;
    }
    EXPECT_EQ(layout.region_numel, end);
    for (const BucketParam& param : params) {
      EXPECT_EQ(numel[param.id], param.shard_numel);
    }
  });
}

TEST(Bucket, NoBucketIsLargerThanAskedForOrEmpty) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout = plan(params, capacity);
    std::int64_t largest = 0;
    for (const Bucket& bucket : layout.buckets) {
      EXPECT_GE(bucket.shard_numel, 1);
      EXPECT_LE(bucket.shard_numel, std::max<std::int64_t>(1, capacity));
      largest = std::max(largest, bucket.shard_numel);
    }
    EXPECT_EQ(layout.largest_shard_numel, largest);
  });
}

TEST(Bucket, AParameterIsContiguousInTheRegionAndTheRegionHasNoHoles) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout = plan(params, capacity);
    std::int64_t end = 0;
    for (const Bucket& bucket : layout.buckets) {
      EXPECT_EQ(bucket.region_offset, end);
      end += bucket.shard_numel;
      for (const Piece& piece : bucket.pieces) {
        EXPECT_EQ(bucket.region_offset + piece.bucket_offset,
                  layout.region_offset[static_cast<std::size_t>(piece.param)] + piece.shard_begin);
      }
    }
    EXPECT_EQ(layout.region_numel, end);
    for (std::size_t id = 0; id < layout.region_offset.size(); ++id) {
      const bool is_known = std::any_of(params.begin(), params.end(), [&](const BucketParam& p) {
        return p.id == static_cast<int>(id);
      });
      EXPECT_EQ(layout.region_offset[id] >= 0, is_known);
    }
  });
}

TEST(Bucket, BucketsBecomeFullInTheirOrderIfGradientsComeInReverse) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout = plan(params, capacity);
    int last = std::numeric_limits<int>::max();
    for (const Bucket& bucket : layout.buckets) {
      for (std::size_t i = 1; i < bucket.pieces.size(); ++i) {
        EXPECT_LT(bucket.pieces[i].param, bucket.pieces[i - 1].param);
      }
      EXPECT_LE(bucket.pieces.back().param, last);
      last = bucket.pieces.back().param;
    }
  });
}

TEST(Bucket, ParametersOfHalfABucketTravelAloneAndSmallerOnesAreNeverCut) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    const BucketLayout layout = plan(params, capacity);
    const std::int64_t limit = std::max<std::int64_t>(1, capacity);
    std::int64_t previous_shared = limit;
    for (const Bucket& bucket : layout.buckets) {
      const Piece& first = bucket.pieces.front();
      const auto param = std::find_if(params.begin(), params.end(),
                                      [&](const BucketParam& p) { return p.id == first.param; });
      if (2 * param->shard_numel >= limit) {
        EXPECT_EQ(bucket.pieces.size(), 1U);
        EXPECT_TRUE(first.numel == param->shard_numel || param->shard_numel > limit);
        continue;
      }
      for (const Piece& piece : bucket.pieces) {
        EXPECT_EQ(piece.shard_begin, 0);
      }
      // What was closed had no room for the first of the next one.
      EXPECT_TRUE(previous_shared == limit || previous_shared + first.numel > limit);
      previous_shared = bucket.shard_numel;
    }
  });
}

TEST(Bucket, ALargeParameterIsCutAndASmallOneFillsUp) {
  const std::vector<BucketParam> params = {{0, 3}, {1, 25}, {2, 2}, {3, 4}};
  const BucketLayout layout = plan_buckets(params, 2, 10 * 2 * 2, 2);
  ASSERT_EQ(layout.buckets.size(), 4U);
  EXPECT_EQ(layout.buckets[0].pieces.front().shard_begin, 0);
  EXPECT_EQ(layout.buckets[1].pieces.front().shard_begin, 10);
  EXPECT_EQ(layout.buckets[2].pieces.front().shard_begin, 20);
  EXPECT_EQ(layout.buckets[2].shard_numel, 5);
  EXPECT_EQ(layout.buckets[3].pieces.size(), 3U) << "the small ones share, past the large one";
  EXPECT_EQ(layout.region_offset, (std::vector<std::int64_t>{31, 0, 29, 25}));
}

TEST(Bucket, DynamicParametersHavePlacesBehindAllBucketsAndChangeNoBucket) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    std::vector<BucketParam> mixed = params;
    std::vector<BucketParam> fixed;
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      mixed[i].dynamic = i % 3 != 1;
      if (!mixed[i].dynamic) {
        fixed.push_back(mixed[i]);
      }
    }
    const BucketLayout layout = plan(mixed, capacity);
    const BucketLayout expected = plan(fixed, capacity);
    ASSERT_EQ(layout.buckets.size(), expected.buckets.size());
    EXPECT_EQ(layout.bucketed_numel, expected.region_numel);
    std::int64_t end = layout.bucketed_numel;
    for (std::size_t i = mixed.size(); i-- > 0;) {
      const auto id = static_cast<std::size_t>(mixed[i].id);
      EXPECT_EQ(layout.is_dynamic[id], mixed[i].dynamic);
      if (mixed[i].dynamic) {
        EXPECT_EQ(layout.region_offset[id], end);
        end += mixed[i].shard_numel;
      } else {
        EXPECT_EQ(layout.region_offset[id], expected.region_offset[id]);
      }
    }
    EXPECT_EQ(layout.region_numel, end);
  });
}

TEST(Bucket, NoChoiceOfDynamicParametersMakesALargerBucketThanPromised) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    std::vector<BucketParam> dynamic = params;
    for (BucketParam& param : dynamic) {
      param.dynamic = true;
    }
    const std::int64_t promised = plan(dynamic, capacity).largest_dynamic_numel;
    std::int64_t largest = 0;
    for (unsigned choice = 0; choice < 1U << params.size(); ++choice) {
      std::vector<BucketParam> chosen;
      for (std::size_t i = 0; i < params.size(); ++i) {
        if ((choice >> i & 1U) != 0) {
          chosen.push_back(params[i]);
        }
      }
      largest = std::max(largest, plan(chosen, capacity).largest_shard_numel);
    }
    EXPECT_LE(largest, promised);
    EXPECT_LE(promised, std::max<std::int64_t>(1, capacity));
  });
}

TEST(Bucket, ShardsElsewhereAreInBucketsAndHaveNoPlaceInTheRegion) {
  for_every_small_model([](const std::vector<BucketParam>& params, std::int64_t capacity) {
    std::vector<BucketParam> mixed = params;
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      mixed[i].home = i % 2 == 0 ? Tier::kNvme : i % 4 == 1 ? Tier::kDevice : Tier::kHost;
      mixed[i].dynamic = i == 3;
    }
    const BucketLayout layout = plan(mixed, capacity);
    std::map<int, std::int64_t> in_buckets;
    std::int64_t end = 0;
    for (const Bucket& bucket : layout.buckets) {
      EXPECT_EQ(bucket.region_offset, end);
      for (const Piece& piece : bucket.pieces) {
        EXPECT_EQ(piece.shard_begin, in_buckets[piece.param]);
        in_buckets[piece.param] += piece.numel;
        const auto id = static_cast<std::size_t>(piece.param);
        if (layout.home[id] == Tier::kDevice) {
          EXPECT_EQ(layout.region_offset[id] + piece.shard_begin, end);
          end += piece.numel;
        }
      }
    }
    EXPECT_EQ(layout.bucketed_numel, end);
    for (const BucketParam& param : mixed) {
      const auto id = static_cast<std::size_t>(param.id);
      EXPECT_EQ(layout.home[id], param.home);
      EXPECT_EQ(layout.region_offset[id] < 0, param.home != Tier::kDevice);
      EXPECT_EQ(in_buckets[param.id], param.dynamic ? 0 : param.shard_numel);
      end += param.dynamic && param.home == Tier::kDevice ? param.shard_numel : 0;
    }
    EXPECT_EQ(layout.region_numel, end);
  });
}

TEST(Bucket, ALargeParameterIsCutAtWholeBlocksOfAStore) {
  struct Case {
    std::int64_t capacity = 0;
    Tier home = Tier::kDevice;
    std::int64_t piece_numel = 0;
  };
  for (const Case& test : std::vector<Case>{{4096, Tier::kDevice, 4096},
                                            {4096, Tier::kNvme, 4096},
                                            {10000, Tier::kHost, 8192},
                                            {10000, Tier::kNvme, 8192},
                                            {100, Tier::kNvme, 4096},
                                            {100, Tier::kHost, 100},
                                            {100, Tier::kDevice, 100}}) {
    std::vector<BucketParam> params = {{0, 30001, false, test.home}};
    const BucketLayout layout = plan(params, test.capacity);
    EXPECT_EQ(layout.largest_shard_numel, test.piece_numel);
    std::int64_t begin = 0;
    for (const Bucket& bucket : layout.buckets) {
      ASSERT_EQ(bucket.pieces.size(), 1U);
      EXPECT_EQ(bucket.pieces.front().shard_begin, begin);
      EXPECT_EQ(bucket.shard_numel, std::min(test.piece_numel, 30001 - begin));
      begin += bucket.shard_numel;
    }
    EXPECT_EQ(begin, 30001);
    params.front().dynamic = true;
    EXPECT_EQ(plan(params, test.capacity).largest_dynamic_numel, test.piece_numel);
  }
}

TEST(Bucket, SizesAreThoseOfTheLayoutAlsoWhereNobodyCouldMakeIt) {
  for (const std::int64_t block_numel : {1, 4}) {
    for_every_small_model([&](const std::vector<BucketParam>& params, std::int64_t capacity) {
      std::vector<BucketParam> mixed = params;
      for (std::size_t i = 0; i < mixed.size(); ++i) {
        mixed[i].home = i % 2 == 0 ? Tier::kDevice : i % 4 == 1 ? Tier::kNvme : Tier::kHost;
        mixed[i].dynamic = i == 2;
      }
      const std::int64_t bytes = capacity * kNumRanks * 4;
      const BucketLayout layout = plan_buckets(mixed, kNumRanks, bytes, kWireBytes, block_numel);
      std::int64_t largest = 0;
      for (const Bucket& bucket : layout.buckets) {
        largest = std::max(largest, bucket.shard_numel);
      }
      const BucketSizes sizes = bucket_sizes(mixed, kNumRanks, bytes, kWireBytes, block_numel);
      EXPECT_EQ(sizes.num_buckets, std::ssize(layout.buckets));
      EXPECT_EQ(sizes.largest_shard_numel, largest);
    });
  }
  const std::vector<BucketParam> huge = {{0, std::int64_t{1} << 50}, {1, 3}};
  const BucketSizes sizes = bucket_sizes(huge, 1, 4096 * 4, 4);
  EXPECT_EQ(sizes.num_buckets, (std::int64_t{1} << 38) + 1);
  EXPECT_EQ(sizes.largest_shard_numel, 4096);
  EXPECT_EQ(sizes.region_numel, (std::int64_t{1} << 50) + 3);
}

TEST(Bucket, RefusesWhatIsNoLayout) {
  const std::vector<BucketParam> negative = {{0, -1}};
  EXPECT_THROW(plan_buckets(negative, 2, 64, 4), InternalError);
  EXPECT_THROW(plan_buckets({}, 0, 64, 4), InternalError);
  EXPECT_THROW(plan_buckets({}, 2, -1, 4), InternalError);
  EXPECT_TRUE(plan_buckets({}, 2, 64, 4).buckets.empty());
}

}  // namespace
}  // namespace tessera::grad
