// Internal to engine: how much of a GPU's memory may be lent while a backward runs
// (memory_lender.h).
//
// Threads: pure functions.
#pragma once

#include <cstdint>

namespace tessera::engine {

struct SpareMemory {  // in bytes
  // Of torch's allocator, now.
  std::int64_t taken = 0;  // by tensors, with what is lent
  std::int64_t held = 0;   // of the device
  // When backward began.
  std::int64_t taken_at_begin = 0;
  std::int64_t free_at_begin = 0;  // of the device: nobody's
  // What the rest of the backward needs besides; 0: not known yet.
  std::int64_t reserve = 0;
  std::int64_t lent = 0;
};

// Torch's allocator must have it: what it would have to ask the device for is not spare. And what
// is lent lies somewhere in blocks that torch cuts up as it likes; at worst none of the rest is of
// use to the next forward, which then asks the device for as much as is lent. So lending is never
// what makes memory run out.
inline bool is_spare(const SpareMemory& memory, std::int64_t bytes) {
  return memory.reserve > 0 && memory.taken + bytes + memory.reserve <= memory.taken_at_begin &&
         memory.taken + bytes <= memory.held && memory.lent + bytes <= memory.free_at_begin;
}

}  // namespace tessera::engine
