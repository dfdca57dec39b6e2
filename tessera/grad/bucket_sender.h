// Internal to grad: fills one bucket after the other and reduces them over a group.
//
// A bucket that must be filled, or whose result does not stay where the reduction writes it,
// borrows a slot: a buffer for the wire and memory for the result, which has the wire's type. There
// are two, taken in turn; before one is used again, the stream is ordered behind the reduction it
// was used for and the way of its result to where it stays. A bucket that is reduced from the
// gradient's own memory into the region needs none.
//
// Invariants:
//  (1) Between send() and send() all calls to put() and put_zeros() are for one bucket.
//  (2) Waits only for its own reductions, two buckets back. Where ranks have not agreed to send the
//      same buckets one after the other, waits_for_no_rank() comes before a put().
//  (3) Results are put in the order in which they were sent: as soon as that waits for nobody
//      (put_ready()), and at the latest when their slot is needed.
//
// Threads: as Reducer.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/shard_gradients.h"

namespace tessera::grad {

class BucketSender {
 public:
  // `largest_shard_numel`: of all buckets that will be sent.
  BucketSender(GradientStream& stream, ShardGradients& shards, comm::Group& group, DType wire_dtype,
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
  void send(const Bucket& bucket, const comm::Label& label);
  // Puts results that are there, or, where calls are work of streams, will be without this thread.
  void put_ready();
  // Puts all results in stream order; waits for no device where calls are work of streams.
  void put_all();
  // Blocks until all reductions have ended, and not for what is enqueued behind them; throws what
  // went wrong. The caller counts the time.
  void wait_reduced();
  // Blocks until all results are put, and the stream has done it; throws what went wrong.
  void wait();
  // Waits for what is in flight, whatever becomes of it; forgets the bucket that was being filled.
  void clear() noexcept;

 private:
  struct Slot {
    device::Memory buffer;
    device::Memory result;
    bool is_taken = false;  // by what is sent, or being filled
    device::Pending used;   // what else reads the result of the last one
  };
  struct Sent {
    std::vector<Piece> pieces;
    const std::byte* result = nullptr;
    device::Pending reduced;
    std::shared_ptr<std::atomic<bool>> met;  // that by all ranks
    Slot* slot = nullptr;                    // null: it needed none
  };

  std::size_t num_ranks() const { return static_cast<std::size_t>(group_.size()); }
  bool is_whole_param(const Bucket& bucket) const;
  void copy_piece(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  Slot& slot();  // of the bucket that is being filled
  std::byte* buffer();
  std::byte* result();
  void take_buffer(Slot& slot);
  void take_result(Slot& slot);
  void put_oldest();

  GradientStream& stream_;
  ShardGradients& shards_;
  comm::Group& group_;
  shard::ParamTable& params_;
  const DType wire_dtype_;
  const std::int64_t largest_shard_numel_;

  FullGradient direct_;  // the bucket's own memory, where it is a gradient
  Slot* slot_ = nullptr;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  std::deque<Sent> sent_;                   // and not put
  std::vector<device::Pending> in_flight_;  // since the last wait
};

}  // namespace tessera::grad
