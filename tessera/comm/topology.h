// Who shards with whom: pure arithmetic from world size and shard-group size to groups of ranks.
//
// Three groups exist from the first line on, also where they coincide:
//   world          all ranks
//   shard group    `shard_size` consecutive ranks that together hold one copy of the model
//   replica group  the ranks that hold the same shard, one from each shard group
// With shard_size == world_size (plain ZeRO-3) the shard group is the world and every replica
// group has one member; with a smaller one (MiCS) gradients are also reduced over replicas.
//
// Threads: immutable.
#pragma once

#include <vector>

namespace tessera::comm {

class Topology {
 public:
  // REQUIRES: shard_size divides world_size and 0 <= rank < world_size (else ConfigError).
  // shard_size 0 means the whole world.
  Topology(int world_size, int rank, int shard_size = 0);

  int world_size() const { return world_size_; }
  int rank() const { return rank_; }
  int shard_size() const { return shard_size_; }
  int replica_size() const { return world_size_ / shard_size_; }
  int shard_rank() const { return rank_ % shard_size_; }
  int replica_rank() const { return rank_ / shard_size_; }

  // World ranks, ascending; this rank is at index shard_rank() or replica_rank().
  std::vector<int> shard_group() const;
  std::vector<int> replica_group() const;

 private:
  int world_size_;
  int rank_;
  int shard_size_;
};

}  // namespace tessera::comm
