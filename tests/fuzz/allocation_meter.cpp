#include "tests/fuzz/allocation_meter.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

// operator new belongs to the whole program, and so does what it counts.
std::size_t live_bytes = 0;
std::size_t most_bytes = 0;

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = std::malloc(std::max<std::size_t>(1, bytes));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  live_bytes += ::malloc_usable_size(memory);
  most_bytes = std::max(most_bytes, live_bytes);
  return memory;
}

void operator delete(void* memory) noexcept {
  // What was allocated before this program's operators were in use has not been counted.
  live_bytes -= std::min(live_bytes, ::malloc_usable_size(memory));
  std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace tessera::fuzz {

AllocationMeter::AllocationMeter() : before_(live_bytes) { most_bytes = live_bytes; }

std::size_t AllocationMeter::peak_bytes() const {
  return most_bytes - std::min(most_bytes, before_);
}

}  // namespace tessera::fuzz
