// What each way to cut a world into shard groups takes: memory of a rank, bytes on the links, and
// the time that these bytes need, in closed form.
//
// Memory is that of a rank whose shards, gradients and states are all in its own memory, with what
// its gathers hold, as plan_memory() counts it without a budget; activations are torch's.
//
// Time is that of the bytes alone, one kind of collective behind the other, and nothing beside
// computation: an upper bound that compares meshes. A rank has its own link inside the host, all
// ranks of a host share the one across:
//
//   time of a collective = max(bytes of a rank inside / rate inside,
//                              bytes of a host across / rate across)
//
// but for hierarchical gathers, whose second phase sends what the first has brought: the sum.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/comm/mesh_bytes.h"
#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

struct MeshQuestion {
  // The ranks and their hosts; shard_size and hierarchical do not count.
  comm::MeshOptions world;
  std::int64_t num_micro_batches = 1;
  // By parameter: how often a step gathers it.
  std::vector<std::int64_t> num_gathers;
};

struct MeshChoice {
  comm::Mesh mesh;
  std::int64_t memory_bytes = 0;  // of a rank
  bool fits = true;               // into the budget of the device, if there is one
  comm::MeshBytes bytes;
};

// Bytes per second.
struct LinkRates {
  double inside = 0;  // of a rank, to the others of its host
  double across = 0;  // of a host, to all others
};

// Of one mesh. `options`: its ranks do not count.
MeshChoice mesh_choice(const comm::Mesh& mesh, const ModelShapes& model,
                       const MemoryPlanOptions& options, const MeshQuestion& question);

// All meshes that are possible, smallest shard groups first; a hierarchical one behind the flat one
// of its size, where the two differ.
std::vector<MeshChoice> mesh_choices(const ModelShapes& model, const MemoryPlanOptions& options,
                                     const MeshQuestion& question);

// REQUIRES: rates above 0 for links that carry bytes.
double communication_s(const MeshChoice& choice, const LinkRates& rates);

// The one that fits and takes the least time; of several, the one that takes the least memory. None
// fits: nullopt.
std::optional<std::size_t> best_mesh(std::span<const MeshChoice> choices, const LinkRates& rates);

}  // namespace tessera::planner
