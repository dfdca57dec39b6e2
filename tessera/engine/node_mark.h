// A place in the order in which a thread makes nodes of autograd's graphs.
//
// Threads: plain data.
#pragma once

#include <cstdint>

namespace tessera::engine {

struct NodeMark {
  std::uint64_t sequence = 0;  // autograd's own number, counted per thread
  std::uint64_t thread = 0;
  // Of the next node that the calling thread makes.
  static NodeMark next();
};

}  // namespace tessera::engine
