// Internal to grad: gradients of dynamic parameters in a group of several ranks. They are kept
// until the ranks have agreed to reduce them, which may be several times in one backward: each time
// a rank gives what it has got since, or zeros.
//
// The buckets of a call are made of its list alone, so they are the same on every rank. They have
// slots and, if asked for, a group of their own: a bucket of static parameters may have to wait
// until the last rank ends its backward, and nothing here waits behind it.
//
// Invariants:
//  (1) In a step a shard's sum is zero until its parameter is first reduced. In the first backward
//      that reduction overwrites it, as a static bucket does; all others add to it.
//  (2) A gradient is held from take() to the call that reduces it.
//
// Threads: as Reducer.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/bucket_sender.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

class DynamicGradients {
 public:
  // `layout` outlives it.
  DynamicGradients(GradientStream& stream, const BucketLayout& layout,
                   const ReducerOptions& options);

  void reserve();  // takes all memory now
  void begin_backward(bool is_first);
  void take(const shard::Param& param, FullGradient gradient);
  std::vector<int> pending() const;
  // `region`: zero, for parameters that were not reduced in this step. Throws ConfigError, before
  // anything is started, where sums are needed and cannot be made.
  void reduce(std::span<const int> ids, float* region);
  void wait() { sender_.wait(); }
  void drop() noexcept;  // what is pending
  void clear() noexcept;

 private:
  bool overwrites(int id) const { return is_first_ && !was_reduced_[static_cast<std::size_t>(id)]; }
  void put_piece(const Bucket& bucket, const Piece& piece);
  void send(const Bucket& bucket, float* region);
  void release(int id, FullGradient gradient);

  GradientStream& stream_;
  shard::ParamTable& params_;
  const BucketLayout& layout_;
  const ReducerOptions options_;
  BucketSender sender_;
  std::map<int, FullGradient> pending_;  // by id
  std::vector<bool> was_reduced_;        // by id, in the first backward of the step
  bool is_first_ = true;
};

}  // namespace tessera::grad
