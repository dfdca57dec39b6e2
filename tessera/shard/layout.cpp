#include "tessera/shard/layout.h"

#include <algorithm>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::shard {

Layout::Layout(std::int64_t numel, int num_ranks, DType dtype, StoredFormat format)
    : numel_(numel), num_ranks_(num_ranks), dtype_(dtype), format_(format) {
  TESSERA_CHECK(numel >= 0, ConfigError, "shard layout: numel=", numel, " is negative");
  TESSERA_CHECK(num_ranks >= 1, ConfigError, "shard layout: num_ranks=", num_ranks,
                "; at least one rank holds a parameter");
  const auto bytes = static_cast<std::int64_t>(bytes_of(dtype));
  const auto granule =
      is_encoded() ? format.step() : static_cast<std::int64_t>(kShardAlignment) / bytes;
  // Whatever is rounded up below, the bytes of all pieces then still fit.
  const std::int64_t largest =
      std::numeric_limits<std::int64_t>::max() / bytes - num_ranks * granule;
  TESSERA_CHECK(numel <= largest, ConfigError, "shard layout: numel=", numel, " of ",
                to_string(dtype), " is more than memory can be addressed");
  const std::int64_t share = numel / num_ranks + (numel % num_ranks == 0 ? 0 : 1);
  shard_numel_ = (share + granule - 1) / granule * granule;
}

ElementRange Layout::range(int rank) const {
  TESSERA_INVARIANT(rank >= 0 && rank < num_ranks_, "rank ", rank, " of ", num_ranks_);
  const std::int64_t begin = std::min(numel_, rank * shard_numel_);
  return {begin, std::min(shard_numel_, numel_ - begin)};
}

}  // namespace tessera::shard
