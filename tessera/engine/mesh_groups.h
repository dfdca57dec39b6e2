// Internal to engine: the groups of an engine's ranks, split off the data-parallel group that the
// engine was given: the runtime's, or a BuildScope's. Ranks of other axes (tensor, sequence) belong
// to other groups and take no part.
//
//   all              every rank that trains the model: agreement, norm, saves
//   gathers          the ranks that hold one copy together, by shard: gathers
//   reductions       the same ranks, by rank. The moment at which a bucket is full differs between
//                    ranks, so reductions have no common order with gathers and need a group of
//                    their own
//   agreed_reductions  the same ranks, by rank, in a common order with gathers: reductions on which
//                      ranks have agreed
//   replicas         the ranks that hold the same shard in all copies, by copy: one sum per step
//   phases           groups of gathers in two phases
//   secondary        ranks of a host that shard gathered parameters once more (hpZ)
//   hops             groups of reductions in two hops, each in a common order with `reductions`,
//                    where ranks announce a bucket; `agreed_hops`: the same for `agreed_reductions`
//
// With one copy and gathers in one phase, `gathers` is `all`, and there are no replicas: MiCS with
// one group of all ranks is plain ZeRO-3.
//
// Order of collectives: construction, in the caller's order; groups are split in the order above.
//
// Threads: as Engine.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/coordinator/gather_phases.h"
#include "tessera/engine/runtime.h"
#include "tessera/grad/reducer.h"

namespace tessera::engine {

// By rank of a data-parallel group: a name of its host (Runtime::hosts()). Collective unless the
// group is the runtime's.
std::vector<std::uint64_t> find_hosts(const Runtime& runtime, comm::Group& all);

// The mesh that the options make of a data-parallel group. Collective as find_hosts(). Throws
// ConfigError that lists what is possible, on all ranks alike.
comm::Mesh find_mesh(const Runtime& runtime, comm::Group& all);

// Payload bytes that this rank has sent for an engine.
struct SentBytes {
  std::uint64_t inside = 0;  // to ranks of its host
  std::uint64_t across = 0;  // to ranks of other hosts
};

class MeshGroups {
 public:
  // Collective.
  MeshGroups(Runtime& runtime, comm::Group& all);
  MeshGroups(const MeshGroups&) = delete;
  MeshGroups& operator=(const MeshGroups&) = delete;

  const comm::Mesh& mesh() const { return mesh_; }
  comm::Group& all() const { return all_; }
  comm::Group& gathers() const { return gathers_ ? *gathers_ : all_; }
  comm::Group& reductions() const { return reductions_ ? *reductions_ : all_reductions(); }
  comm::Group& agreed_reductions() const {
    return agreed_reductions_ ? *agreed_reductions_ : gathers();
  }
  comm::Group* replicas() const { return replicas_.get(); }
  // All ranks, in a common order with reductions.
  comm::Group& all_reductions() const {
    return own_reductions_ ? *own_reductions_ : runtime_.reduce_group();
  }
  coordinator::GatherPhases phases() const { return {across_.get(), inside_.get()}; }
  grad::ReductionHops hops() const { return {hop_inside_.get(), hop_across_.get()}; }
  grad::ReductionHops agreed_hops() const {
    return {agreed_hop_inside_.get(), agreed_hop_across_.get()};
  }
  comm::Group* secondary() const { return secondary_.get(); }

  // This rank's.
  int shard_index() const { return gathers().rank(); }
  int replica() const { return mesh_.replica_of(all_.rank()); }
  // By rank of `gathers`: its rank in `all`.
  std::vector<int> ranks_of_copy() const;
  // By the hosts that were found, also where they are uneven. What other engines of the runtime
  // send over groups that they share with this one is counted, too: agreement and norm, and of
  // plain ZeRO-3 gathers and reductions.
  SentBytes sent() const;
  // Before anything becomes a parameter: blocks until all ranks mean the same calls on each of
  // these groups, as far as they were started; throws what went wrong (Group::wait_agreed()). Waits
  // for no device: of groups whose calls are no work of streams nothing moves before ranks agree.
  void wait_agreed() const;

 private:
  struct Counted {  // for a group of this engine
    const comm::Group* group = nullptr;
    int num_inside = 0;  // peers
    int num_across = 0;
    std::uint64_t before = 0;  // bytes it had sent when the engine was made
  };
  void count(const comm::Group* group, const std::vector<int>& ranks);

  Runtime& runtime_;
  comm::Group& all_;
  const std::vector<std::uint64_t> hosts_;  // by rank of all_
  const comm::Mesh mesh_;
  std::unique_ptr<comm::Group> own_reductions_;  // all ranks; null: `all` is the runtime's
  std::unique_ptr<comm::Group> gathers_;
  std::unique_ptr<comm::Group> reductions_;
  std::unique_ptr<comm::Group> agreed_reductions_;
  std::unique_ptr<comm::Group> replicas_;
  std::unique_ptr<comm::Group> across_;
  std::unique_ptr<comm::Group> inside_;
  std::unique_ptr<comm::Group> secondary_;
  std::unique_ptr<comm::Group> hop_inside_;
  std::unique_ptr<comm::Group> hop_across_;
  std::unique_ptr<comm::Group> agreed_hop_inside_;
  std::unique_ptr<comm::Group> agreed_hop_across_;
  std::vector<Counted> counted_;
};

}  // namespace tessera::engine
