// The axes of a world: hosts, shard groups and replica groups.
//
//               host 0     host 1     host 2     host 3          8 ranks, 2 per host, groups of 4
//   replica 0   [0   1     2   3]
//   replica 1                         [4   5     6   7]
//
// A shard group is consecutive ranks that together hold one copy of the model; rank r of the world
// has place r % shard_size in it. The ranks with the same place in all groups are a replica group.
// A shard group lies inside one host, or is whole hosts, so that every rank has as many peers
// inside its host and across hosts as every other rank.
//
// Which shard of a parameter a rank holds is its shard index. It is the place, except where a
// collective of a group takes two steps, one inside hosts and one across: then it is local_rank *
// hosts + host within the group. So a hierarchical gather across hosts fills consecutive slots of
// the full parameter, and the one inside the host fills it with consecutive blocks of these; and a
// reduction in two hops, inside hosts first, leaves a consecutive block of shards with each local
// rank, and then one of these with each host. Neither step copies anything to another place.
// Hierarchical gathers and reductions in two hops are chosen independently.
//
// Hosts are uneven where they have different numbers of ranks, or ranks that do not follow each
// other. Then there is no axis of hosts: groups are of one rank or of all, and no collective takes
// two steps.
//
// Threads: immutable; nothing here communicates.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {
class Config;
}

namespace tessera::comm {

struct MeshOptions {
  int num_ranks = 1;
  int ranks_per_host = 0;  // 0: all ranks are on one host
  int shard_size = 0;      // ranks of a shard group; 0: all ranks
  bool hierarchical = false;
  // Of groups that have several ranks on each of several hosts.
  bool two_hop_reductions = false;
  bool uneven_hosts = false;  // ranks_per_host does not count

  // Of the options shard.* and quant.gradients. `ranks_per_host` as ranks_per_host() below finds
  // it; 0: uneven.
  static MeshOptions from(const Config& config, int num_ranks, int ranks_per_host);
};

class Mesh {
 public:
  Mesh() = default;  // a world of one

  int num_ranks() const { return num_ranks_; }
  // Where hosts are uneven, this and what follows from it is as if all ranks were on one.
  bool has_uneven_hosts() const { return uneven_hosts_; }
  int ranks_per_host() const { return ranks_per_host_; }
  int num_hosts() const { return num_ranks_ / ranks_per_host_; }
  int shard_size() const { return shard_size_; }
  int num_replicas() const { return num_ranks_ / shard_size_; }
  bool hierarchical() const { return hierarchical_; }
  // Reductions go inside hosts, then across. False where one of these would be of one rank.
  bool two_hops() const { return two_hops_; }
  // The shard index is not the place.
  bool numbers_by_local_rank() const { return hierarchical_ || two_hops_; }

  // Of a shard group: the hosts that it is spread over, and its ranks on each of them.
  int hosts_per_group() const { return shard_size_ / inside_size(); }
  int inside_size() const { return shard_size_ < ranks_per_host_ ? shard_size_ : ranks_per_host_; }

  // Of ranks of the world.
  int host_of(int rank) const { return rank / ranks_per_host_; }
  int replica_of(int rank) const { return rank / shard_size_; }
  int place_of(int rank) const { return rank % shard_size_; }  // the rank in its shard group
  int shard_index(int rank) const;
  std::vector<int> shard_ranks(int rank) const;    // ascending: the shard group
  std::vector<int> replica_ranks(int rank) const;  // ascending: the replica group
  // The two phases of a hierarchical gather, and, the other way round, the two hops of a reduction:
  // ranks of the shard group with the same local rank, by host; and those on the same host, by
  // local rank.
  std::vector<int> across_ranks(int rank) const;
  std::vector<int> inside_ranks(int rank) const;

  // By place in a shard group: the shard index. The same in all groups, and a permutation.
  std::vector<int> shard_of_group_rank() const;

  // One line: "mesh: 8 ranks = 2 copies x 4 shards, on 4 hosts of 2; gathers across 2 hosts first".
  std::string describe() const;

  // The same axes. How reductions go does not count.
  bool operator==(const Mesh& other) const;

 private:
  friend Mesh plan_mesh(const MeshOptions& options);

  int num_ranks_ = 1;
  int ranks_per_host_ = 1;
  int shard_size_ = 1;
  bool hierarchical_ = false;
  bool two_hops_ = false;
  bool uneven_hosts_ = false;
};

// Throws ConfigError with the options, their values, and the shard sizes that are possible.
Mesh plan_mesh(const MeshOptions& options);

// Ascending. Empty: none, whatever the reason; options.shard_size does not count.
// REQUIRES: ranks_per_host is 0 or divides num_ranks.
std::vector<int> possible_shard_sizes(const MeshOptions& options);

// Consecutive ranks that may cut what has been gathered once more (hpZ): of one shard group and one
// host. Ascending, from 2.
std::vector<int> possible_secondary_sizes(const Mesh& mesh);

// Option shard.secondary_group_size; 1: none do. Throws ConfigError for one that is not possible.
int secondary_size(const Config& config, const Mesh& mesh);

// From a name of each rank's host, by rank. 0: hosts have different numbers of ranks, or ranks that
// do not follow each other.
int ranks_per_host(std::span<const std::uint64_t> hosts);

}  // namespace tessera::comm
