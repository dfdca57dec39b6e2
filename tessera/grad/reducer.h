// Takes full gradients as backward finishes them, and leaves this rank's shard of their sum over
// ranks and micro-batches.
//
//   add()                copies a gradient into its bucket, if it is that bucket's turn and the
//                        bucket has a buffer; otherwise keeps the gradient until then
//   (bucket full)        starts its reduce-scatter; the next bucket's turn begins
//   reduce_dynamic()     reduces the listed dynamic parameters, on which ranks have agreed
//   finish_backward()    sends the remaining buckets, with zeros for what this rank did not touch
//   finish_replica_sums()  once per step: starts the sums over replicas that were not started yet
//   shard_gradient()     the sum over ranks and micro-batches since clear()
//   start_read()         the same for a gradient on NVMe
//
// Invariants:
//  (1) Buckets are reduced in the order of the bucket layout, which follows from registration.
//      Every backward reduces every bucket once on every rank. A gradient that was not added counts
//      as zero, never as that of an earlier step.
//  (2) A full gradient becomes this rank's piece of the sum over ranks of one micro-batch
//      (gradient_buckets.h; without other ranks it is that piece), then goes to the tier of its
//      shard's gradient (shard_gradients.h). This path is the same for any number of ranks.
//  (3) Sums over ranks are made in fp32 in rank order and rounded once to the wire type. Sums over
//      micro-batches are fp32, in order. No bit depends on tier, bucket size or timing.
//
// The moment at which a bucket is sent differs between ranks and runs. So `group` is used by the
// reducer alone while a backward runs. After the last bucket ranks exchange which parameters they
// have used (used_params.h).
//
// Threads: as Param. Works on the reduce stream, which reads gradients after the work that the
// compute stream already has. Asynchronous readers of shard gradients use the reduce stream, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/clock.h"
#include "tessera/core/dtype.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/grad/bucket.h"
#include "tessera/grad/used_params.h"
#include "tessera/quant/block_codec.h"
#include "tessera/shard/param.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/store.h"

namespace tessera {
class Config;
}

namespace tessera::grad {

class GradientBuckets;
class GradientStream;
class NvmeGradients;
class ShardGradients;
enum class ReplicaSum : std::uint8_t;

// Default of ReducerParts::most_kept_bytes: 20 ms of a 50 GB/s link, so that a device whose copies
// lag still has work.
inline constexpr std::int64_t kMostKeptBytes = std::int64_t{1} << 30;

struct ReducerOptions {
  std::int64_t bucket_bytes = std::int64_t{64} << 20;
  // Element type on the wire (before quantisation, if any): fp32, bf16 or fp16. A gradient of
  // another type is converted.
  DType wire_dtype = DType::kFloat32;
  // Block format of quantised reductions; empty: elements travel as they are. See [Note: quantised
  // reductions].
  std::optional<quant::BlockFormat> blocks = {};
  // Number of hosts in the second hop of a reduction (ReducerParts::hops); 1: one hop.
  int num_hosts = 1;

