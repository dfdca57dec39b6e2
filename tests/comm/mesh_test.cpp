#include "tessera/comm/mesh.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/mesh_bytes.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string text_of(const MeshOptions& options) {
  return detail::concat(options.num_ranks, " ranks, ", options.ranks_per_host,
                        " per host, groups of ", options.shard_size,
                        options.hierarchical ? ", hierarchical" : "");
}

// Of the definition in mesh.h, said in another way: by the hosts of each group.
bool is_possible(const MeshOptions& options) {
  const int per_host = options.ranks_per_host == 0 ? options.num_ranks : options.ranks_per_host;
  const int size = options.shard_size == 0 ? options.num_ranks : options.shard_size;
  if (options.num_ranks % per_host != 0 || options.num_ranks % size != 0) {
    return false;
  }
  for (int first = 0; first < options.num_ranks; first += size) {
    std::set<int> hosts;
    for (int rank = first; rank < first + size; ++rank) {
      hosts.insert(rank / per_host);
    }
    const bool is_inside = hosts.size() == 1;
    const bool is_whole = size == static_cast<int>(hosts.size()) * per_host;
    if ((!is_inside && !is_whole) || (options.hierarchical && is_inside)) {
      return false;
    }
  }
  return true;
}

template <typename Check>
void for_each_option(int most_ranks, const Check& check) {
  for (int num_ranks = 1; num_ranks <= most_ranks; ++num_ranks) {
    for (int per_host = 0; per_host <= num_ranks; ++per_host) {
      for (int size = 0; size <= num_ranks; ++size) {
        for (const bool hierarchical : {false, true}) {
          const MeshOptions options{num_ranks, per_host, size, hierarchical};
          SCOPED_TRACE(text_of(options));
          check(options);
        }
      }
    }
  }
}

template <typename Check>
void for_each_mesh(int most_ranks, const Check& check) {
  for_each_option(most_ranks, [&](const MeshOptions& options) {
    if (is_possible(options)) {
      check(plan_mesh(options));
    }
  });
}

std::string refusal(const MeshOptions& options) {
  try {
    plan_mesh(options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

// Every list is made of whole groups: whoever is in it has the same list.
template <typename Ranks>
void expect_partition(const Mesh& mesh, const Ranks& ranks_of) {
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    const std::vector<int> ranks = ranks_of(rank);
    EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
    EXPECT_EQ(std::count(ranks.begin(), ranks.end(), rank), 1);
    for (const int other : ranks) {
      EXPECT_EQ(ranks_of(other), ranks);
    }
  }
}

TEST(Mesh, TakesExactlyTheCombinationsWhoseGroupsFitTheHosts) {
  for_each_option(16, [](const MeshOptions& options) {
    EXPECT_EQ(refusal(options) == "none", is_possible(options)) << refusal(options);
  });
}

TEST(Mesh, EveryRankIsInOneGroupOfEachAxis) {
  for_each_mesh(24, [](const Mesh& mesh) {
    expect_partition(mesh, [&](int rank) { return mesh.shard_ranks(rank); });
    expect_partition(mesh, [&](int rank) { return mesh.replica_ranks(rank); });
    expect_partition(mesh, [&](int rank) { return mesh.across_ranks(rank); });
    expect_partition(mesh, [&](int rank) { return mesh.inside_ranks(rank); });
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      std::vector<int> both;
      const std::vector<int> group = mesh.shard_ranks(rank);
      const std::vector<int> replicas = mesh.replica_ranks(rank);
      std::set_intersection(group.begin(), group.end(), replicas.begin(), replicas.end(),
                            std::back_inserter(both));
      EXPECT_EQ(both, std::vector<int>{rank});
      EXPECT_EQ(static_cast<int>(group.size()), mesh.shard_size());
      EXPECT_EQ(static_cast<int>(replicas.size()), mesh.num_replicas());
      EXPECT_EQ(group[static_cast<std::size_t>(mesh.place_of(rank))], rank);
      EXPECT_EQ(replicas[static_cast<std::size_t>(mesh.replica_of(rank))], rank);
    }
  });
}

TEST(Mesh, PhasesOfAGatherFollowTheHosts) {
  for_each_mesh(24, [](const Mesh& mesh) {
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      std::set<int> hosts;
      for (const int other : mesh.across_ranks(rank)) {
        EXPECT_TRUE(hosts.insert(mesh.host_of(other)).second) << "two ranks of one host";
        EXPECT_EQ(mesh.replica_of(other), mesh.replica_of(rank));
      }
      EXPECT_EQ(static_cast<int>(hosts.size()), mesh.hosts_per_group());
      for (const int other : mesh.inside_ranks(rank)) {
        EXPECT_EQ(mesh.host_of(other), mesh.host_of(rank));
        EXPECT_EQ(mesh.replica_of(other), mesh.replica_of(rank));
      }
    }
  });
}

