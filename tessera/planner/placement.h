// From byte budgets to a place for every shard, and to the sizes of everything that is allocated.
// Pure: nothing is allocated, and the same input gives the same plan on every machine.
//
// One rank is planned; all are alike up to what does not divide. On a device whose memory is the
// host's (CPU), `device` and `host` are one memory, and the smaller of both budgets bounds it.
//
// What must be in memory comes first: the arena of gathered parameters (at least the largest unit),
// the buckets of reductions, the buffers of I/O (at least one sub-group and a few tiles). What is
// left is filled by benefit per byte: small parameters; parameters in the order of use; gradient
// shards; optimizer states in the order of use. What does not fit goes to NVMe, shard by shard, and
// a later shard that fits may stay where an earlier one did not. Where everything fits, nothing is
// on NVMe and no buffer is made.
//
// What autograd holds besides (activations, and the full gradient of one parameter at a time) is
// torch's: the largest full gradient is stated, and not part of the budgets.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"

namespace tessera {
class Config;
}

namespace tessera::planner {

inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct ParamShape {
  std::string name;
  std::int64_t numel = 0;
  bool trainable = true;
  bool dynamic = false;
};

// What a step works on; made from a model's shapes (before it exists) or from an engine's tables.
struct ModelShapes {
  std::vector<ParamShape> params;       // by id: in the order of registration, which is that of use
  std::vector<std::vector<int>> units;  // ids that each needs, own and external, ascending
  DType dtype = DType::kFloat32;
};

enum class Wish : std::uint8_t { kAuto, kDevice, kHost, kNvme };

struct PlacementOptions {
  int num_ranks = 1;
  bool on_cuda = false;
  bool has_nvme = false;  // there are directories for it
  std::int64_t device_bytes = kUnlimited;
  std::int64_t host_bytes = kUnlimited;
  std::int64_t nvme_bytes = kUnlimited;
  Wish parameters = Wish::kAuto;
  Wish optimizer = Wish::kAuto;
  std::int64_t parameters_host_bytes = kUnlimited;  // stay in memory where parameters is kNvme
  int num_states = 2;                               // fp32 tensors per parameter besides the master
  DType wire_dtype = DType::kFloat32;
  std::int64_t bucket_bytes = 0;  // of reductions; as the engine will choose it
  std::int64_t live_limit_bytes = 0;
  std::int64_t sub_group_bytes = 0;  // of fp32 masters, at most
  // 0: chosen here.
  int parameter_buffers = 0;
  std::int64_t parameter_buffer_bytes = 0;
  int optimizer_buffers = 0;
  // num_ranks, budgets, places and buffers as the config says. Throws ConfigError for
  // contradictions: a tier without a path, a place that its budget forbids.
  static PlacementOptions from(const Config& config, int num_ranks, bool on_cuda);
};

enum class Place : std::uint8_t { kDevice, kHost, kNvme };

struct ShardPlaces {  // of one parameter's shard on this rank
  Place parameter = Place::kDevice;
  Place gradient = Place::kDevice;
  Place states = Place::kDevice;  // and the master, where it is not the parameter itself
};

// One line of the ledger: what will be charged when everything has been allocated.
struct LedgerLine {
  Tier tier = Tier::kDevice;
  Role role = Role::kOther;
  std::int64_t bytes = 0;
};

struct Placement {
  std::vector<ShardPlaces> params;  // by id
  bool uses_nvme = false;
  // Gathered parameters. In a group of one those in memory are not gathered; 0: nothing is.
  std::int64_t arena_bytes = 0;
  std::int64_t live_limit_bytes = 0;
  // Buffers of I/O; 0 where nothing is on NVMe.
  std::int64_t parameter_pool_bytes = 0;  // shards read ahead of their gathers, and tiles
  std::int64_t gradient_pool_bytes = 0;
  std::int64_t optimizer_pool_bytes = 0;  // room for num_optimizer_buffers sub-groups
  int num_optimizer_buffers = 0;
  std::int64_t sub_group_numel = 0;  // elements of a sub-group, at most; a multiple of 2048

  std::vector<LedgerLine> ledger;          // by tier and role, those above zero
  std::int64_t full_gradient_bytes = 0;    // torch's, besides
  // Of NVMe, per step of `accumulate` micro-batches.
  std::int64_t states_read_bytes = 0;
  std::int64_t states_written_bytes = 0;
  std::int64_t parameters_read_bytes = 0;  // at most, by forward and backward
  std::int64_t gradients_read_bytes = 0;
  std::int64_t gradients_written_bytes = 0;

  std::int64_t bytes(Tier tier) const;
};

// Throws ConfigError, with the arithmetic, if it does not fit.
Placement make_placement(const ModelShapes& model, const PlacementOptions& options,
                         std::int64_t num_micro_batches);

}  // namespace tessera::planner
