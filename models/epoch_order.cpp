#include "models/epoch_order.h"

#include <algorithm>
#include <bit>

#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

// Four make a permutation that no cheap test tells from a random one; six leave a margin.
constexpr std::uint64_t kRounds = 6;

}  // namespace

EpochOrder::EpochOrder(std::uint64_t seed, std::uint64_t count)
    : seed_(seed),
      count_(count),
      half_bits_(std::max(1, (static_cast<int>(std::bit_width(count - 1)) + 1) / 2)) {
  TESSERA_INVARIANT(count >= 1 && count <= std::uint64_t{1} << 62, "an epoch of ", count,
                    " sequences");
}

std::uint64_t EpochOrder::at(std::uint64_t epoch, std::uint64_t place) const {
  TESSERA_INVARIANT(place < count_, "place ", place, " of an epoch of ", count_, " sequences");
  const CounterRandom random(seed_, detail::concat("data.epoch.", epoch));
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t number = place;
  do {
    std::uint64_t left = number >> half_bits_;
    std::uint64_t right = number & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      // A half has at most 31 bits, so the round fits above it.
      const std::uint64_t mixed = left ^ (random.block(round << 32 | right)[0] & mask);
      left = right;
      right = mixed;
    }
    number = left << half_bits_ | right;
  } while (number >= count_);
  return number;
}

}  // namespace tessera::models
