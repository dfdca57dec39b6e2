// Random numbers that depend on (seed, stream, index) alone: any rank can make any element of a
// tensor without making the others, so initial weights do not depend on the number of ranks.
// Philox4x32-10, as in torch and cuRAND, but with a layout of our own.
//
// Threads: stateless.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

class CounterRandom {
 public:
  // `stream`: what the numbers are for, such as a parameter's name.
  CounterRandom(std::uint64_t seed, std::string_view stream);

  std::array<std::uint32_t, 4> block(std::uint64_t counter) const;
  std::uint32_t bits(std::uint64_t index) const;
  // In [0, 1), 24 bits.
  float uniform(std::uint64_t index) const;
  // Standard normal; computed in double, rounded once.
  float normal(std::uint64_t index) const;

 private:
  std::array<std::uint32_t, 2> key_{};
  std::uint64_t stream_ = 0;
};

}  // namespace tessera
