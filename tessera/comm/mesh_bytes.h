// The bytes of a step on a mesh, per link, in closed form.
//
// Counted is what ranks send to each other (docs/communication.md): direct sends of payload, those
// to ranks of the same host apart from those to other hosts. Every rank of a mesh sends alike.
// Tags, norms and other calls of a few bytes are left out.
//
// Where elements travel as blocks of integers, bytes are those of their wires (codec.h).
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "tessera/comm/mesh.h"

namespace tessera::comm {

// What one rank sends.
struct SentBytes {
  std::int64_t inside = 0;  // to ranks of its host
  std::int64_t across = 0;  // to ranks of other hosts

  std::int64_t sum() const { return inside + across; }
  SentBytes& operator+=(const SentBytes& other);
  bool operator==(const SentBytes&) const = default;
};

// Of so many elements, as they travel.
using EncodedBytes = std::function<std::int64_t(std::int64_t numel)>;

struct StepVolume {
  // Full parameters that are gathered, with padding, as they travel and as often as they do: from
  // shards, and from secondary shards over `secondary_size` ranks of a host.
  std::int64_t gathered_bytes = 0;
  // Full elements of each bucket, with padding: what a micro-batch reduce-scatters.
  std::span<const std::int64_t> bucket_numel;
  std::int64_t num_micro_batches = 1;
  std::int64_t wire_element_bytes = 4;
  std::int64_t secondary_bytes = 0;
  int secondary_size = 1;
  // Of encoded gradients, in two hops: inside hosts, then across. Null: as elements, in one call.
  EncodedBytes hop_inside = nullptr;
  EncodedBytes hop_across = nullptr;
};

struct MeshBytes {
  SentBytes gathers;            // from shards
  SentBytes secondary_gathers;  // from secondary shards
  SentBytes reduce_scatters;    // of all micro-batches
  SentBytes replica_sums;       // once per step

  SentBytes rank() const;                            // all of them, by one rank
  std::int64_t host_across(const Mesh& mesh) const;  // all of them, by all ranks of a host
};

// Of one rank. REQUIRES: gathered_bytes and every bucket are multiples of the shard size.
MeshBytes step_bytes(const Mesh& mesh, const StepVolume& volume);

// Its parts. `full_bytes` in all: a shard group gathers as many, or reduce-scatters as many.
SentBytes gather_bytes(const Mesh& mesh, std::int64_t full_bytes);
SentBytes secondary_gather_bytes(int secondary_size, std::int64_t full_bytes);
SentBytes reduce_scatter_bytes(const Mesh& mesh, std::int64_t full_bytes);
// Of encoded elements: inside hosts every rank gets the elements of all shards with its local rank,
// one wire from each; across hosts those of its own shard. A group that has one rank on each host,
// or is inside one, does the other hop alone.
SentBytes two_hop_bytes(const Mesh& mesh, std::int64_t shard_numel, const EncodedBytes& inside,
                        const EncodedBytes& across);
// The all-reduce of one shard's `numel` elements in a replica group.
SentBytes replica_sum_bytes(const Mesh& mesh, std::int64_t numel, std::int64_t element_bytes);
// Micro-batches are added up in fp32; a single one's sum travels as it was reduced.
std::int64_t replica_element_bytes(std::int64_t num_micro_batches, std::int64_t wire_element_bytes);

}  // namespace tessera::comm
