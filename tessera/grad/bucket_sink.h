// Internal to grad: gradients of a group of several ranks, reduced bucket by bucket, and the region
// where the sums lie. bucket_sender.h says how a bucket is filled and sent, dynamic_gradients.h
// what becomes of parameters that are in none.
//
// Invariants:
//  (1) Buckets are started in the order of the layout; current_ is the one whose turn it is.
//  (2) A gradient is held until its last piece is in a bucket, and its memory is retired then.
//  (3) Until a backward ends, a bucket is opened only if its buffer waits for no rank, see [Note: a
//      reduction never waits for a rank that waits].
//  (4) Every backward starts every bucket once, and the first of a step writes all of the region:
//      buckets their ranges, zeros those of dynamic parameters. What is on NVMe is overwritten by
//      then, or counts as zero.
//
// Threads: as Reducer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/bucket_sender.h"
#include "tessera/grad/dynamic_gradients.h"
#include "tessera/grad/gradient_sink.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

class BucketSink final : public GradientSink {
 public:
  // `layout` outlives the sink.
  BucketSink(GradientStream& stream, const BucketLayout& layout, const ReducerOptions& options);
  ~BucketSink() override;

  void begin_backward(bool is_first) override;
  void check(const shard::Param& param, const FullGradient& gradient) const override;
  void take(const shard::Param& param, FullGradient gradient) override;
  std::vector<int> pending_dynamic() const override { return dynamic_.pending(); }
  void reduce_dynamic(std::span<const int> ids) override;
  void drop_dynamic() noexcept override { dynamic_.drop(); }
  void finish_backward() override;
  void wait() override;
  ShardGradient shard_gradient(const shard::Param& param, bool is_zero) override;
  void clear() noexcept override;

 private:
  struct PieceOf {
    std::size_t bucket = 0;
    std::size_t piece = 0;
  };
  struct Entry {                  // of one parameter
    std::vector<PieceOf> pieces;  // in bucket order
    FullGradient gradient;
    bool is_added = false;         // in this backward
    std::size_t num_not_sent = 0;  // pieces that are in no bucket yet
  };

  const shard::Param& param_of(const Piece& piece) const { return params_[piece.param]; }
  Entry& entry_of(const Piece& piece) { return entries_[static_cast<std::size_t>(piece.param)]; }

  // Opens the bucket whose turn it is and puts in what was added; sends it, and those behind it,
  // while full. A bucket that is not open has nothing in it.
  enum class WaitFor : std::uint8_t { kNetwork, kRanks };
  void advance(WaitFor limit);
  void put_piece(const Piece& piece);
  void release(Entry& entry, const shard::Param& param);  // all of it is in buckets, or forgotten
  void send();
  float* region();

  GradientStream& stream_;
  shard::ParamTable& params_;
  const BucketLayout& layout_;
  const DType wire_dtype_;
  BucketSender sender_;
  DynamicGradients dynamic_;

  std::vector<Entry> entries_;            // by id
  std::vector<std::size_t> num_missing_;  // by bucket: pieces whose gradient is missing
  std::size_t current_;                   // behind the last one: no backward, or all of it is sent
  bool is_open_ = false;                  // the current one
  bool is_first_ = true;
  device::Memory region_;
  bool region_is_zero_ = false;
};

}  // namespace tessera::grad
