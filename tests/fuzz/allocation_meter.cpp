#include "tests/fuzz/allocation_meter.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

// operator new belongs to the whole program, and so does what it counts.
std::size_t live_bytes = 0;
std::size_t most_bytes = 0;

void* allocate(std::size_t bytes) noexcept {
  void* const memory = std::malloc(std::max<std::size_t>(1, bytes));
  if (memory != nullptr) {
    live_bytes += ::malloc_usable_size(memory);
    most_bytes = std::max(most_bytes, live_bytes);
  }
  return memory;
}

void* allocate_or_throw(std::size_t bytes) {
  void* const memory = allocate(bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void release(void* memory) noexcept {
  live_bytes -= ::malloc_usable_size(memory);
  std::free(memory);
}

}  // namespace

// Every form: a sanitizer has each of them for itself, and refuses to mix them.
void* operator new(std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

namespace tessera::fuzz {

AllocationMeter::AllocationMeter() : before_(live_bytes) { most_bytes = live_bytes; }

std::size_t AllocationMeter::peak_bytes() const { return most_bytes - before_; }

}  // namespace tessera::fuzz
