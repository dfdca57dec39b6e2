#include "tessera/comm/topology.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Every rank is in exactly one shard group and one replica group, at the index it claims, and the
// two meet in that rank alone: so shard rank and replica rank together name a rank.
TEST(Topology, ShardAndReplicaGroupsCoverTheWorldAndMeetOnce) {
  for (int world = 1; world <= 24; ++world) {
    for (int shard = 1; shard <= world; ++shard) {
      if (world % shard != 0) {
        EXPECT_THROW(Topology(world, 0, shard), ConfigError);
        continue;
      }
      for (int rank = 0; rank < world; ++rank) {
        const Topology topology(world, rank, shard);
        const auto shards = topology.shard_group();
        const auto replicas = topology.replica_group();
        ASSERT_EQ(static_cast<int>(shards.size()), shard);
        ASSERT_EQ(static_cast<int>(replicas.size()), world / shard);
        EXPECT_EQ(shards[static_cast<std::size_t>(topology.shard_rank())], rank);
        EXPECT_EQ(replicas[static_cast<std::size_t>(topology.replica_rank())], rank);
        EXPECT_TRUE(std::is_sorted(shards.begin(), shards.end()));
        EXPECT_TRUE(std::is_sorted(replicas.begin(), replicas.end()));
        std::set<int> both(shards.begin(), shards.end());
        both.insert(replicas.begin(), replicas.end());
        EXPECT_EQ(both.size(), shards.size() + replicas.size() - 1);
        for (const int member : shards) {
          EXPECT_EQ(Topology(world, member, shard).shard_group(), shards);
        }
        for (const int member : replicas) {
          EXPECT_EQ(Topology(world, member, shard).replica_group(), replicas);
        }
      }
    }
  }
}

TEST(Topology, ZeroMeansTheWholeWorld) {
  const Topology topology(6, 4, 0);
  EXPECT_EQ(topology.shard_size(), 6);
  EXPECT_EQ(topology.replica_size(), 1);
  EXPECT_EQ(topology.replica_group(), std::vector<int>{4});
}

TEST(Topology, AShardSizeThatDoesNotDivideIsRefusedWithTheNumbers) {
  try {
    const Topology topology(8, 0, 3);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("size 3 does not divide the 8 ranks"),
              std::string::npos);
  }
  EXPECT_THROW(Topology(4, 4), ConfigError);
  EXPECT_THROW(Topology(4, -1), ConfigError);
  EXPECT_THROW(Topology(0, 0), ConfigError);
  EXPECT_THROW(Topology(4, 0, -2), ConfigError);
}

}  // namespace
}  // namespace tessera::comm
