#include "tessera/comm/mesh.h"

#include <algorithm>
#include <set>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Ascending.
std::vector<int> divisors(int number) {
  std::vector<int> all;
  for (int small = 1; small <= number / small; ++small) {
    if (number % small == 0) {
      all.push_back(small);
      if (small != number / small) {
        all.push_back(number / small);
      }
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

// REQUIRES: shard_size divides the ranks.
bool fits_hosts(int shard_size, int ranks_per_host, bool hierarchical) {
  if (hierarchical) {
    return shard_size > ranks_per_host && shard_size % ranks_per_host == 0;
  }
  return shard_size % ranks_per_host == 0 || ranks_per_host % shard_size == 0;
}

bool fits(int shard_size, const MeshOptions& options) {
  if (options.uneven_hosts) {
    return !options.hierarchical && (shard_size == 1 || shard_size == options.num_ranks);
  }
  return fits_hosts(shard_size,
                    options.ranks_per_host == 0 ? options.num_ranks : options.ranks_per_host,
                    options.hierarchical);
}

std::string counted(int number, const char* one, const char* many) {
  return detail::concat(number, " ", number == 1 ? one : many);
}

std::string list_text(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  }
  return text;
}

std::string sizes_text(const MeshOptions& options) {
  const std::string sizes = list_text(possible_shard_sizes(options));
  return sizes.empty() ? "no shard size is possible" : "possible shard sizes: " + sizes;
}

// What to do with ranks on uneven hosts, where `is_possible` says whether so many ranks on each
// host would do.
template <typename IsPossible>
std::string placement_text(int num_ranks, const IsPossible& is_possible) {
  std::vector<int> possible = divisors(num_ranks);
  std::erase_if(possible, [&](int per_host) { return !is_possible(per_host); });
  return detail::concat(
      " needs as many ranks on every host, and ranks of a host that follow each other; these ",
      num_ranks, " ranks are spread otherwise. ",
      possible.empty() ? detail::concat("No placement of ", num_ranks, " ranks is possible with it")
                       : detail::concat("Start them host by host, possible are ",
                                        list_text(possible), " on each"));
}

std::vector<int> consecutive(int begin, int count, int step) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  for (int& rank : ranks) {
    rank = begin;
    begin += step;
  }
  return ranks;
}

}  // namespace

MeshOptions MeshOptions::from(const Config& config, int num_ranks, int ranks_per_host) {
  MeshOptions options;
  options.num_ranks = num_ranks;
  options.ranks_per_host = ranks_per_host;
  options.uneven_hosts = ranks_per_host == 0;
  options.shard_size = static_cast<int>(config.get_int("shard.group_size"));
  options.hierarchical = config.get_bool("shard.hierarchical_gather");
  options.two_hop_reductions = config.get_bool("quant.gradients");
  return options;
}

bool Mesh::operator==(const Mesh& other) const {
  return num_ranks_ == other.num_ranks_ && ranks_per_host_ == other.ranks_per_host_ &&
         shard_size_ == other.shard_size_ && hierarchical_ == other.hierarchical_ &&
         uneven_hosts_ == other.uneven_hosts_;
}

int Mesh::shard_index(int rank) const {
  const int place = place_of(rank);
  return numbers_by_local_rank() ? place % inside_size() * hosts_per_group() + place / inside_size()
                                 : place;
}

std::vector<int> Mesh::shard_ranks(int rank) const {
  return consecutive(rank - place_of(rank), shard_size_, 1);
}

std::vector<int> Mesh::replica_ranks(int rank) const {
  return consecutive(place_of(rank), num_replicas(), shard_size_);
}

std::vector<int> Mesh::across_ranks(int rank) const {
  const int first = rank - place_of(rank) + place_of(rank) % inside_size();
  return consecutive(first, hosts_per_group(), inside_size());
}

std::vector<int> Mesh::inside_ranks(int rank) const {
  return consecutive(rank - place_of(rank) % inside_size(), inside_size(), 1);
}

std::vector<int> Mesh::shard_of_group_rank() const {
  std::vector<int> shards(static_cast<std::size_t>(shard_size_));
  for (int place = 0; place < shard_size_; ++place) {
    shards[static_cast<std::size_t>(place)] = shard_index(place);
  }
  return shards;
}

std::string Mesh::describe() const {
  std::string text = detail::concat(
      "mesh: ", counted(num_ranks_, "rank", "ranks"), " = ",
      counted(num_replicas(), "copy", "copies"), " x ", counted(shard_size_, "shard", "shards"),
      uneven_hosts_      ? std::string(", on hosts that are not equal blocks of ranks")
      : num_hosts() == 1 ? std::string(", on one host")
                         : detail::concat(", on ", num_hosts(), " hosts of ", ranks_per_host_));
  if (hierarchical_) {
    text += detail::concat("; gathers across ", hosts_per_group(), " hosts first");
  }
  if (two_hops_) {
    text += "; gradients summed inside hosts first";
  }
  return text;
}

std::vector<int> possible_shard_sizes(const MeshOptions& options) {
  std::vector<int> sizes = divisors(options.num_ranks);
  std::erase_if(sizes, [&](int size) { return !fits(size, options); });
  return sizes;
}

