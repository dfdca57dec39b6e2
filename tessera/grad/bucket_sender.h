// Internal to grad: fills one bucket after the other and reduces them over a group.
//
// A bucket that must be filled, or whose result does not stay where the reduction writes it,
// borrows a slot: a buffer for the wire and a scratch shard for the result. There are two, taken in
// turn; before one is used again, the stream is ordered behind the reduction it was used for and
// the sum of its result, or its way to NVMe. A bucket that is reduced from the gradient's own
// memory into the region needs none.
//
// Invariants:
//  (1) Between send() and send() all calls to put() and put_zeros() are for one bucket.
//  (2) Waits only for its own reductions, two buckets back. Where ranks have not agreed to send the
//      same buckets one after the other, waits_for_no_rank() comes before a put().
//  (3) Where two results go to one range, they get there in the order in which they were sent: a
//      group finishes its calls in their order, and slots are finished in theirs.
//
// Threads: as Reducer.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

// Where a part of a bucket's result belongs.
struct ResultPart {
  float* to = nullptr;             // null: `nvme`
  std::int64_t bucket_offset = 0;  // in this rank's part of the bucket
  std::int64_t numel = 0;
  bool adds = false;  // to what is there; else it is overwritten
  ShardPiece nvme = {};
};
// The part that `piece` is of a bucket's result; one that goes on where the last ends is joined to
// it. `region`: as in `layout`.
void append_part(std::vector<ResultPart>& parts, const BucketLayout& layout, const Piece& piece,
                 float* region, bool adds);

class BucketSender {
 public:
  // `largest_shard_numel`: of all buckets that will be sent.
  BucketSender(GradientStream& stream, comm::Group& group, DType wire_dtype,
               std::int64_t largest_shard_numel);

  // Takes the memory of so many slots now.
  void reserve(std::size_t num_slots);
  // The next bucket takes the first slot, so that a model with one bucket needs no second one.
  // REQUIRES: what is sent before the next call goes to the same ranges as before, in the same
  // order.
  void rewind() { next_slot_ = 0; }
  // The next put() waits for the network at most: the reduction it must wait for, if any, has been
  // started by all ranks. Once true, it stays true until the next send().
  bool waits_for_no_rank() const;
  // The owner keeps the gradient's memory until the stream has done what it has been given so far.
  void put(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  void put_zeros(const Bucket& bucket, const Piece& piece);
  // `parts` together are the whole bucket.
  void send(const Bucket& bucket, std::vector<ResultPart> parts, const comm::Label& label);
  // Blocks until all results are where they belong; throws what went wrong.
  void wait();
  // Waits for what is in flight, whatever becomes of it; forgets the bucket that was being filled.
  void clear() noexcept;

 private:
  struct Slot {
    device::Memory buffer;
    device::Memory scratch;
    device::Pending reduced;                 // what used it last
    std::shared_ptr<std::atomic<bool>> met;  // that by all ranks
    std::vector<ResultPart> parts;           // of its result, which is in the scratch
  };

  std::size_t num_ranks() const { return static_cast<std::size_t>(group_.size()); }
  bool is_whole_param(const Bucket& bucket) const;
  void copy_piece(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  Slot& slot();  // of the bucket that is being filled
  std::byte* buffer();
  float* scratch();
  void take_buffer(Slot& slot);
  void take_scratch(Slot& slot);
  void finish(Slot& slot);

  GradientStream& stream_;
  comm::Group& group_;
  shard::ParamTable& params_;
  const DType wire_dtype_;
  const std::int64_t largest_shard_numel_;

  FullGradient direct_;  // the bucket's own memory, where it is a gradient
  Slot* slot_ = nullptr;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  std::vector<device::Pending> in_flight_;
};

}  // namespace tessera::grad
