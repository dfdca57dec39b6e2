#include "tessera/comm/topology.h"

#include "tessera/core/error.h"

namespace tessera::comm {

Topology::Topology(int world_size, int rank, int shard_size)
    : world_size_(world_size), rank_(rank), shard_size_(shard_size == 0 ? world_size : shard_size) {
  TESSERA_CHECK(world_size >= 1, ConfigError, "topology: world_size=", world_size,
                " must be at least 1");
  TESSERA_CHECK(rank >= 0 && rank < world_size, ConfigError, "topology: rank=", rank,
                " is not below world_size=", world_size);
  TESSERA_CHECK(shard_size_ >= 1 && world_size % shard_size_ == 0, ConfigError,
                "topology: shard group size ", shard_size, " does not divide the ", world_size,
                " ranks; choose a divisor, or 0 to shard over all ranks");
}

std::vector<int> Topology::shard_group() const {
  const int first = replica_rank() * shard_size_;
  std::vector<int> ranks;
  for (int i = 0; i < shard_size_; ++i) {
    ranks.push_back(first + i);
  }
  return ranks;
}

std::vector<int> Topology::replica_group() const {
  std::vector<int> ranks;
  for (int i = 0; i < replica_size(); ++i) {
    ranks.push_back(i * shard_size_ + shard_rank());
  }
  return ranks;
}

}  // namespace tessera::comm