TEST(Mesh, EveryGroupHoldsEveryShardOnceAndReplicasHoldTheSame) {
  for_each_mesh(24, [](const Mesh& mesh) {
    const std::vector<int> shards = mesh.shard_of_group_rank();
    std::vector<int> sorted = shards;
    std::sort(sorted.begin(), sorted.end());
    std::vector<int> all(sorted.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted, all);
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      EXPECT_EQ(mesh.shard_index(rank), shards[static_cast<std::size_t>(mesh.place_of(rank))]);
      for (const int other : mesh.replica_ranks(rank)) {
        EXPECT_EQ(mesh.shard_index(other), mesh.shard_index(rank));
      }
    }
  });
}

// Ranks with the same place in all groups hold the same shard; a first hop leaves with local rank l
// the shards from l * hosts on, and the second one of these with each host.
TEST(Mesh, BothHopsOfAReductionAreContiguous) {
  int num_two = 0;
  for_each_option(16, [&](MeshOptions options) {
    options.two_hop_reductions = true;
    if (!is_possible(options)) {
      return;
    }
    const Mesh mesh = plan_mesh(options);
    const bool spans_hosts = mesh.shard_size() > mesh.ranks_per_host();
    EXPECT_EQ(mesh.two_hops(), spans_hosts && mesh.ranks_per_host() > 1);
    EXPECT_EQ(mesh.numbers_by_local_rank(), mesh.two_hops() || mesh.hierarchical());
    num_two += mesh.two_hops() ? 1 : 0;
    std::set<int> shards;
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      shards.insert(mesh.shard_index(rank));
      EXPECT_EQ(mesh.shard_index(rank), mesh.shard_index(mesh.place_of(rank)));
      const std::vector<int> inside = mesh.inside_ranks(rank);
      const std::vector<int> across = mesh.across_ranks(rank);
      const auto local = std::find(inside.begin(), inside.end(), rank) - inside.begin();
      const auto host = std::find(across.begin(), across.end(), rank) - across.begin();
      if (mesh.two_hops()) {
        EXPECT_EQ(mesh.shard_index(rank), local * std::ssize(across) + host);
      }
    }
    EXPECT_EQ(static_cast<int>(shards.size()), mesh.shard_size());
    MeshOptions exact = options;
    exact.two_hop_reductions = false;
    EXPECT_FALSE(plan_mesh(exact).two_hops());
    EXPECT_EQ(plan_mesh(exact), mesh) << "the same axes";
  });
  EXPECT_GT(num_two, 10);
}

