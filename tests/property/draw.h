// Numbers drawn from a seed: the same on every machine, which std's distributions are not.
//
// Threads: as any object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>

namespace tessera::testing {

class Draw {
 public:
  // `stream` keeps what is drawn for one purpose apart from what is drawn for another.
  Draw(std::uint64_t seed, std::uint64_t stream)
      : bits_(seed * 0x9E3779B97F4A7C15ULL + stream * 0xBF58476D1CE4E5B9ULL) {}

  // In [0, limit). REQUIRES: limit > 0.
  std::uint64_t below(std::uint64_t limit) { return bits_() % limit; }
  // In [low, high].
  int between(int low, int high) {
    return low + static_cast<int>(below(static_cast<std::uint64_t>(high - low + 1)));
  }
  bool chance(int percent) { return below(100) < static_cast<std::uint64_t>(percent); }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[static_cast<std::size_t>(below(values.size()))];
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace tessera::testing
