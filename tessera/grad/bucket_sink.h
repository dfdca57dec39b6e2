// Internal to grad: gradients of a group of several ranks, reduced bucket by bucket.
//
// A bucket that must be filled, or whose result is added to earlier ones, borrows a slot: a buffer
// for the wire and a scratch shard for the result. There are two, taken in turn; before one is used
// again, the stream is ordered behind the reduction it was used for and the sum of its result. A
// bucket that is reduced from the gradient's own memory into the region needs none.
//
// Invariants:
//  (1) Buckets are started in the order of the layout; current_ is the one whose turn it is.
//  (2) A gradient is held until its last piece is in a bucket, and its memory is retired then.
//  (3) Every backward starts every bucket once, and the first of a step writes all of the region.
//
// Threads: as Reducer.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_sink.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

class BucketSink final : public GradientSink {
 public:
  // `layout` outlives the sink.
  BucketSink(GradientStream& stream, const BucketLayout& layout, DType wire_dtype);
  ~BucketSink() override;

  void begin_backward(bool is_first) override;
  void check(const shard::Param& param, const FullGradient& gradient) const override;
  void take(const shard::Param& param, FullGradient gradient) override;
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
    bool has_come = false;         // in this backward
    std::size_t num_not_sent = 0;  // pieces that are in no bucket yet
  };
  struct Slot {
    device::Memory buffer;
    device::Memory scratch;
    device::Pending reduced;         // what used it last
    const Bucket* to_add = nullptr;  // its result is in the scratch
  };

  std::size_t num_ranks() const { return static_cast<std::size_t>(group_.size()); }
  const shard::Param& param_of(const Piece& piece) const { return params_[piece.param]; }
  Entry& entry_of(const Piece& piece) { return entries_[static_cast<std::size_t>(piece.param)]; }
  bool is_whole_param(const Bucket& bucket) const;

  // What has come for the bucket whose turn it is; sends it, and those behind it, while full.
  void advance();
  void put_piece(const Piece& piece);
  void release(Entry& entry, const shard::Param& param);  // all of it is in buckets, or forgotten
  void copy_piece(const Piece& piece, const FullGradient& gradient);
  void zero_piece(const Piece& piece);
  void send();
  Slot& slot();  // of the current bucket
  std::byte* buffer();
  float* scratch();
  void settle(Slot& slot);
  float* region();

  GradientStream& stream_;
  comm::Group& group_;
  shard::ParamTable& params_;
  const BucketLayout& layout_;
  const DType wire_dtype_;

  std::vector<Entry> entries_;            // by id
  std::vector<std::size_t> num_missing_;  // by bucket: pieces whose gradient has not come
  std::size_t current_ = 0;
  bool is_first_ = true;
  FullGradient direct_;  // the current bucket's own memory, where it is a gradient
  Slot* slot_ = nullptr;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  device::Memory region_;
  bool region_is_zero_ = false;
  std::vector<device::Pending> in_flight_;
};

}  // namespace tessera::grad