// Plain all-gathers in rank order, written where the shard index of the first rank says: the whole
// parameter comes out in its order, and no phase reads what none has written.
TEST(Mesh, BothPhasesOfAGatherAreContiguous) {
  for_each_mesh(24, [](const Mesh& mesh) {
    if (!mesh.hierarchical()) {
      return;
    }
    const auto size = static_cast<std::size_t>(mesh.num_ranks());
    const auto num_shards = static_cast<std::size_t>(mesh.shard_size());
    std::vector<std::vector<int>> full(size, std::vector<int>(num_shards, -1));
    for (std::size_t rank = 0; rank < size; ++rank) {
      const int shard = mesh.shard_index(static_cast<int>(rank));
      full[rank][static_cast<std::size_t>(shard)] = shard;
    }
    const auto gather = [&](const auto& ranks_of, std::size_t block) {
      const std::vector<std::vector<int>> before = full;
      for (std::size_t rank = 0; rank < size; ++rank) {
        const std::vector<int> ranks = ranks_of(static_cast<int>(rank));
        const std::size_t span = block * ranks.size();
        const std::size_t begin =
            static_cast<std::size_t>(mesh.shard_index(static_cast<int>(rank))) / span * span;
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          const std::vector<int>& source = before[static_cast<std::size_t>(ranks[i])];
          const auto from = source.begin() + static_cast<std::ptrdiff_t>(begin + i * block);
          std::copy(from, from + static_cast<std::ptrdiff_t>(block),
                    full[rank].begin() + static_cast<std::ptrdiff_t>(begin + i * block));
        }
      }
    };
    gather([&](int rank) { return mesh.across_ranks(rank); }, 1);
    gather([&](int rank) { return mesh.inside_ranks(rank); },
           static_cast<std::size_t>(mesh.hosts_per_group()));
    std::vector<int> wanted(num_shards);
    std::iota(wanted.begin(), wanted.end(), 0);
    for (const std::vector<int>& parameter : full) {
      EXPECT_EQ(parameter, wanted);
    }
  });
}

TEST(Mesh, IsDescribedInOneLine) {
  EXPECT_EQ(plan_mesh({8, 2, 4, true}).describe(),
            "mesh: 8 ranks = 2 copies x 4 shards, on 4 hosts of 2; gathers across 2 hosts first");
  EXPECT_EQ(plan_mesh({8, 2, 2, false}).describe(),
            "mesh: 8 ranks = 4 copies x 2 shards, on 4 hosts of 2");
  EXPECT_EQ(plan_mesh({4, 0, 0, false}).describe(),
            "mesh: 4 ranks = 1 copy x 4 shards, on one host");
  EXPECT_EQ(Mesh().describe(), "mesh: 1 rank = 1 copy x 1 shard, on one host");
}

TEST(Mesh, ARefusalNamesTheOptionsAndThePossibleShardSizes) {
  EXPECT_EQ(refusal({8, 0, 3, false}),
            "shard.group_size = 3 (--shard-size) does not divide the 8 ranks; possible shard "
            "sizes: 1, 2, 4, 8");
  EXPECT_EQ(refusal({12, 4, 6, false}),
            "shard.group_size = 6 (--shard-size) is neither a part of a host nor whole hosts, of 4 "
            "ranks each (comm.ranks_per_host, --ranks-per-host); possible shard sizes: 1, 2, 4, "
            "12");
  EXPECT_EQ(refusal({8, 2, 2, true}),
            "shard.hierarchical_gather = true (--hierarchical) needs shard groups over several "
            "hosts, and shard.group_size = 2 (--shard-size) lies inside one of 2 ranks "
            "(comm.ranks_per_host, --ranks-per-host); possible shard sizes: 4, 8");
  EXPECT_EQ(refusal({8, 0, 4, true}),
            "shard.hierarchical_gather = true (--hierarchical) needs several hosts, and all 8 "
            "ranks are on one; switch it off, or set comm.ranks_per_host (--ranks-per-host)");
  EXPECT_EQ(refusal({8, 3, 4, false}),
            "comm.ranks_per_host = 3 (--ranks-per-host) does not divide the 8 ranks; every host "
            "needs as many as the others");
  EXPECT_EQ(refusal({8, 2, -1, false}),
            "shard.group_size = -1 (--shard-size) does not divide the 8 ranks; possible shard "
            "sizes: 1, 2, 4, 8");
  EXPECT_EQ(refusal({8, 2, 9, true}),
            "shard.group_size = 9 (--shard-size) does not divide the 8 ranks; possible shard "
            "sizes: 4, 8");
  EXPECT_EQ(refusal({0, 0, 0, false}), "a mesh of 0 ranks; it needs at least one");
}

