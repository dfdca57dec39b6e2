#include "cli/train_ranks.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::cli {

void BatchShape::check(const std::string& subject) const {
  const std::int64_t unit = num_ranks * accumulate;
  const std::int64_t below = total / unit * unit;
  TESSERA_CHECK(total > 0, ConfigError, subject, " holds no sequence; give at least ", unit);
  TESSERA_CHECK(total == below, ConfigError, subject, " cannot be shared by ", num_ranks,
                num_ranks == 1 ? " rank" : " ranks", " with ", accumulate,
                accumulate == 1 ? " micro-batch" : " micro-batches",
                " each: it must be a multiple of ", unit, "; the nearest is ",
                below == 0 || total - below > unit / 2 ? below + unit : below);
}

SequenceRange micro_batch_of(const BatchShape& shape, int rank, std::int64_t micro_batch) {
  const std::int64_t count = shape.per_micro_batch();
  return {(rank * shape.accumulate + micro_batch) * count, count};
}

std::int64_t shareable_total(std::int64_t wanted, int num_ranks, std::int64_t accumulate) {
  const std::int64_t unit = num_ranks * accumulate;
  return (wanted + unit - 1) / unit * unit;
}

int threads_per_rank(int num_cores, int num_local_ranks) {
  return std::max(1, num_cores / std::max(1, num_local_ranks));
}

}  // namespace tessera::cli
