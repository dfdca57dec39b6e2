#include "tessera/comm/mesh.h"

#include <algorithm>
#include <set>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

bool has_one_host(int num_ranks, int ranks_per_host) {
  return ranks_per_host == 0 || ranks_per_host == num_ranks;
}

// REQUIRES: shard_size divides the ranks.
bool fits_hosts(int shard_size, int ranks_per_host, bool hierarchical) {
  if (hierarchical) {
    return shard_size > ranks_per_host && shard_size % ranks_per_host == 0;
  }
  return shard_size % ranks_per_host == 0 || ranks_per_host % shard_size == 0;
}

std::string counted(int number, const char* one, const char* many) {
  return detail::concat(number, " ", number == 1 ? one : many);
}

std::string sizes_text(const MeshOptions& options) {
  const std::vector<int> sizes = possible_shard_sizes(options);
  std::string text;
  for (const int size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return text.empty() ? "no shard size is possible" : "possible shard sizes: " + text;
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

MeshOptions MeshOptions::from(const Config& config, int num_ranks, int found_ranks_per_host) {
  MeshOptions options;
  options.num_ranks = num_ranks;
  options.ranks_per_host = static_cast<int>(config.get_int("comm.ranks_per_host"));
  if (options.ranks_per_host == 0) {
    options.ranks_per_host = found_ranks_per_host;
  }
  options.shard_size = static_cast<int>(config.get_int("shard.group_size"));
  options.hierarchical = config.get_bool("shard.hierarchical_gather");
  options.quantises_gradients = config.get_bool("quant.gradients");
  return options;
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
      num_hosts() == 1 ? std::string(", on one host")
                       : detail::concat(", on ", num_hosts(), " hosts of ", ranks_per_host_));
  if (hierarchical_) {
    text += detail::concat("; gathers across ", hosts_per_group(), " hosts first");
  }
  if (two_hops()) {
    text += "; gradients summed inside hosts first";
  }
  return text;
}

std::vector<int> possible_shard_sizes(const MeshOptions& options) {
  const int ranks_per_host =
      options.ranks_per_host == 0 ? options.num_ranks : options.ranks_per_host;
  std::vector<int> sizes;
  const auto add = [&](int size) {
    if (fits_hosts(size, ranks_per_host, options.hierarchical)) {
      sizes.push_back(size);
    }
  };
  for (int size = 1; size <= options.num_ranks / size; ++size) {
    if (options.num_ranks % size == 0) {
      add(size);
      if (size != options.num_ranks / size) {
        add(options.num_ranks / size);
      }
    }
  }
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

Mesh plan_mesh(const MeshOptions& options) {
  TESSERA_CHECK(options.num_ranks >= 1, ConfigError, "a mesh of ", options.num_ranks,
                " ranks; it needs at least one");
  TESSERA_CHECK(options.ranks_per_host >= 0 && (options.ranks_per_host == 0 ||
                                                options.num_ranks % options.ranks_per_host == 0),
                ConfigError, "comm.ranks_per_host = ", options.ranks_per_host,
                " (--ranks-per-host) does not divide the ", options.num_ranks,
                " ranks; every host needs as many as the others");
  const int size = options.shard_size == 0 ? options.num_ranks : options.shard_size;
  const int ranks_per_host =
      options.ranks_per_host == 0 ? options.num_ranks : options.ranks_per_host;
  const auto shard_size_text = [&] {
    return detail::concat("shard.group_size = ", options.shard_size, " (--shard-size)",
                          options.shard_size == 0 ? ", all ranks," : "");
  };
  TESSERA_CHECK(size >= 1 && options.num_ranks % size == 0, ConfigError, shard_size_text(),
                " does not divide the ", options.num_ranks, " ranks; ", sizes_text(options));
  TESSERA_CHECK(!options.hierarchical || !has_one_host(options.num_ranks, options.ranks_per_host),
                ConfigError,
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
  mesh.quantises_gradients_ = options.quantises_gradients;
  return mesh;
}

int secondary_size(const Config& config, const Mesh& mesh) {
  const auto second = static_cast<int>(config.get_int("shard.secondary_group_size"));
  if (second <= 1) {
    return 1;
  }
  std::string possible;
  for (int size = 2; size <= mesh.ranks_per_host(); ++size) {
    possible += mesh.ranks_per_host() % size == 0
                    ? (possible.empty() ? "" : ", ") + std::to_string(size)
                    : std::string();
  }
  TESSERA_CHECK(
      mesh.ranks_per_host() % second == 0, ConfigError, "shard.secondary_group_size = ", second,
      " (--hpz-size, zero_hpz_partition_size): secondary shards stay inside a host, and do "
      "not divide its ",
      mesh.ranks_per_host(), mesh.ranks_per_host() == 1 ? " rank" : " ranks",
      possible.empty() ? "; leave it out" : "; possible are " + possible);
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