TEST(Mesh, PossibleShardSizesAreThoseThatArePlanned) {
  for_each_option(24, [](MeshOptions options) {
    if (options.shard_size != 0 ||
        (options.ranks_per_host != 0 && options.num_ranks % options.ranks_per_host != 0)) {
      return;
    }
    std::vector<int> possible;
    for (options.shard_size = 1; options.shard_size <= options.num_ranks; ++options.shard_size) {
      if (is_possible(options)) {
        possible.push_back(options.shard_size);
      }
    }
    EXPECT_EQ(possible_shard_sizes(options), possible);
  });
}

TEST(Mesh, FollowsTheOptions) {
  Config config;
  EXPECT_EQ(plan_mesh(MeshOptions::from(config, 8, 8)), plan_mesh({8, 0, 0, false}));
  EXPECT_EQ(plan_mesh(MeshOptions::from(config, 8, 4)), plan_mesh({8, 4, 8, false}));
  EXPECT_TRUE(plan_mesh(MeshOptions::from(config, 8, 0)).has_uneven_hosts());
  for (const char* setting :
       {"quant.gradients=true", "shard.group_size=4", "shard.hierarchical_gather=true"}) {
    config.apply_flag(setting);
  }
  EXPECT_EQ(plan_mesh(MeshOptions::from(config, 8, 2)), plan_mesh({8, 2, 4, true}));
  EXPECT_TRUE(plan_mesh(MeshOptions::from(config, 8, 2)).two_hops());
}

// --- hosts that are no equal blocks of ranks ---

MeshOptions on_uneven_hosts(int num_ranks, int shard_size = 0, bool hierarchical = false) {
  MeshOptions options{num_ranks, 0, shard_size, hierarchical};
  options.two_hop_reductions = true;
  options.uneven_hosts = true;
  return options;
}

