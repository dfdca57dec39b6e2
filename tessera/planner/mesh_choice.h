// What each way to cut a world into shard groups takes, and each way to send less across hosts:
// memory of a rank, bytes on the links, and the time that these bytes need, in closed form.
//
// Memory is that of a rank whose shards, gradients and states are all in its own memory, with
// secondary and encoded shards and with what its gathers hold, as plan_memory() counts it without a
// budget; activations are torch's.
//
// Time is that of the bytes alone, one kind of collective behind the other, and nothing beside
// computation: an upper bound that compares meshes. A rank has its own link inside the host, all
// ranks of a host share the one across:
//
//   time of a collective = max(bytes of a rank inside / rate inside,
//                              bytes of a host across / rate across)
//
// but for hierarchical gathers and for reductions in two hops, whose second phase sends what the
// first has brought: the sum.
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/mesh_bytes.h"
#include "tessera/planner/memory_plan.h"

namespace tessera::planner {

// How a step's bytes are made fewer, besides by the mesh.
struct TrafficModes {
  int secondary_size = 1;  // ranks of a host that cut what has been gathered once more (hpZ)
  // Of the integers that travel in place of elements; 0: elements do.
  int weight_bits = 0;           // in gathers (qwZ)
  int gradient_bits_inside = 0;  // in reductions (qgZ), both or neither
  int gradient_bits_across = 0;
  std::int64_t block_numel = 128;  // elements that share a scale

  // Of the options shard.* and quant.*. Throws ConfigError for what the mesh cannot do.
  static TrafficModes from(const Config& config, const comm::Mesh& mesh);
  bool encodes_gradients() const { return gradient_bits_across > 0; }
  // No number of a training is another one than plain ZeRO-3's.
  bool is_exact() const { return weight_bits == 0 && !encodes_gradients(); }
  bool operator==(const TrafficModes&) const = default;
};

struct MeshQuestion {
  // The ranks and their hosts; shard_size and hierarchical do not count.
  comm::MeshOptions world;
  std::int64_t num_micro_batches = 1;
  // By parameter: how often a step gathers it.
  std::vector<std::int64_t> num_gathers;
  std::int64_t block_numel = 128;  // of modes that encode
};

struct MeshChoice {
  comm::Mesh mesh;
  TrafficModes modes;
  std::int64_t memory_bytes = 0;     // of a rank
  std::int64_t secondary_bytes = 0;  // of them, secondary shards
  std::int64_t encoded_bytes = 0;    // of them, what gathers of encoded shards send
  bool fits = true;                  // into the budget of the device, if there is one
  comm::MeshBytes bytes;
};

// Bytes per second.
struct LinkRates {
  double inside = 0;  // of a rank, to the others of its host
  double across = 0;  // of a host, to all others
};

// Of one mesh. `options`: its ranks, and what modes say, do not count.
MeshChoice mesh_choice(const comm::Mesh& mesh, const TrafficModes& modes, const ModelShapes& model,
                       const MemoryPlanOptions& options, const MeshQuestion& question);

// Everything that a run can be asked for, but what changes nothing: secondary shards in a group
// inside one host, encodings in a group of one. Those that are exact come first: all meshes that
// are possible, smallest shard groups first, a hierarchical one behind the flat one of its size,
// where the two differ; and the same with secondary shards of every size that is possible. Then
// each of them with every encoding of gathers (int8) and of reductions (int8 and int4 in both
// hops).
std::vector<MeshChoice> mesh_choices(const ModelShapes& model, const MemoryPlanOptions& options,
                                     const MeshQuestion& question);

// REQUIRES: rates above 0 for links that carry bytes.
double communication_s(const MeshChoice& choice, const LinkRates& rates);

enum class Exactness : std::uint8_t { kExact, kAny };
// The one that fits and takes the least time; of several, the one that takes the least memory, and
// of those the first. None fits: nullopt.
std::optional<std::size_t> best_mesh(std::span<const MeshChoice> choices, const LinkRates& rates,
                                     Exactness exactness);

}  // namespace tessera::planner
