// c10d's own reduce-scatter over Gloo, for bench/reduce_scatter_bench.cpp to measure ours against.
//
// It has connections of its own, on the same interface as gloo_backend's.
//
// Threads: one thread per object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/store.h"

namespace tessera::bench {

class ReduceScatterYardstick {
 public:
  virtual ~ReduceScatterYardstick() = default;
  // Blocks. input: size pieces of `shard_numel` floats; output: this rank's piece of the sum.
  virtual void reduce_scatter(float* input, float* output, std::int64_t shard_numel) = 0;
};

// Collective: blocks until all `size` ranks have joined at `store`. `host` is the address to bind.
std::unique_ptr<ReduceScatterYardstick> make_c10d_reduce_scatter(std::shared_ptr<comm::Store> store,
                                                                 int rank, int size,
                                                                 const std::string& host);

}  // namespace tessera::bench
