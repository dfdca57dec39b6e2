// Internal to grad: full gradients that are sent to other ranks become pieces of their sum over the
// ranks, bucket by bucket. bucket_sender.h says how a bucket is filled and sent, shard_gradients.h
// where its result goes, dynamic_gradients.h what becomes of parameters that are in no bucket.
//
// Invariants:
//  (1) Buckets are started in the order of the layout; current_ is the one whose turn it is.
//  (2) A gradient is held until its last piece is in a bucket, and its memory is retired then.
//  (3) Until a backward ends, a bucket is opened only if its buffer waits for no rank, see [Note: a
//      reduction never waits for a rank that waits].
//  (4) Every backward starts every bucket once.
//
// Threads: as Reducer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/bucket_sender.h"
#include "tessera/grad/dynamic_gradients.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/shard_gradients.h"

namespace tessera::grad {

class GradientBuckets {
 public:
  // All of it outlives this.
  GradientBuckets(GradientStream& stream, ShardGradients& shards, const BucketLayout& layout,
                  const ReducerOptions& options);
  ~GradientBuckets();
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // `replica_sum`: for every bucket of the backward.
  void begin_backward(ReplicaSum replica_sum);
  void take(const shard::Param& param, FullGradient gradient);
  std::vector<int> pending_dynamic() const { return dynamic_.pending(); }
  void reduce_dynamic(std::span<const int> ids);
  void drop_dynamic() noexcept { dynamic_.drop(); }
  void finish_backward();
  // Sums accumulated gradients over replicas, bucket by bucket. Between backwards; waits for other
  // ranks.
  void sum_over_replicas();
  // As in BucketSender.
  void put_all();
  void wait_reduced();
  QuantErrorStats take_quant_error();
  // Blocks until the sums of all finished backwards are put; throws the first failure.
  void wait();
  // Waits for calls in flight, ignoring failures.
  void clear() noexcept;
  // Sends full buckets if that waits for no rank, as clear() would. True: a call is in flight, or a
  // bucket is full.
  bool is_under_way() noexcept;

 private:
  struct PieceOf {
    std::size_t bucket = 0;
    std::size_t piece = 0;
  };
  struct Entry {                  // state of one parameter
    std::vector<PieceOf> pieces;  // in bucket order
    FullGradient gradient;
    bool is_added = false;         // in this backward
    std::size_t num_not_sent = 0;  // pieces that are in no bucket yet
  };

  const shard::Param& param_of(const Piece& piece) const { return params_[piece.param]; }
  Entry& entry_of(const Piece& piece) { return entries_[static_cast<std::size_t>(piece.param)]; }

  // Opens the current bucket and puts in the gradients that were added; sends it and later buckets
  // while they are full. A bucket that is not open is empty.
  enum class WaitFor : std::uint8_t { kNetwork, kRanks };
  void advance(WaitFor limit);
  void put_piece(const Piece& piece);
  void release(Entry& entry, const shard::Param& param);  // all of it is in buckets, or dropped
  void send();

  GradientStream& stream_;
  shard::ParamTable& params_;
  const BucketLayout& layout_;
  const std::unique_ptr<QuantError> quant_error_;  // null: nothing is quantised
  BucketSender sender_;
  DynamicGradients dynamic_;

  std::vector<Entry> entries_;                  // by id
  std::vector<std::size_t> num_missing_;        // by bucket: pieces whose gradient is missing
  std::size_t current_;                         // past the last one: no backward, or all sent
  bool is_open_ = false;                        // the current one
  ReplicaSum replica_sum_ = ReplicaSum::kNone;  // in this backward
};

}  // namespace tessera::grad