std::string secondary_refusal(int size, const Mesh& mesh) {
  Config config;
  config.set("shard.secondary_group_size", std::int64_t{size});
  try {
    EXPECT_EQ(secondary_size(config, mesh), size);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

TEST(MeshOnUnevenHosts, IsWhatIsFoundOfRanksThatAreSpreadOtherwise) {
  const auto found = [](const std::vector<std::uint64_t>& hosts) { return ranks_per_host(hosts); };
  EXPECT_EQ(found({7, 7, 3, 3}), 2);
  EXPECT_EQ(found({7, 3}), 1);
  EXPECT_EQ(found({7, 7, 7}), 3);
  EXPECT_EQ(found({7, 7, 3}), 0) << "other numbers";
  EXPECT_EQ(found({7, 3, 7, 3}), 0) << "in turn";
  EXPECT_EQ(found({7, 7, 3, 3, 7, 7}), 0) << "one host twice";
}

TEST(MeshOnUnevenHosts, IsSaidAndTakesNoTwoSteps) {
  const Mesh mesh = plan_mesh(on_uneven_hosts(3));
  EXPECT_EQ(mesh.describe(),
            "mesh: 3 ranks = 1 copy x 3 shards, on hosts that are not equal blocks of ranks");
  EXPECT_FALSE(mesh.two_hops());
  EXPECT_FALSE(mesh.numbers_by_local_rank());
  EXPECT_FALSE(mesh == plan_mesh({3, 0, 0, false}));
  EXPECT_EQ(plan_mesh(on_uneven_hosts(4, 1)).num_replicas(), 4) << "a group of one is on a host";
  EXPECT_EQ(plan_mesh(on_uneven_hosts(4, 4)).num_replicas(), 1);
  EXPECT_EQ(possible_shard_sizes(on_uneven_hosts(12)), (std::vector{1, 12}));
}

TEST(MeshOnUnevenHosts, RefusesWhatNeedsHostsWithThePlacementsThatArePossible) {
  EXPECT_EQ(refusal(on_uneven_hosts(4, 2)),
            "shard.group_size = 2 (--shard-size) needs as many ranks on every host, and ranks of a "
            "host that follow each other; these 4 ranks are spread otherwise. Start them host by "
            "host, possible are 1, 2, 4 on each; or take one of all ranks, or of 1");
  EXPECT_EQ(refusal(on_uneven_hosts(6, 0, true)),
            "shard.hierarchical_gather = true (--hierarchical) needs as many ranks on every host, "
            "and ranks of a host that follow each other; these 6 ranks are spread otherwise. Start "
            "them host by host, possible are 1, 2, 3 on each; or switch it off");
  const Mesh mesh = plan_mesh(on_uneven_hosts(4));
  EXPECT_EQ(secondary_refusal(2, mesh),
            "shard.secondary_group_size = 2 (--hpz-size, zero_hpz_partition_size) needs as many "
            "ranks on every host, and ranks of a host that follow each other; these 4 ranks are "
            "spread otherwise. Start them host by host, possible are 2, 4 on each; or leave it "
            "out");
  EXPECT_EQ(secondary_refusal(2, plan_mesh(on_uneven_hosts(3))),
            "shard.secondary_group_size = 2 (--hpz-size, zero_hpz_partition_size) needs as many "
            "ranks on every host, and ranks of a host that follow each other; these 3 ranks are "
            "spread otherwise. No placement of 3 ranks is possible with it; or leave it out");
}

// --- secondary shards ---

// Consecutive ranks from a multiple of the size are of one host and one shard group.
TEST(SecondarySizes, AreThoseWhoseGroupsStayInsideAHostAndAShardGroup) {
  for_each_mesh(16, [](const Mesh& mesh) {
    std::vector<int> possible;
    for (int size = 2; size <= mesh.num_ranks(); ++size) {
      bool stays = mesh.num_ranks() % size == 0;
      for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
        const int first = rank / size * size;
        stays = stays && mesh.host_of(rank) == mesh.host_of(first) &&
                mesh.replica_of(rank) == mesh.replica_of(first);
      }
      if (stays) {
        possible.push_back(size);
      }
      EXPECT_EQ(secondary_refusal(size, mesh) == "none", stays);
    }
    EXPECT_EQ(possible_secondary_sizes(mesh), possible);
  });
}

TEST(SecondarySizes, ThatAreRefusedComeWithThoseThatArePossible) {
  EXPECT_EQ(secondary_refusal(3, plan_mesh({8, 4, 0, false})),
            "shard.secondary_group_size = 3 (--hpz-size, zero_hpz_partition_size): secondary "
            "shards stay inside a host, and do not divide its 4 ranks; possible are 2, 4");
  EXPECT_EQ(secondary_refusal(4, plan_mesh({16, 4, 2, false})),
            "shard.secondary_group_size = 4 (--hpz-size, zero_hpz_partition_size): secondary "
            "shards stay inside a host, and do not divide the 2 ranks that a shard group of 2 "
            "(shard.group_size) has there; possible are 2");
  EXPECT_EQ(secondary_refusal(2, plan_mesh({2, 1, 0, false})),
            "shard.secondary_group_size = 2 (--hpz-size, zero_hpz_partition_size): secondary "
            "shards stay inside a host, and do not divide its 1 rank; leave it out");
}

TEST(Mesh, AMillionRanksArePlannedAtOnce) {
  constexpr int kMillion = 1 << 20;
  const Mesh mesh = plan_mesh({kMillion, 8, 64, true});
  EXPECT_EQ(mesh.num_replicas(), kMillion / 64);
  EXPECT_EQ(mesh.hosts_per_group(), 8);
  EXPECT_EQ(mesh.shard_index(kMillion - 1), 63);
  EXPECT_EQ(possible_shard_sizes({kMillion, 8, 0, false}).size(), 21U);
}

// --- bytes ---

// Messages one by one, of the collectives as docs/communication.md has them.
class Messages {
 public:
  explicit Messages(const Mesh& mesh)
      : mesh_(mesh), sent_(static_cast<std::size_t>(mesh.num_ranks())) {}

  void send(int from, int to, std::int64_t bytes) {
    SentBytes& sent = sent_[static_cast<std::size_t>(from)];
    (mesh_.host_of(from) == mesh_.host_of(to) ? sent.inside : sent.across) += bytes;
  }
  // Every rank sends to every other one of its list.
  template <typename Ranks>
  void all_to_each(const Ranks& ranks_of, std::int64_t bytes) {
    for (int rank = 0; rank < mesh_.num_ranks(); ++rank) {
      for (const int other : ranks_of(rank)) {
        if (other != rank) {
          send(rank, other, bytes);
        }
      }
    }
  }
  // The same of all ranks, or the test fails.
  SentBytes of_each() const {
    for (const SentBytes& sent : sent_) {
      EXPECT_EQ(sent, sent_.front());
    }
    return sent_.front();
  }
  std::int64_t of_host_across() const {
    std::int64_t sum = 0;
    for (int rank = 0; rank < mesh_.ranks_per_host(); ++rank) {
      sum += sent_[static_cast<std::size_t>(rank)].across;
    }
    return sum;
  }

 private:
  const Mesh& mesh_;
  std::vector<SentBytes> sent_;
};

struct Simulated {
  SentBytes gathers;
  SentBytes reduce_scatters;
  SentBytes replica_sums;
  std::int64_t host_across = 0;
};

Simulated simulate(const Mesh& mesh, const StepVolume& volume) {
  const auto shard_ranks = [&](int rank) { return mesh.shard_ranks(rank); };
  const auto replica_ranks = [&](int rank) { return mesh.replica_ranks(rank); };
  Messages gathers(mesh);
  const std::int64_t shard_bytes = volume.gathered_bytes / mesh.shard_size();
  if (mesh.hierarchical()) {
    gathers.all_to_each([&](int rank) { return mesh.across_ranks(rank); }, shard_bytes);
    gathers.all_to_each([&](int rank) { return mesh.inside_ranks(rank); },
                        shard_bytes * mesh.hosts_per_group());
  } else {
    gathers.all_to_each(shard_ranks, shard_bytes);
  }
  Messages scatters(mesh);
  Messages sums(mesh);
  for (const std::int64_t numel : volume.bucket_numel) {
    const std::int64_t shard_numel = numel / mesh.shard_size();
    for (std::int64_t micro = 0; micro < volume.num_micro_batches; ++micro) {
      if (volume.hop_inside != nullptr) {
        scatters.all_to_each([&](int rank) { return mesh.inside_ranks(rank); },
                             volume.hop_inside(shard_numel * mesh.hosts_per_group()));
        scatters.all_to_each([&](int rank) { return mesh.across_ranks(rank); },
                             volume.hop_across(shard_numel));
        continue;
      }
      scatters.all_to_each(shard_ranks, shard_numel * volume.wire_element_bytes);
    }
    const std::int64_t element = volume.num_micro_batches == 1 ? volume.wire_element_bytes : 4;
    if (shard_numel * element * mesh.num_replicas() <= 65536) {
      sums.all_to_each(replica_ranks, shard_numel * element);
    } else {
      const std::int64_t piece =
          (shard_numel + mesh.num_replicas() - 1) / mesh.num_replicas() * element;
      sums.all_to_each(replica_ranks, piece);  // its reduce-scatter
      sums.all_to_each(replica_ranks, piece);  // its all-gather
    }
  }
  return {gathers.of_each(), scatters.of_each(), sums.of_each(),
          gathers.of_host_across() + scatters.of_host_across() + sums.of_host_across()};
}

TEST(MeshBytes, EqualTheSumOfAllMessages) {
  for_each_mesh(16, [](const Mesh& mesh) {
    // Below and above the size from which an all-reduce has two steps.
    const std::vector<std::int64_t> buckets = {mesh.shard_size() * std::int64_t{10},
                                               mesh.shard_size() * std::int64_t{50021}};
    for (const std::int64_t num_micro : {1, 3}) {
      for (const std::int64_t element : {2, 4}) {
        StepVolume volume{mesh.shard_size() * std::int64_t{7 * 1024}, buckets, num_micro, element};
        if (element == 4 && num_micro == 3) {
          volume.hop_inside = [](std::int64_t numel) { return numel / 2 + 48; };
          volume.hop_across = [](std::int64_t numel) { return numel + 16; };
        }
        const Simulated simulated = simulate(mesh, volume);
        const MeshBytes bytes = step_bytes(mesh, volume);
        EXPECT_EQ(bytes.gathers, simulated.gathers);
        EXPECT_EQ(bytes.reduce_scatters, simulated.reduce_scatters);
        EXPECT_EQ(bytes.replica_sums, simulated.replica_sums);
        EXPECT_EQ(bytes.host_across(mesh), simulated.host_across);
        EXPECT_EQ(bytes.rank().sum(), simulated.gathers.sum() + simulated.reduce_scatters.sum() +
                                          simulated.replica_sums.sum());
      }
    }
  });
}

TEST(MeshBytes, HierarchicalGathersCrossHostsOncePerHost) {
  const std::int64_t full = 8 * 1000;
  EXPECT_EQ(gather_bytes(plan_mesh({8, 4, 8, false}), full), (SentBytes{3000, 4000}));
  EXPECT_EQ(gather_bytes(plan_mesh({8, 4, 8, true}), full), (SentBytes{6000, 1000}));
}

TEST(MeshBytes, SecondaryShardsAreGatheredInsideAHost) {
  StepVolume volume;
  volume.secondary_bytes = 8 * 1000;
  volume.secondary_size = 4;
  EXPECT_EQ(step_bytes(plan_mesh({8, 4, 8, false}), volume).rank(), (SentBytes{6000, 0}));
}

// Every rank gets the elements of all shards with its local rank from the ranks of its host, and
// sends all but its own shard's on.
TEST(MeshBytes, TwoHopsCrossHostsOncePerElementOfAHost) {
  const auto elements = [](std::int64_t numel) { return numel; };
  const Mesh mesh = plan_mesh({16, 4, 16, false});
  EXPECT_EQ(two_hop_bytes(mesh, 1000, elements, elements), (SentBytes{3 * 4000, 3 * 1000}));
  EXPECT_EQ(reduce_scatter_bytes(mesh, 16 * 1000), (SentBytes{3 * 1000, 12 * 1000}));
}

TEST(MeshBytes, AGroupInsideAHostSendsOnlyReplicaSumsAcross) {
  const std::vector<std::int64_t> buckets = {1 << 20};
  const Mesh mesh = plan_mesh({8, 4, 4, false});
  const MeshBytes bytes = step_bytes(mesh, {1 << 22, buckets, 2, 2});
  EXPECT_EQ(bytes.gathers.across, 0);
  EXPECT_EQ(bytes.reduce_scatters.across, 0);
  EXPECT_EQ(bytes.replica_sums, (SentBytes{0, (1 << 18) * 4}));
}

TEST(MeshBytes, AWorldOfOneSendsNothing) {
  const std::vector<std::int64_t> buckets = {1000};
  EXPECT_EQ(step_bytes(Mesh(), {4000, buckets, 3, 4}).rank(), SentBytes{});
}

}  // namespace
}  // namespace tessera::comm