  // Pieces of parameters begin at multiples of this in a bucket.
  std::int64_t block_numel() const { return blocks ? blocks->block_numel : 1; }
  // Sets every field but num_hosts. `param_dtype` is the wire type for "auto". Throws ConfigError
  // if a block does not divide a piece.
  static ReducerOptions from(const Config& config, DType param_dtype);
};

// Where gradients on NVMe accumulate, and the host buffers through which they pass, pinned beside a
// discrete device. Both outlive the reducer, and nothing else uses the buffers. The first reducer
// with an empty store allocates its extents, in the order of registration; later reducers use the
// same ones.
struct GradientTier {
  tier::Store* store = nullptr;
  tier::BufferPool* buffers = nullptr;
};

// [Note: quantised reductions]
// With ReducerOptions::blocks (qgZ) a bucket's reduction over the group sends blocks of integers
// with scales in place of elements, in one hop or in two (inside hosts, then across them;
// bucket_reduction.h). This holds for static and dynamic parameters, in every micro-batch. Sums
// over replicas and micro-batches are not quantised; neither are norm, clipping and the search for
// non-finite values, which read the reduced result (the codec preserves non-finite values). A group
// of one quantises nothing.
//
//   each hop:  quantise what is sent, once -> dequantise and add, fp32, in rank order
//   between:   fp32                        at the end: rounded once to the wire type
//
// Blocks begin at pieces of parameters (bucket.h), so no bit depends on the bucket size; bits do
// depend on the number of hosts and of ranks. The error is measured on the way (quant_error.h).

// The groups of a reduction in two hops, cut out of ReducerParts::group: the ranks of this host, by
// local rank, and the ranks of all hosts with this local rank, by host. Local rank l on host h
// holds shard l * num_hosts + h. Only the reducer uses these groups, one call per reduction, in its
// order. Both null: one hop.
struct ReductionHops {
  comm::Group* inside = nullptr;
  comm::Group* across = nullptr;
};

// Gradients in host memory that are to be added up, in fp32 and in this order.
struct HostAddends {
  const void* values = nullptr;
  // If not null, `values` are the upper halves of an fp32 sum and these the lower halves (see
  // [Note: sums in halves] in optim/kernels.h); otherwise `values` are elements of `dtype`.
  const void* low = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<const void*> later = {};  // elements of `dtype`
};

// What a reducer works with; all of it outlives the reducer. The tier of a gradient is in its
// parameter's Placement.
struct ReducerParts {
  comm::Group& group;
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  // Kernels of the device, in stream order. Null: the host computes, which a discrete device
  // refuses.
  // sum[i] += value[i]
  std::function<device::Pending(float* sum, const void* value, DType dtype, std::int64_t numel,
                                device::Stream& stream)>
      add = {};
  // to[i] = from[i]
  std::function<device::Pending(void* to, DType to_dtype, const void* from, DType from_dtype,
                                std::int64_t numel, device::Stream& stream)>
      convert = {};
  // Computes optim's sum of squares of `values` into *result (pinned); with `continues` adds to
  // *result. If it is set, the reducer calls it for each piece of a shard as soon as the piece is
  // final: with one micro-batch, and for sums over replicas.
  std::function<device::Pending(const void* values, DType dtype, std::int64_t numel, double* result,
                                bool continues, device::Stream& stream)>
      sum_of_squares = {};
  // The same on the host, by its threads. These calls block, and may run on a thread of the
  // reducer. Required where gradients of several micro-batches are kept in host memory.
  std::function<void(float* to, const void* value, DType dtype, std::int64_t numel)> host_widen =
      {};
  std::function<void(float* sum, const void* value, DType dtype, std::int64_t numel)> host_add = {};
  std::function<double(const HostAddends& addends, std::int64_t numel)> host_sum_of_squares = {};
  // Replaces the first addend by the sum of all.
  std::function<void(const HostAddends& addends, std::int64_t numel)> host_fold = {};
  // Expected backwards per step: decides which memory is taken ahead, and its type. 0: unknown.
  // Further backwards are accepted, and take more memory.
  int num_micro_batches = 0;
  // Buffers per gradient in host memory. With fewer buffers than micro-batches, earlier ones are
  // added up there; see least_host_buffers(). 0: one per micro-batch.
  int num_host_buffers = 0;
  // Limit on full gradients held for unfinished copies, kernels and reductions. Above it add()
  // waits for the oldest, unless that one still depends on another rank.
  std::int64_t most_kept_bytes = kMostKeptBytes;
  // Reduces dynamic parameters; has the ranks of `group` in the same order. Null: `group` does,
  // which requires that all ranks use the same static parameters between two lists.
  comm::Group* dynamic_group = nullptr;
  // Codec for ReducerOptions::blocks in device memory; outlives the reducer. Null: reductions are
  // not quantised.
  const comm::Codec* codec = nullptr;
  ReductionHops hops = {};          // hops of `group`
  ReductionHops dynamic_hops = {};  // hops of `dynamic_group`
  // The ranks that hold this shard in the other copies of the model, by copy. Nothing else uses the
  // group while gradients are summed. Null: there is one copy. See [Note: sums over replicas].
  comm::Group* replicas = nullptr;
  // All ranks that train the model: they exchange which parameters were used (used_params.h), in
  // finish_backward(). Null: `group`.
  comm::Group* all_ranks = nullptr;
  // shard_of_rank[r] is the shard index of rank r of this group; empty: r. The two differ where
  // shards are numbered so that hierarchical gathers are contiguous; sums follow rank order.
  std::vector<int> shard_of_rank = {};
  // True: memory is taken at construction, as gradient_bytes.h plans it; false: when first needed.
  bool is_planned = false;
  GradientTier nvme = {};
  // optim's sum of squares of at most kPieceStep elements. Required where gradients are on NVMe.
  std::function<double(const float* values, std::int64_t numel)> block_sum_of_squares = {};
  // Charged for autograd gradients that a group of one adopts; null: not charged.
  Ledger* ledger = nullptr;
};

// A full gradient in the memory order of its parameter, without padding. add() passes the memory to
// the reducer, which writes to it; the caller must not use it any more.
struct FullGradient {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::shared_ptr<void> owner;  // keeps `data` alive; dropped as soon as possible
};

// Error of what this rank has quantised (quant_error.h).
struct QuantErrorStats {
  double error_squares = 0;  // sum of (decoded - original)^2, finite values only
  double value_squares = 0;
  // The parameter with the largest relative error; negative: none.
  int worst_param = -1;
  double worst_error = 0;

