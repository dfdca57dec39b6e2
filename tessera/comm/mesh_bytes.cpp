#include "tessera/comm/mesh_bytes.h"

#include <algorithm>

#include "tessera/comm/staging.h"

namespace tessera::comm {

SentBytes& SentBytes::operator+=(const SentBytes& other) {
  inside += other.inside;
  across += other.across;
  return *this;
}

SentBytes MeshBytes::rank() const {
  SentBytes sum = gathers;
  sum += secondary_gathers;
  sum += reduce_scatters;
  sum += replica_sums;
  return sum;
}

std::int64_t MeshBytes::host_across(const Mesh& mesh) const {
  return rank().across * mesh.ranks_per_host();
}

SentBytes gather_bytes(const Mesh& mesh, std::int64_t full_bytes) {
  const std::int64_t shard = full_bytes / mesh.shard_size();
  const std::int64_t hosts = mesh.hosts_per_group();
  const std::int64_t inside = mesh.inside_size();
  if (mesh.hierarchical()) {
    return {shard * hosts * (inside - 1), shard * (hosts - 1)};
  }
  return {shard * (inside - 1), shard * (mesh.shard_size() - inside)};
}

SentBytes secondary_gather_bytes(int secondary_size, std::int64_t full_bytes) {
  return {full_bytes / secondary_size * (secondary_size - 1), 0};
}

SentBytes reduce_scatter_bytes(const Mesh& mesh, std::int64_t full_bytes) {
  const std::int64_t shard = full_bytes / mesh.shard_size();
  const std::int64_t inside = mesh.inside_size();
  return {shard * (inside - 1), shard * (mesh.shard_size() - inside)};
}

SentBytes two_hop_bytes(const Mesh& mesh, std::int64_t shard_numel, const EncodedBytes& inside,
                        const EncodedBytes& across) {
  const std::int64_t hosts = mesh.hosts_per_group();
  const std::int64_t local = mesh.inside_size();
  return {(local - 1) * inside(shard_numel * hosts), (hosts - 1) * across(shard_numel)};
}

SentBytes replica_sum_bytes(const Mesh& mesh, std::int64_t numel, std::int64_t element_bytes) {
  const std::int64_t replicas = mesh.num_replicas();
  const std::int64_t bytes = numel * element_bytes;
  const std::int64_t to_each = bytes * replicas <= static_cast<std::int64_t>(kSmallAllReduceBytes)
                                   ? bytes
                                   : 2 * ((numel + replicas - 1) / replicas) * element_bytes;
  // Ranks of its host that hold the same shard of other copies.
  const std::int64_t inside = mesh.ranks_per_host() / mesh.inside_size() - 1;
  return {to_each * inside, to_each * (replicas - 1 - inside)};
}

std::int64_t replica_element_bytes(std::int64_t num_micro_batches,
                                   std::int64_t wire_element_bytes) {
  return num_micro_batches == 1 ? wire_element_bytes : static_cast<std::int64_t>(sizeof(float));
}

MeshBytes step_bytes(const Mesh& mesh, const StepVolume& volume) {
  MeshBytes bytes;
  bytes.gathers = gather_bytes(mesh, volume.gathered_bytes);
  bytes.secondary_gathers = secondary_gather_bytes(volume.secondary_size, volume.secondary_bytes);
  const std::int64_t element_bytes =
      replica_element_bytes(volume.num_micro_batches, volume.wire_element_bytes);
  for (const std::int64_t numel : volume.bucket_numel) {
    const SentBytes once =
        volume.hop_across == nullptr
            ? reduce_scatter_bytes(mesh, numel * volume.wire_element_bytes)
            : two_hop_bytes(mesh, numel / mesh.shard_size(), volume.hop_inside, volume.hop_across);
    bytes.reduce_scatters.inside += once.inside * volume.num_micro_batches;
    bytes.reduce_scatters.across += once.across * volume.num_micro_batches;
    bytes.replica_sums += replica_sum_bytes(mesh, numel / mesh.shard_size(), element_bytes);
  }
  return bytes;
}

}  // namespace tessera::comm
