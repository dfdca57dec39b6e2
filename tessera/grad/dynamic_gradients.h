// Internal to grad: gradients of dynamic parameters in a group of several ranks. They are kept
// until the ranks have agreed to reduce them, which may be several times in one backward: each time
// a rank gives what it has got since, or zeros.
//
// The buckets of a call are made of its list alone, so they are the same on every rank. They have
// slots and, if asked for, a group of their own: a bucket of static parameters may have to wait
// until the last rank ends its backward, and nothing here waits behind it.
//
// Invariants:
//  (1) Each reduction of a parameter is a round of its shard (shard_gradients.h): the first in a
//      step replaces what is there, others are added.
//  (2) A gradient is held from take() to the call that reduces it.
//  (3) What was reduced is summed over replicas once, by sum_over_replicas(), from where it is: so
//      the order of those calls depends on no list. What is reduced after it is added to that sum
//      on the first replica and begins anew on the others, until it is summed again.
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
#include "tessera/grad/shard_gradients.h"

namespace tessera::grad {

class DynamicGradients {
 public:
  // `layout` and `quant_error` outlive it; `quant_error` is null where nothing is quantised.
  DynamicGradients(GradientStream& stream, ShardGradients& shards, const BucketLayout& layout,
                   const ReducerOptions& options, QuantError* quant_error);

  void reserve();  // takes all memory now
  void take(const shard::Param& param, FullGradient gradient);
  std::vector<int> pending() const;
  // Throws ConfigError, before anything is started, where sums are needed and cannot be made.
  void reduce(std::span<const int> ids);
  // Of those that were reduced since the last time, in the order of their ids. REQUIRES: all ranks
  // have given the same lists.
  void sum_over_replicas();
  void put_all() { sender_.put_all(); }
  void wait_reduced() { sender_.wait_reduced(); }
  void wait() { sender_.wait(); }
  bool is_under_way() const { return sender_.is_under_way(); }
  void drop() noexcept;  // what is pending
  void clear() noexcept;

 private:
  void put_piece(const Bucket& bucket, const Piece& piece);
  void send(const Bucket& bucket);
  void release(int id, FullGradient gradient);
  void begin_after_total(std::span<const int> ids);
  void start_totals(std::span<const BucketParam> params, DType dtype);
  // A single micro-batch, so that it has the bits of a static parameter's.
  bool is_single(int id) const {
    return stream_.replica_sums().num_micro_batches == 1 &&
           num_lists_[static_cast<std::size_t>(id)] == 1;
  }

  GradientStream& stream_;
  ShardGradients& shards_;
  shard::ParamTable& params_;
  const BucketLayout& layout_;
  const ReducerOptions options_;
  BucketSender sender_;
  std::map<int, FullGradient> pending_;  // by id
  std::vector<int> num_lists_;           // by id, since clear()
  std::vector<bool> is_local_;           // by id: reduced, and not summed over replicas yet
};

}  // namespace tessera::grad
