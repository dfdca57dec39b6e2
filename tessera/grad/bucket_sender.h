// Internal to grad: fills one bucket after the other and reduces them over the ranks of a copy
// (bucket_reduction.h), and over those with the same shards of other copies of the model
// (ReducerParts::replicas).
//
// A bucket that must be filled, or whose result does not stay where the reduction writes it,
// borrows a slot: a buffer for the wire and memory for the result, which has the wire type. There
// are two slots, used in turn; before a slot is reused, the stream is ordered after the reduction
// that used it and after the copy of its result to its tier. A bucket that is reduced from the
// gradient's own memory into the region needs no slot, unless it takes two hops: the slot has the
// first hop's result.
//
// Over replicas a result is summed in place, before it is put; or it is added to the accumulated
// gradient, in fp32 in the slot's buffer, which is free after the reduction, and the sum over
// replicas replaces the accumulated gradient. See [Note: sums over replicas] in reducer.h.
//
// Invariants:
//  (1) Between send() and send() all calls to put() and put_zeros() are for one bucket.
//  (2) Waits only for its own reductions, two buckets back. Where ranks have not agreed to send the
//      same buckets one after the other, waits_for_no_rank() comes before a put().
//  (3) Results are put in the order in which they were sent: as soon as that blocks on no rank
//      (put_ready()), and at the latest when their slot is needed. Sums over replicas are started
//      in that order, too, and put after them.
//  (4) Unless everything is work of streams, a sum over replicas is started only if all ranks have
//      started the reduction that it needs, or if this rank's thread may wait for them. So once all
//      replicas have started it, its end depends on no rank's thread.
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
  kResult,  // the result, in the wire type
  kTotal,   // the accumulated gradient plus the result, in fp32
};

class BucketSender {
 public:
  struct Options {
    DType wire_dtype = DType::kFloat32;
    std::int64_t largest_shard_numel = 0;  // the largest bucket that will be sent
    bool has_totals = false;               // accumulated gradients will be summed over replicas
    QuantError* quant_error = nullptr;     // null: nothing is quantised
  };
  BucketSender(GradientStream& stream, ShardGradients& shards, BucketReduction reduction,
               const Options& options);

  // Allocates this many slots now.
  void reserve(std::size_t num_slots);
  // The next bucket takes the first slot, so that a model with one bucket needs no second one.
  // REQUIRES: what is sent before the next call goes to the same ranges as before, in the same
  // order.
  void rewind() { next_slot_ = 0; }
  // True if the next put() waits for the network at most: all ranks have started what it waits for,
  // if anything. Once true, it stays true until the next send(). May start sums over replicas, and
  // wait for the network to do so.
  bool waits_for_no_rank();
  // The owner keeps the gradient's memory until the work enqueued so far is done.
  void put(const Bucket& bucket, const Piece& piece, const FullGradient& gradient);
  void put_zeros(const Bucket& bucket, const Piece& piece);
  void send(const Bucket& bucket, const comm::Label& label,
            ReplicaSum replica_sum = ReplicaSum::kNone);
  // Starts the requested sums over replicas; waits for the ranks of the group.
  void start_replica_sums();
  // Sums the accumulated gradients over replicas, without another micro-batch: in fp32, or in the
  // wire type if there is only one micro-batch. REQUIRES: put_all(). May wait for the ranks of a
  // bucket before this one.
  void sum_home(const Bucket& bucket, DType dtype);
  // Puts results that are complete, or, where calls are work of streams, will complete without this
  // thread.
  void put_ready();
  // Puts all results in stream order; waits for no device where calls are work of streams.
  void put_all();
  // Blocks until all reductions have ended, but not for later work of the stream; throws the first
  // failure. The caller counts the time.
  void wait_reduced();
  // Blocks until all results are put, and the stream is done; throws the first failure.
  void wait();
  // Waits for calls in flight, ignoring failures; drops the bucket that was being filled.
  void clear() noexcept;
  // True if something is in flight.
  bool is_under_way() const;

 private:
  struct Slot {
    device::Memory buffer;
    device::Memory result;
    device::Memory partial;  // result of the first hop; none with one hop
    bool is_taken = false;   // by what is sent, or being filled
    device::Pending used;    // other readers of the last result
  };
  struct Sent {
    std::vector<Piece> pieces;
    std::int64_t shard_numel = 0;
    std::byte* values = nullptr;  // the result, in `dtype`
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
