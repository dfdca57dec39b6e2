#include "tessera/engine/mesh_groups.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "tessera/engine/gather_host.h"

namespace tessera::engine {
namespace {

comm::Mesh mesh_of(const Config& config, const std::vector<std::uint64_t>& hosts) {
  const comm::Mesh mesh = comm::plan_mesh(
      comm::MeshOptions::from(config, static_cast<int>(hosts.size()), comm::ranks_per_host(hosts)));
  std::ignore = comm::secondary_size(config, mesh);
  return mesh;
}

}  // namespace

std::vector<std::uint64_t> find_hosts(const Runtime& runtime, comm::Group& all) {
  if (&all == &runtime.group()) {
    return runtime.hosts();
  }
  return gather_host(all, runtime.hosts()[static_cast<std::size_t>(runtime.rank())],
                     "which ranks share a host");
}

comm::Mesh find_mesh(const Runtime& runtime, comm::Group& all) {
  return mesh_of(runtime.config(), find_hosts(runtime, all));
}

MeshGroups::MeshGroups(Runtime& runtime, comm::Group& all)
    : runtime_(runtime),
      all_(all),
      hosts_(find_hosts(runtime, all)),
      mesh_(mesh_of(runtime.config(), hosts_)) {
  const int rank = all.rank();
  const comm::GroupOwner owner = all.owner();
  const auto split = [&](const std::vector<int>& ranks, std::int64_t key, const char* name) {
    return all_.split_by({ranks.front(), key}, all_.name() + name, owner);
  };
  if (&all != &runtime.group()) {
    own_reductions_ = all.split(0, all.name() + ".reduce");
  }
  const std::vector<int> copy = mesh_.shard_ranks(rank);
  const bool has_copies = mesh_.num_replicas() > 1;
  if (has_copies || mesh_.numbers_by_local_rank()) {
    gathers_ = split(copy, mesh_.shard_index(rank), ".shards");
  }
  if (has_copies) {
    reductions_ = split(copy, rank, ".shards.reduce");
  }
  if (mesh_.numbers_by_local_rank()) {
    agreed_reductions_ = split(copy, rank, ".shards.agreed");
  }
  if (has_copies) {
    replicas_ = split(mesh_.replica_ranks(rank), rank, ".replicas");
  }
  if (mesh_.hierarchical()) {
    across_ = split(mesh_.across_ranks(rank), rank, ".across");
    inside_ = split(mesh_.inside_ranks(rank), rank, ".inside");
  }
  const int second = comm::secondary_size(runtime.config(), mesh_);
  std::vector<int> neighbours;
  for (int i = 0; second > 1 && i < second; ++i) {
    neighbours.push_back(rank / second * second + i);
  }
  if (second > 1) {
    secondary_ = split(neighbours, rank, ".secondary");
    count(secondary_.get(), neighbours);
  }
  if (mesh_.two_hops()) {
    const std::vector<int> inside = mesh_.inside_ranks(rank);
    const std::vector<int> across = mesh_.across_ranks(rank);
    hop_inside_ = split(inside, rank, ".reduce.inside");
    hop_across_ = split(across, rank, ".reduce.across");
    agreed_hop_inside_ = split(inside, rank, ".agreed.inside");
    agreed_hop_across_ = split(across, rank, ".agreed.across");
    for (const auto* const group : {&hop_inside_, &agreed_hop_inside_}) {
      count(group->get(), inside);
    }
    for (const auto* const group : {&hop_across_, &agreed_hop_across_}) {
      count(group->get(), across);
    }
  }
  std::vector<int> everyone(static_cast<std::size_t>(all.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  count(&all_, everyone);
  count(&all_reductions(), everyone);
  for (const auto* const group : {&gathers_, &reductions_, &agreed_reductions_}) {
    count(group->get(), copy);
  }
  count(replicas_.get(), mesh_.replica_ranks(rank));
  count(across_.get(), mesh_.across_ranks(rank));
  count(inside_.get(), mesh_.inside_ranks(rank));
}

std::vector<int> MeshGroups::ranks_of_copy() const {
  std::vector<int> ranks = mesh_.shard_ranks(all_.rank());
  std::sort(ranks.begin(), ranks.end(), [this](int left, int right) {
    return mesh_.shard_index(left) < mesh_.shard_index(right);
  });
  return ranks;
}

void MeshGroups::count(const comm::Group* group, const std::vector<int>& ranks) {
  if (group == nullptr || ranks.size() == 1 ||
      std::any_of(counted_.begin(), counted_.end(),
                  [group](const Counted& each) { return each.group == group; })) {
    return;
  }
  const auto host_of = [this](int rank) { return hosts_[static_cast<std::size_t>(rank)]; };
  const auto num_on_host = std::count_if(
      ranks.begin(), ranks.end(), [&](int rank) { return host_of(rank) == host_of(all_.rank()); });
  Counted counted;
  counted.group = group;
  counted.num_inside = static_cast<int>(num_on_host) - 1;
  counted.num_across = static_cast<int>(ranks.size()) - 1 - counted.num_inside;
  counted.before = group->wire_bytes().payload;
  counted_.push_back(counted);
}

// Every collective but a broadcast and a gather for some ranks sends as much to each peer.
SentBytes MeshGroups::sent() const {
  SentBytes sent;
  for (const Counted& each : counted_) {
    const std::uint64_t bytes = each.group->wire_bytes().payload - each.before;
    const auto num_peers = static_cast<std::uint64_t>(each.num_inside + each.num_across);
    const std::uint64_t across = bytes * static_cast<std::uint64_t>(each.num_across) / num_peers;
    sent.across += across;
    sent.inside += bytes - across;
  }
  return sent;
}

void MeshGroups::wait_agreed() const {
  for (comm::Group* const group :
       {&all_, &all_reductions(), gathers_.get(), reductions_.get(), agreed_reductions_.get(),
        replicas_.get(), across_.get(), inside_.get(), secondary_.get(), hop_inside_.get(),
        hop_across_.get(), agreed_hop_inside_.get(), agreed_hop_across_.get()}) {
    if (group != nullptr && group->is_stream_ordered()) {
      group->wait_agreed();
    }
  }
}

}  // namespace tessera::engine
