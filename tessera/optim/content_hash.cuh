// What tells the bytes of an array from others: a sum of one term per word of eight bytes, so that
// any number of threads add it up in any order. A term is one-to-one in its word: a single changed
// word is always seen, and of several all but a part of 2^-64. The last word is filled with zeros.
#pragma once

#include <cstdint>

#include "tessera/core/host_device.cuh"

namespace tessera::optim {

inline constexpr std::int64_t kHashWordBytes = 8;

TESSERA_HOST_DEVICE inline std::uint64_t hash_term(std::uint64_t word, std::uint64_t index) {
  std::uint64_t mixed = word + (index + 1) * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31U);
}

}  // namespace tessera::optim