  // sqrt(error_squares / value_squares); 0 if nothing was measured.
  double relative() const;
  QuantErrorStats& operator+=(const QuantErrorStats& other);
};

struct ReducerStats {
  std::uint64_t num_reductions = 0;  // buckets
  std::uint64_t reduced_bytes = 0;   // whole buckets (all ranks' parts), in the wire type
  std::uint64_t sent_bytes = 0;      // by this rank, for these reductions
  QuantErrorStats quant_error;
  std::uint64_t num_replica_sums = 0;  // calls
  std::uint64_t replica_bytes = 0;     // of this rank's shards, summed over replicas
  std::int64_t held_bytes_peak = 0;    // gradients kept for their turn or for a buffer
  double exposed_wait_s = 0;
  std::uint64_t host_bytes = 0;    // of a discrete device's gradients, D2H: to the host, or to NVMe
  std::uint64_t loaded_bytes = 0;  // and H2D: those that are summed over replicas on the device
  // NVMe traffic, in whole blocks. Reads are made by later micro-batches and by start_read().
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_written_bytes = 0;
};

// The gradient of this rank's shard: `numel` values. Where gradients are sent to other ranks, the
// shard's padding follows them and is zero.
struct ShardGradient {
  float* data = nullptr;  // fp32 in the device's memory; null: on NVMe, or see `values`
  std::int64_t numel = 0;
  const void* values = nullptr;  // in `dtype`; null: on NVMe
  DType dtype = DType::kFloat32;
  // optim's sum of squares of `values`, in pinned memory, written by the reduce stream; null: not
  // computed on the way.
  const double* squares = nullptr;
  // True: the gradient is a sum of addends in pinned host memory: `values` (with `low`), then
  // `later`, all of `dtype`; see HostAddends.
  bool is_on_host = false;
  const void* low = nullptr;
  std::vector<const void*> later;
  device::Pending ready;  // all of the above
};

// Memory, taken when first needed, or at construction with is_planned (gradient_bytes.h): two
// buckets of wire elements, so that one fills while the other is on the wire, and two results; the
// region for gradients that stay on the device; the same buckets and results again for dynamic
// parameters; with two hops one fp32 result of the first hop per bucket. Exceptions:
//  (1) A bucket that is one whole parameter without padding, whose gradient has the wire type, is
//      reduced from the gradient's own memory, where ranks hold shards in rank order.
//  (2) In a group of one an fp32 gradient is adopted as it is: no copy, no region, no call. So is a
//      bf16 or fp16 gradient on a discrete device, until another micro-batch is added to it.
class Reducer {
 public:
  // Reduces the gradients of the parameters that are trainable now, each as dynamic or static as it
  // is now. When that changes: clear(), destroy the reducer and make another, on all ranks.
  Reducer(const ReducerParts& parts, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Begins a backward. add(), reduce_dynamic() and finish_backward() call it if needed.
  void begin_backward();
  // Throws ConfigError, and changes nothing, for a gradient of a frozen parameter, one of a type
  // that cannot be converted here, and a second gradient of one parameter in one backward (a hook
  // fires once per parameter and backward, so finish_backward() was not called in between).
  //
  // [Note: a reduction never waits for a rank that waits]
  // A buffer is free again when the reduction two buckets back has ended. A rank that does not use
  // some parameter of that bucket, or is out of data, sends that bucket only at the end of its
  // backward; to get there it needs gathers and lists in which this rank takes part. So add() waits
  // for a buffer only if all ranks have started its reduction (CallOptions::met): then completion
  // depends on the network alone. Otherwise the gradient is kept, and every later call looks again.
  // finish_backward() may block on other ranks, because no rank needs anything more from this one.
  // reduce_dynamic() waits for buffers of earlier lists and, in a common group, for static buckets:
  // ranks have agreed on the list, and start all of those first. shard_gradient() and clear() wait
  // for the rest.
  // With replicas a buffer is free when the sum over them has ended. That sum starts only when all
  // ranks of the group have started the reduction before it. So once all replicas have started the
  // sum, its completion depends on the network alone, too; otherwise the gradient is kept.
  // Timing thus decides how long gradients are kept, but neither the order of reductions nor a bit.
  void add(const shard::Param& param, FullGradient gradient);
  // [Note: dynamic parameters] Some ranks do not use them in a step. They are in no bucket, so that
  // unused ones cost nothing. Their gradients are kept until all ranks have agreed, in an exchange
  // outside the reducer, on a list to reduce. The list fixes what is reduced together and in which
  // order. A rank without a gradient of a listed parameter contributes zeros; if it gets that
  // gradient later, the parameter is listed again. The sum is made in the order of the lists. A
  // dynamic parameter that is listed once in every backward of a step has the bits it would have as
  // a static one. Lists use a group of their own (ReducerParts::dynamic_group), in which every call
  // is agreed on; `group` will do if all ranks use the same static parameters between two lists,
  // because full buckets are sent before the list.

  // Ids, ascending, of dynamic parameters whose gradient was added in this backward and has not
  // been reduced: what this rank would put on the list. Empty where nothing is sent to other ranks.
  std::vector<int> pending_dynamic() const;
  // `ids`: dynamic parameters, the same in the same order on every rank, each at most once. Starts
  // their reductions, and counts each gradient once, however often its parameter is listed.
  void reduce_dynamic(std::span<const int> ids);
  // Drops the pending gradients of dynamic parameters, after an exception.
  void drop_dynamic();
  // REQUIRES: pending_dynamic() is empty (InternalError that names the first), and no rank lists
  // anything more in this backward, because this call waits for buckets that others may send only
  // here.
  void finish_backward();
  bool in_backward() const { return in_backward_; }
  // [Note: sums over replicas]
  // Where several groups of ranks hold a copy of the model each (MiCS, hybrid sharding), gradients
  // are summed over the ranks of a group in every micro-batch, and over the copies once per step:
  //
  //   over the group, wire type -> over micro-batches, fp32 -> over replicas, in their order
  //
  // The last micro-batch of a step (number num_micro_batches) all-reduces each bucket over the
  // replicas as soon as it is reduced, while backward goes on. With one micro-batch that is the
  // bucket's result itself, in the wire type, before it goes to its tier. With several it is the
  // accumulated gradient plus this micro-batch, in fp32, in the bucket's slot; the sum replaces the
  // accumulated gradient. A backward after that one sums its own micro-batch over replicas, in the
  // wire type, and adds the result. If num_micro_batches is unknown or was not reached,
  // finish_replica_sums() sums the accumulated gradients, in fp32. So bits depend on
  // num_micro_batches and on the number of backwards alone.
  //
  // Dynamic parameters are summed over replicas from the tier where they accumulate, at the end of
  // the last micro-batch and of every later backward, if they were listed since the previous sum:
  // in fp32; in the wire type if a step has one micro-batch, in which the parameter was listed
  // once. What is listed after such a sum is added to it on the first replica, and to zero on the
  // others.
  //
  // Order of calls on `replicas`: the buckets of a backward that sums, in bucket order, then at its
  // end dynamic parameters, by id. In finish_replica_sums() buckets, then dynamic parameters; all
  // ranks make that call, explicit or implied, at the same point.

  // Starts the sums over replicas that no backward has started. Call it after the last backward of
  // a step; later backwards count as after the last micro-batch. Collective over `replicas` and
  // `group`, outside of a backward; does nothing if all were started. wait() and what reads
  // gradients call it if needed: without this call the first of them is collective.
  void finish_replica_sums();
  // True if some rank got a gradient of the parameter since clear(), so that torch would update it.
  // Outside of a backward. Waits for the other ranks' used-parameter exchange, not for the device.
  bool has_gradient(int param);
  // Blocks until all sums have reached their tier; throws the first failure, on NVMe with the
  // parameter's name. What reads gradients calls it.
  void wait();
  // Waits for all reductions. The gradient is zero if none was added since clear(). To read it on
  // the host, wait for `ready`.
  ShardGradient shard_gradient(int param);
  // True if the reduce stream alone orders gradients: a discrete device, no gradient in host memory
  // or on NVMe, and stream-ordered groups.
  bool is_ordered() const;
  // As shard_gradient(), for work on the reduce stream, without waiting for the device. Where ranks
  // compare tags before they enqueue, it waits for their threads. REQUIRES: is_ordered().
  ShardGradient ordered_gradient(int param);
  // Blocks until all ranks have started the same reductions; throws on disagreement. Call it before
  // work of the reduce stream writes a parameter. Waits for no device where is_ordered().
  void wait_agreed();
  // Blocks until all reductions have ended, but not for later work of the stream. Throws the first
  // failure.
  void wait_reduced();

  bool is_on_nvme(int param) const;
  // Reads elements [begin, begin + numel) of a shard on NVMe, where begin is a multiple of 1024;
  // zeros if none was added since clear(). `to` holds whole blocks and is aligned to one; it gets
  // zeros after the end of the shard. On a thread other than the reducer's only after wait().
  // REQUIRES: clear() is called when all such reads are done.
  device::Pending start_read(int param, std::int64_t begin, std::int64_t numel, float* to);
  // optim's sum_of_squares() of this rank's shard, to the bit, where it was computed on the way: on
  // NVMe, and with ReducerParts::sum_of_squares. Reads no gradient.
  std::optional<double> sum_of_squares(int param);

  // Declares that only the update that was started still reads this gradient. In a group of one
  // autograd's memory is then freed when Param::updated() is done, instead of in clear().
  void free_gradient(int param);

  int num_backwards() const { return num_backwards_; }  // finished, since clear()
  // Call it after the update. It also recovers from an exception: waits for reductions in flight
  // and drops all gradients. Throws nothing: a failed reduction has poisoned its group, which
  // repeats the failure. After an exception every rank must have added the same gradients: then all
  // ranks start the same reductions, here at the latest. Ranks that may have stopped at different
  // gradients, or that use different ones, first call drop_dynamic() and finish_backward(): then
  // all ranks have started all of them, if they stopped between the same two lists.
  void clear();
  // For an owner that is destroyed after a failure and cannot rely on the other ranks: they may
  // need this one elsewhere before they start the reductions in flight here. Gives them one second,
  // then aborts the groups, so that clear() and the destructor wait for no rank. The destructor
  // calls it while an exception unwinds.
  void leave() noexcept;
  const BucketLayout& layout() const { return layout_; }
  ReducerStats take_stats();

 private:
  const shard::Param& trainable(int id) const;
  // Blocks until all sums are complete. REQUIRES: outside of a backward.
  void finish_sums(const shard::Param& param);
  NvmeGradients& finished_nvme(int id);
  void check_list(std::span<const int> ids) const;
  void check_shards() const;
  ReplicaSum replica_sum_of_backward() const;
  bool is_under_way();

  shard::ParamTable& params_;
  Spans& spans_;
  const BucketLayout layout_;
  const std::unique_ptr<GradientStream> stream_;
  std::vector<bool> is_added_;  // by id, in this backward
  UsedParams used_;             // since clear()
  bool in_backward_ = false;
  int num_backwards_ = 0;
  bool is_total_ = false;    // accumulated gradients are summed over replicas
  bool is_finished_ = true;  // nothing was started since the last wait
  const std::unique_ptr<ShardGradients> shards_;
  const std::unique_ptr<GradientBuckets> buckets_;  // null: nothing is sent to other ranks
  const int num_exceptions_ = std::uncaught_exceptions();
};

}  // namespace tessera::grad
