// The bytes of a step on a mesh, per link, in closed form.
//
// Counted is what ranks send to each other (docs/communication.md): direct sends of payload, those
// to ranks of the same host apart from those to other hosts. Every rank of a mesh sends alike.
// Tags, norms and other calls of a few bytes are left out.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
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

struct StepVolume {
  // Full parameters that are gathered, with padding, as often as they are.
  std::int64_t gathered_bytes = 0;
  // Full elements of each bucket, with padding: what a micro-batch reduce-scatters.
  std::span<const std::int64_t> bucket_numel;
  std::int64_t num_micro_batches = 1;
  std::int64_t wire_element_bytes = 4;
};

struct MeshBytes {
  SentBytes gathers;
  SentBytes reduce_scatters;  // of all micro-batches
  SentBytes replica_sums;     // once per step

  SentBytes rank() const;                            // all of them, by one rank
  std::int64_t host_across(const Mesh& mesh) const;  // all of them, by all ranks of a host
};

// Of one rank. REQUIRES: gathered_bytes and every bucket are multiples of the shard size.
MeshBytes step_bytes(const Mesh& mesh, const StepVolume& volume);

// Its parts. `full_bytes` in all: a shard group gathers as many, or reduce-scatters as many.
SentBytes gather_bytes(const Mesh& mesh, std::int64_t full_bytes);
SentBytes reduce_scatter_bytes(const Mesh& mesh, std::int64_t full_bytes);
// The all-reduce of one shard's `numel` elements in a replica group.
SentBytes replica_sum_bytes(const Mesh& mesh, std::int64_t numel, std::int64_t element_bytes);
// Micro-batches are added up in fp32; a single one's sum travels as it was reduced.
std::int64_t replica_element_bytes(std::int64_t num_micro_batches, std::int64_t wire_element_bytes);

}  // namespace tessera::comm