Mesh plan_mesh(const MeshOptions& options) {
  TESSERA_CHECK(options.num_ranks >= 1, ConfigError, "a mesh of ", options.num_ranks,
                " ranks; it needs at least one");
  const bool one_host = options.uneven_hosts || options.ranks_per_host == 0;
  TESSERA_CHECK(
      options.ranks_per_host >= 0 && (one_host || options.num_ranks % options.ranks_per_host == 0),
      ConfigError, "comm.ranks_per_host = ", options.ranks_per_host,
      " (--ranks-per-host) does not divide the ", options.num_ranks,
      " ranks; every host needs as many as the others");
  const int size = options.shard_size == 0 ? options.num_ranks : options.shard_size;
  const int ranks_per_host = one_host ? options.num_ranks : options.ranks_per_host;
  const auto shard_size_text = [&] {
    return detail::concat("shard.group_size = ", options.shard_size, " (--shard-size)",
                          options.shard_size == 0 ? ", all ranks," : "");
  };
  TESSERA_CHECK(size >= 1 && options.num_ranks % size == 0, ConfigError, shard_size_text(),
                " does not divide the ", options.num_ranks, " ranks; ", sizes_text(options));
  TESSERA_CHECK(
      !options.uneven_hosts || fits(size, options), ConfigError,
      options.hierarchical ? "shard.hierarchical_gather = true (--hierarchical)"
                           : shard_size_text(),
      placement_text(options.num_ranks,
                     [&](int each) { return fits_hosts(size, each, options.hierarchical); }),
      options.hierarchical ? "; or switch it off" : "; or take one of all ranks, or of 1");
  TESSERA_CHECK(!options.hierarchical || ranks_per_host != options.num_ranks, ConfigError,
                "shard.hierarchical_gather = true (--hierarchical) needs several hosts, and all ",
                options.num_ranks,
                " ranks are on one; switch it off, or set comm.ranks_per_host (--ranks-per-host)");
  TESSERA_CHECK(fits_hosts(size, ranks_per_host, false), ConfigError, shard_size_text(),
                " is neither a part of a host nor whole hosts, of ", ranks_per_host,
                " ranks each (comm.ranks_per_host, --ranks-per-host); ", sizes_text(options));
  TESSERA_CHECK(!options.hierarchical || fits_hosts(size, ranks_per_host, true), ConfigError,
                "shard.hierarchical_gather = true (--hierarchical) needs shard groups over several "
                "hosts, and ",
                shard_size_text(), " lies inside one of ", ranks_per_host,
                " ranks (comm.ranks_per_host, --ranks-per-host); ", sizes_text(options));
  Mesh mesh;
  mesh.num_ranks_ = options.num_ranks;
  mesh.ranks_per_host_ = ranks_per_host;
  mesh.shard_size_ = size;
  mesh.hierarchical_ = options.hierarchical;
  mesh.two_hops_ =
      options.two_hop_reductions && mesh.hosts_per_group() > 1 && mesh.inside_size() > 1;
  mesh.uneven_hosts_ = options.uneven_hosts;
  return mesh;
}

std::vector<int> possible_secondary_sizes(const Mesh& mesh) {
  std::vector<int> sizes =
      mesh.has_uneven_hosts() ? std::vector<int>() : divisors(mesh.inside_size());
  std::erase(sizes, 1);
  return sizes;
}

int secondary_size(const Config& config, const Mesh& mesh) {
  const auto second = static_cast<int>(config.get_int("shard.secondary_group_size"));
  if (second <= 1) {
    return 1;
  }
  const std::string given = detail::concat("shard.secondary_group_size = ", second,
                                           " (--hpz-size, zero_hpz_partition_size)");
  TESSERA_CHECK(!mesh.has_uneven_hosts(), ConfigError, given,
                placement_text(mesh.num_ranks(),
                               [&](int each) {
                                 const int size = mesh.shard_size();
                                 return fits_hosts(size, each, false) &&
                                        std::min(size, each) % second == 0;
                               }),
                "; or leave it out");
  const std::vector<int> possible = possible_secondary_sizes(mesh);
  const int inside = mesh.inside_size();
  TESSERA_CHECK(
      std::binary_search(possible.begin(), possible.end(), second), ConfigError, given,
      ": secondary shards stay inside a host, and do not divide ",
      mesh.num_replicas() == 1
          ? detail::concat("its ", counted(inside, "rank", "ranks"))
          : detail::concat("the ", counted(inside, "rank", "ranks"), " that a shard group of ",
                           mesh.shard_size(), " (shard.group_size) has there"),
      possible.empty() ? "; leave it out" : "; possible are " + list_text(possible));
  return second;
}

int ranks_per_host(std::span<const std::uint64_t> hosts) {
  const auto end =
      std::find_if(hosts.begin(), hosts.end(), [&](auto host) { return host != hosts.front(); });
  const auto size = static_cast<std::size_t>(end - hosts.begin());
  if (size == 0 || hosts.size() % size != 0) {
    return 0;
  }
  std::set<std::uint64_t> seen;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const bool is_first = i % size == 0;
    if (is_first ? !seen.insert(hosts[i]).second : hosts[i] != hosts[i - 1]) {
      return 0;
    }
  }
  return static_cast<int>(size);
}

}  // namespace tessera::comm
