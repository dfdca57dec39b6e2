// In which order an epoch takes the sequences of a data set: a permutation of their numbers that
// depends on (seed, epoch) alone.
//
// It is computed number by number, by a Feistel network over the next power of four, and repeated
// until the result is in range: at most four times on average. So nothing is stored, however large
// the data set is, and any rank finds any place of any epoch.
//
// What it gives is a format: a change makes other training runs.
//
// Threads: stateless.
#pragma once

#include <cstdint>

namespace tessera::models {

class EpochOrder {
 public:
  // REQUIRES: 1 <= count <= 2^62.
  EpochOrder(std::uint64_t seed, std::uint64_t count);

  // The number of the sequence at `place` of `epoch`. REQUIRES: place < count.
  std::uint64_t at(std::uint64_t epoch, std::uint64_t place) const;

 private:
  const std::uint64_t seed_;
  const std::uint64_t count_;
  const int half_bits_;
};

}  // namespace tessera::models
