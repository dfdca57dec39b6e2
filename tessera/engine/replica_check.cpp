#include "tessera/engine/replica_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"
#include "tessera/shard/shard_store.h"

namespace tessera::engine {
namespace {

constexpr const char* kWhat = "check of replicas";
constexpr std::int64_t kTileNumel = std::int64_t{1} << 20;
static_assert(kTileNumel % shard::kShardStep == 0, "stores are read in whole steps");

std::int64_t hash_of(const EngineContext& context, const shard::Param& param,
                     device::Memory& tile) {
  std::uint64_t hash = 0;
  const std::int64_t numel = param.layout().stored_numel();
  for (std::int64_t begin = 0; begin < numel; begin += kTileNumel) {
    const std::int64_t count = std::min(kTileNumel, numel - begin);
    shard::start_read_shard(param, context.tiers.shards(), begin, count, tile.data()).wait();
    hash = comm::hash_bytes(
        tile.data(), static_cast<std::size_t>(count) * bytes_of(param.layout().stored_dtype()),
        hash);
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace

void check_replicas(EngineContext& context, RankAgreement& ranks) {
  device::Device& device = context.runtime.device();
  device::Memory tile =
      device.allocate(device.is_discrete() ? Tier::kPinned : Tier::kHost,
                      static_cast<std::size_t>(kTileNumel) * sizeof(double), Role::kStaging);
  std::vector<std::int64_t> mine;
  for (int id = 0; id < context.params.num_params(); ++id) {
    const shard::Param& param = context.params[id];
    param.updated().wait();
    mine.push_back(hash_of(context, param, tile));
  }
  const std::vector<std::int64_t> all = ranks.gather_numbers(mine, kWhat);
  const comm::Mesh& mesh = context.mesh.mesh();
  for (std::size_t id = 0; id < mine.size(); ++id) {
    for (int rank = mesh.shard_size(); rank < mesh.num_ranks(); ++rank) {
      const int first = mesh.place_of(rank);  // of the first copy
      TESSERA_CHECK(all[static_cast<std::size_t>(rank) * mine.size() + id] ==
                        all[static_cast<std::size_t>(first) * mine.size() + id],
                    CorruptError, "parameter '", context.params[static_cast<int>(id)].name(),
                    "': the copies of the model differ: rank ", rank,
                    " does not hold the bytes of shard ", mesh.shard_index(rank), " that rank ",
                    first,
                    " holds. Memory was changed from outside on one of them; go on from the last "
                    "save");
    }
  }
}

}  // namespace tessera::engine
