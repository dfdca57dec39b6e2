// Internal to grad: how far what is sent is from what was meant, where it is quantised.
//
// Measured is the first hop of what this rank gives to its own shard: a part of each bucket, one of
// as many as there are ranks, so that it costs as much of a quantisation. Every parameter has
// elements in the shard with index 0, and ranks have different shards. What is not finite is in no
// sum; the guard of the step finds it. The error of the second hop, of sums that are the larger by
// the number of ranks of a host, is as large beside them, and is not measured: its input is there
// only behind the first.
//
// Threads: as Reducer. Works on the reduce stream.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

class QuantError {
 public:
  // `scratch_bytes`: of a codec's wire of the largest piece.
  QuantError(GradientStream& stream, const comm::Codec& codec, std::size_t scratch_bytes);

  void reserve();  // takes all memory now
  // Of a piece's elements in this rank's part of a bucket.
  void measure(const Piece& piece, const void* values, DType dtype);
  // Since the last time. Waits for the stream to have done it.
  QuantErrorStats take();

 private:
  struct Squares {  // as the codec writes them
    double error = 0;
    double value = 0;
  };
  Squares* squares() const { return reinterpret_cast<Squares*>(squares_.data()); }

  GradientStream& stream_;
  const comm::Codec& codec_;
  const std::size_t scratch_bytes_;
  device::Memory scratch_;
  device::Memory squares_;         // by id; pinned
  std::vector<bool> is_measured_;  // by id
  device::Pending last_;
};

}  // namespace tessera::grad
