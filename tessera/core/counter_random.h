// Random numbers that depend on (seed, stream, index) alone: any rank can make any element of a
// tensor without making the others, so initial weights do not depend on the number of ranks.
// Philox4x32-10, as in torch and cuRAND, but with a layout of our own:
//
//   key = seed, counter = (number of the block, hash of the stream's name)
//   element `index` is lane index % 4 of block index / 4, and takes 32 bits
//
// Every result is made of IEEE additions, products, divisions and roots, without libm: the same
// bits on every machine. Names and numbers of this file are a format: a change makes other models.
//
// Threads: stateless.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

// One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key);

class CounterRandom {
 public:
  // `stream`: what the numbers are for, such as a parameter's name.
  CounterRandom(std::uint64_t seed, std::string_view stream);

  std::array<std::uint32_t, 4> block(std::uint64_t counter) const;
  // In [0, limit), from one whole block; uneven by at most limit / 2^64. REQUIRES: limit > 0.
  std::uint64_t below(std::uint64_t counter, std::uint64_t limit) const;

  // Elements [begin, begin + out.size()): in [0, 1) with 24 bits, or standard normal, within 6.4 of
  // zero, computed in double and rounded once.
  void fill_uniform(std::uint64_t begin, std::span<float> out) const;
  void fill_normal(std::uint64_t begin, std::span<float> out) const;

 private:
  template <typename MakeValues>
  void fill(std::uint64_t begin, std::span<float> out, MakeValues make_values) const;

  std::array<std::uint32_t, 2> key_{};
  std::uint64_t stream_ = 0;
};

}  // namespace tessera
