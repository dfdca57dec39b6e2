// How much memory hostile input makes its reader take: counts what operator new hands out.
//
// Threads: one.
#pragma once

#include <cstddef>

namespace tessera::fuzz {

// From its making on.
class AllocationMeter {
 public:
  AllocationMeter();
  // The most that was allocated at a time, beyond what was when the meter was made.
  std::size_t peak_bytes() const;

 private:
  std::size_t before_;
};

}  // namespace tessera::fuzz
