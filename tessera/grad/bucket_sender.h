// Internal to grad: fills one bucket after the other and reduces them over the ranks of a copy
// (bucket_reduction.h), and over those with the same shards of other copies of the model
// (ReducerParts::replicas).
//
// A bucket that must be filled, or whose result does not stay where the reduction writes it,
// borrows a slot: a buffer for the wire and memory for the result, which has the wire's type. There
// are two, taken in turn; before one is used again, the stream is ordered behind the reduction it
// was used for and the way of its result to where it stays. A bucket that is reduced from the
// gradient's own memory into the region needs none, unless it takes two hops: the result of the
// first one is the slot's, too.
//
// Over replicas a result is summed where it lies, before it is put; or it is added to what is at
// home, in fp32 in the slot's buffer, which its reduction has left, and that sum travels and
// replaces what is at home. See [Note: sums over replicas] in reducer.h.
//
// Invariants:
//  (1) Between send() and send() all calls to put() and put_zeros() are for one bucket.
//  (2) Waits only for its own reductions, two buckets back. Where ranks have not agreed to send the
//      same buckets one after the other, waits_for_no_rank() comes before a put().
//  (3) Results are put in the order in which they were sent: as soon as that waits for nobody
//      (put_ready()), and at the latest when their slot is needed. Sums over replicas are started
//      in that order, too, and put after them.
//  (4) Unless all is work of streams, a sum over replicas is started only where all ranks have
//      started the reduction that it needs, or where this rank's thread may wait for them. So once
//      all replicas have started it, its end depends on no rank's thread.
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
#include "tessera/grad/bucket_reduction.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/quant_error.h"
#include "tessera/grad/shard_gradients.h"

namespace tessera::grad {

// What is summed over replicas when a bucket has been reduced.
enum class ReplicaSum : std::uint8_t {
  kNone,    // nothing yet, or there are no replicas
  kResult,  // the result, in the wire's type
  kTotal,   // the result with what is at home, in fp32
};

class BucketSender {
 public:
  struct Options {
    DType wire_dtype = DType::kFloat32;
    std::int64_t largest_shard_numel = 0;  // of all buckets that will be sent
    bool has_totals = false;               // sums of what is at home will be made
    QuantError* quant_error = nullptr;     // null: nothing is quantised
  };
  BucketSender(GradientStream& stream, ShardGradients& shards, BucketReduction reduction,
               const Options& options);

  // Takes the memory of so many slots now.
  void reserve(std::size_t num_slots);
  // The next bucket takes the first slot, so that a model with one bucket needs no second one.
  // REQUIRES: what is sent before the next call goes to the same ranges as before, in the same
  // order.
  void rewind() { next_slot_ = 0; }
  // The next put() waits for the network at most: what it must wait for, if anything, has been
  // started by all ranks. Once true, it stays true until the next send(). May start sums over
  // replicas, and wait for the network to do so.
  bool waits_for_no_rank();
  // The owner keeps the gradient's memory until the stream has done what it has been given so far.
  void put(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  void put_zeros(const Bucket& bucket, const Piece& piece);
  void send(const Bucket& bucket, const comm::Label& label,
            ReplicaSum replica_sum = ReplicaSum::kNone);
  // Starts those that were asked for; waits for the ranks of the group.
  void start_replica_sums();
  // Of what is at home, without another micro-batch: in fp32, or in the wire's type, where one
  // micro-batch is there. REQUIRES: put_all(). May wait for the ranks of a bucket before this one.
  void sum_home(const Bucket& bucket, DType dtype);
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
  // Something is in flight that has not come to its end.
  bool is_under_way() const;

 private:
  struct Slot {
    device::Memory buffer;
    device::Memory result;
    device::Memory partial;  // of the first hop; none where there is one
    bool is_taken = false;   // by what is sent, or being filled
    device::Pending used;    // what else reads the result of the last one
  };
  struct Sent {
    std::vector<Piece> pieces;
    std::int64_t shard_numel = 0;
    std::byte* values = nullptr;  // of the result, in `dtype`
    DType dtype = DType::kFloat32;
    device::Pending reduced = {};                 // so far
    std::shared_ptr<std::atomic<bool>> met = {};  // that by all ranks
    bool is_on_stream = false;                    // that is work of the stream
    ReplicaSum replica_sum = ReplicaSum::kNone;   // not started
    bool is_total = false;                        // it was
    bool replaces = false;                        // what is at home
    Slot* slot = nullptr;                         // null: it needed none
  };

  std::size_t num_ranks() const { return static_cast<std::size_t>(reduction_.num_ranks()); }
  // The shard whose elements are the i-th part of a bucket.
  std::int64_t shard_at(std::size_t i) const {
    return reduction_.takes_two_hops() ? static_cast<std::int64_t>(i)
                                       : stream_.shard_of(static_cast<int>(i));
  }
  // The part of this rank's own shard.
  std::int64_t own_part() const {
    return reduction_.takes_two_hops() ? params_.rank() : stream_.parts().group.rank();
  }
  bool is_whole_param(const Bucket& bucket) const;
  void copy_piece(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  Slot& slot();  // of the bucket that is being filled
  std::byte* buffer();
  std::byte* result();
  std::byte* partial();
  void measure(const Bucket& bucket, const void* input);
  void take_buffer(Slot& slot);
  void take_result(Slot& slot);
  void take_partial(Slot& slot);
  // Waiting for it blocks no thread, or all ranks have started it, so that nobody has to do
  // anything.
  static bool is_met(const Sent& sent) { return sent.reduced.done() || *sent.met; }
  static bool is_ready(const Sent& sent) {
    return sent.reduced.done() || (sent.is_on_stream && *sent.met);
  }
  static bool is_local(const Sent& sent) {
    return sent.replica_sum == ReplicaSum::kNone && !sent.is_total;
  }
  void start_ready_sums();
  void start_replica_sum(Sent& sent);
  void start_all_reduce(Sent& sent, const device::Pending& ready);
  device::Pending put_values(const Sent& sent);
  void put_oldest();

  GradientStream& stream_;
  ShardGradients& shards_;
  const BucketReduction reduction_;
  shard::ParamTable& params_;
  const Options options_;

  FullGradient direct_;  // the bucket's own memory, where it is a gradient
  Slot* slot_ = nullptr;
  std::array<Slot, 2> slots_;
  std::size_t next_slot_ = 0;
  std::deque<Sent> sent_;                   // and not put
  std::vector<device::Pending> in_flight_;  // since the last wait
};

}  // namespace tessera::grad
