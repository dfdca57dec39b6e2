// Takes full gradients as backward finishes them, and leaves this rank's piece of their sum over
// ranks and micro-batches.
//
//   add()              copies a gradient into its bucket, if that bucket's turn has come and it has
//                      a buffer; else keeps it until then
//   (bucket full)      reduce-scatter is started; the next bucket's turn begins
//   reduce_dynamic()   ranks have agreed on some dynamic parameters: reduced now
//   finish_backward()  sends the rest, with zeros for what this rank did not touch
//   finish_replica_sums()  once per step: the sums over replicas, where there are any, are started
//   shard_gradient()   after it: sums over ranks and micro-batches since clear()
//   start_read()       the same of a gradient on NVMe
//
// Order of reductions: bucket layout, hence registration. Every backward reduces every bucket once
// on every rank, whether or not this rank has touched it: a gradient that was not added is zero,
// never last step's, and ranks that used different parameters still meet. When a bucket is sent
// depends on what this rank has used, and on time: give the reducer a group of its own, in which
// nothing else is called while a backward runs. Behind the last bucket ranks tell each other what
// they have used (used_params.h).
//
// Dynamic parameters, which only some ranks use in a step, are in no bucket, so that those that
// nobody uses cost nothing. Their gradients are kept until all ranks have agreed, in an exchange
// that is not ours, on a list of those to reduce: the list fixes what is reduced together and in
// which order. pending_dynamic() is what this rank would have on it; a rank that has no gradient of
// a listed parameter gives zeros, and one that gets its gradient later asks again. The sum is made
// in the order of the lists. Reduced once in every backward of a step, a dynamic parameter has the
// bits it would have as a static one. Lists need a group of their own, in which nothing is called
// at moments on which ranks did not agree, unless all ranks use the same static parameters between
// two lists: then what is full is sent before the list.
//
// One path for any number of ranks: a full gradient becomes this rank's piece of the sum over ranks
// of one micro-batch (gradient_buckets.h; where nothing has to be sent to anybody it is that
// piece), and goes where its shard's gradient lives (shard_gradients.h): device, host or NVMe.
// Numbers: sums over ranks are made in fp32 in rank order and rounded once to the type on the wire;
// sums over micro-batches are fp32, in order. So no bit depends on the tier.
//
// [Note: sums over replicas]
// Where several groups of ranks hold a copy of the model each (MiCS, hybrid sharding), gradients
// are summed over the ranks of a group in every micro-batch, and over the copies once per step:
//
//   over the group, wire's type -> over micro-batches, fp32 -> over replicas, in their order
//
// The backward with number num_micro_batches is the boundary. There each bucket is summed over
// replicas as soon as it is reduced, while backward goes on: of a single micro-batch the result
// itself, in the wire's type, where it lies, and before it is put; of several what is at home with
// the last micro-batch, in fp32, in the slot of its bucket, and that replaces what is at home. A
// backward behind the boundary sums its own micro-batch over replicas, in the wire's type, and that
// is added. Where the boundary was not reached, or is not known, finish_replica_sums() sums what is
// at home, in fp32. Which of these it is depends on num_micro_batches and on the number of
// backwards alone; so does each bit.
//
// Dynamic parameters are summed over replicas from where they are, at the end of the boundary and
// of each backward behind it, if they were listed since the last time. In fp32; if there is one
// micro-batch, in which a parameter was listed once, in the wire's type. What is listed behind such
// a sum is added to it in the first replica, and to zero in the others.
//
// What fixes the order of calls on `replicas`: buckets, in their order, in a backward that sums;
// behind them dynamic parameters, by id, at its end; buckets and dynamic parameters in
// finish_replica_sums(), which is called at the same place on all ranks, as are the first of those
// that read gradients, in which it is called.
//
// Memory, taken when first needed, or at construction where it is planned (gradient_bytes.h): two
// buckets of wire elements, so that one fills while the other is on the wire, and two results; the
// region of shards that stay on the device; the same buckets and results once more for dynamic
// parameters; with two hops, with each bucket, the first one's result in fp32. A bucket that is one
// whole parameter without padding, whose gradient has the wire's type, is reduced from the
// gradient's own memory, where ranks hold shards in their own order. Where nothing is sent an fp32
// gradient is adopted as it is, and so is one in bf16 or fp16 on a discrete device until another
// micro-batch is added to it: no copy, no region, no call.
//
// [Note: quantised reductions]
// With ReducerOptions::blocks (qgZ) a bucket's reduction over the group moves blocks of integers
// with scales in place of elements, in one hop, or inside hosts and then across
// (bucket_reduction.h), of static and dynamic parameters alike, in every micro-batch. Sums over
// replicas and micro-batches are exact, and so are norm, clipping and the search for values that
// are not finite: they are of what arrives, and the codec keeps what is not finite so. A group of
// one quantises nothing.
//
//   each hop:  quantise what is sent, once -> dequantise and add, fp32, in rank order
//   between:   fp32                        at the end: rounded once to the wire's type
//
// Blocks begin at pieces of parameters (bucket.h), so here, too, the size of a bucket changes no
// bit; the number of hosts does, as the number of ranks. What it costs in accuracy is measured on
// the way (quant_error.h).
//
// [Note: a reduction never waits for a rank that waits]
// A buffer is free again when the reduction two buckets back has ended. A rank that does not use
// some parameter of that bucket, or is out of data, sends it only at the end of its backward; to
// get there it needs gathers and lists in which this rank takes part. So add() waits for a buffer
// only if all ranks have started its reduction (CallOptions::met): then the end depends on nobody
// but the network. Else the gradient is kept, and every later call looks again. finish_backward()
// waits for other ranks: it has nothing left in which they need this one. reduce_dynamic() waits
// for buffers of earlier lists and, in a common group, for static ones: ranks have agreed on it,
// and start all that before anything else. The rest is waited for by shard_gradient() and clear().
// With replicas a buffer is free when the sum over them has ended. That is started only when all
// ranks of the group have started the reduction before it, so once all replicas have started it,
// its end, too, depends on nobody but the network; else the gradient is kept.
// So time decides how long gradients are kept, but neither the order of reductions nor a bit.
//
// Threads: as Param. Works on the reduce stream; gradients are read after what the compute stream
// has been given. What reads shard gradients asynchronously does so on the reduce stream.
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

// 20 ms of a link of 50 GB/s: a device whose copies are behind still has work.
inline constexpr std::int64_t kMostKeptBytes = std::int64_t{1} << 30;

struct ReducerOptions {
  std::int64_t bucket_bytes = std::int64_t{64} << 20;
  // Type on the network, or of what is quantised for it: fp32, bf16 or fp16. A gradient of another
  // type is converted.
  DType wire_dtype = DType::kFloat32;
  // How it is quantised; none: it travels as it is. See [Note: quantised reductions].
  std::optional<quant::BlockFormat> blocks = {};
  // Hosts that a reduction goes across in a second hop (ReducerParts::hops); 1: one hop.
  int num_hosts = 1;

  // Pieces of parameters begin at multiples of it in a bucket.
  std::int64_t block_numel() const { return blocks ? blocks->block_numel : 1; }
  // All but num_hosts. `param_dtype` decides "auto". Throws ConfigError for blocks that are none of
  // a piece.
  static ReducerOptions from(const Config& config, DType param_dtype);
};

// Where gradients on NVMe accumulate, and the host buffers through which they pass; both outlive
// the reducer, and the buffers are the reducer's alone, pinned beside a discrete device. The first
// reducer that is given an empty store allocates extents there, in the order of registration; later
// ones use the same.
struct GradientTier {
  tier::Store* store = nullptr;
  tier::BufferPool* buffers = nullptr;
};

// Of reductions in two hops, the ranks of ReducerParts::group: those on this host, by local rank;
// and those of all hosts with this local rank, by host. Shard l * num_hosts + h is that of local
// rank l on host h. Groups of the reducer's own, with one call per reduction, in its order. Both
// null: one hop.
struct ReductionHops {
  comm::Group* inside = nullptr;
  comm::Group* across = nullptr;
};

// Values in memory of the host whose sum is meant, made in fp32 and in this order.
struct HostAddends {
  const void* values = nullptr;
  // `values` are the upper halves of a sum in fp32, these the lower ones (optim/kernels.h, [Note:
  // sums in halves]); null: they are elements of `dtype`.
  const void* low = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<const void*> later = {};  // of this type
};

// Where a gradient goes is its parameter's placement.
struct ReducerParts {
  comm::Group& group;
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  // Kernels of the device, in the order of the stream. Null: on the host, which a discrete device
  // refuses.
  // sum[i] += value[i]
  std::function<device::Pending(float* sum, const void* value, DType dtype, std::int64_t numel,
                                device::Stream& stream)>
      add = {};
  // to[i] = from[i]
  std::function<device::Pending(void* to, DType to_dtype, const void* from, DType from_dtype,
                                std::int64_t numel, device::Stream& stream)>
      convert = {};
  // *result, in pinned memory, is optim's sum of squares; `continues`: of these values behind those
  // whose sum it is. Given: made of a shard as its pieces become complete, if there is one
  // micro-batch.
  std::function<device::Pending(const void* values, DType dtype, std::int64_t numel, double* result,
                                bool continues, device::Stream& stream)>
      sum_of_squares = {};
  // The same in memory of the host, by its threads; they block, and may be called on a thread of
  // the reducer's. Needed where gradients of several micro-batches are there.
  std::function<void(float* to, const void* value, DType dtype, std::int64_t numel)> host_widen =
      {};
  std::function<void(float* sum, const void* value, DType dtype, std::int64_t numel)> host_add = {};
  std::function<double(const HostAddends& addends, std::int64_t numel)> host_sum_of_squares = {};
  // Their sum takes the place of the first.
  std::function<void(const HostAddends& addends, std::int64_t numel)> host_fold = {};
  // Backwards of a step, which decide what memory is taken ahead and in which type; 0: not known.
  // More may come, and take more.
  int num_micro_batches = 0;
  // Of a gradient on the host, memory for so many micro-batches, in which they are added up if they
  // are more; see least_host_buffers(). 0: for each.
  int num_host_buffers = 0;
  // Full gradients that are still read, by copies, kernels or reductions, are kept up to so many
  // bytes; then add() waits for the oldest, if that waits for no rank.
  std::int64_t most_kept_bytes = kMostKeptBytes;
  // Of the same ranks in the same order: reduces dynamic parameters. Null: `group`, if all ranks
  // use the same static parameters between two lists.
  comm::Group* dynamic_group = nullptr;
  // Of ReducerOptions::blocks, for memory of the device; outlives the reducer. Null: there are
  // none.
  const comm::Codec* codec = nullptr;
  ReductionHops hops = {};          // of `group`
  ReductionHops dynamic_hops = {};  // of `dynamic_group`
  // Ranks that hold the same shard of other copies of the model, by copy: this reducer's own group,
  // in which nothing else is called while gradients are summed. Null: there is one copy.
  comm::Group* replicas = nullptr;
  // All ranks that train the model, for what is exchanged about used parameters (used_params.h), in
  // finish_backward(). Null: `group`.
  comm::Group* all_ranks = nullptr;
  // The place of this group's rank r among the shards is shard_of_rank[r]; empty: r. Where shards
  // are numbered so that hierarchical gathers are contiguous, the group's rank order, in which sums
  // are made, is not the order of shards.
  std::vector<int> shard_of_rank = {};
  // Memory is planned (gradient_bytes.h), and taken at once.
  bool is_planned = false;
  GradientTier nvme = {};
  // Of at most kPieceStep elements; optim's. Needed where gradients are on NVMe.
  std::function<double(const float* values, std::int64_t numel)> block_sum_of_squares = {};
  // Charged with gradients that a group of one adopts; null: nobody is.
  Ledger* ledger = nullptr;
};

// A full gradient in the memory order of its parameter, without padding. The memory belongs to the
// reducer from then on, and is written to: nobody else may use it.
struct FullGradient {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::shared_ptr<void> owner;  // keeps the memory; dropped as soon as it is not needed
};

// Of what this rank has quantised, see quant_error.h.
struct QuantErrorStats {
  double error_squares = 0;  // of what became of the values, less these; finite
  double value_squares = 0;
  // The parameter with the largest relative error; negative: none.
  int worst_param = -1;
  double worst_error = 0;

  // Root of the quotient; 0 where nothing was measured.
  double relative() const;
  QuantErrorStats& operator+=(const QuantErrorStats& other);
};

struct ReducerStats {
  std::uint64_t num_reductions = 0;  // buckets
  std::uint64_t reduced_bytes = 0;   // of buckets, all ranks' parts, in the wire's type
  std::uint64_t sent_bytes = 0;      // by this rank, for these
  QuantErrorStats quant_error;
  std::uint64_t num_replica_sums = 0;  // calls
  std::uint64_t replica_bytes = 0;     // of this rank's shards that were summed over replicas
  std::int64_t held_bytes_peak = 0;    // gradients that waited for their turn, or for a buffer
  double exposed_wait_s = 0;
  std::uint64_t host_bytes = 0;    // of a discrete device's gradients, D2H: to the host, or to NVMe
  std::uint64_t loaded_bytes = 0;  // ... and H2D: those that are summed over replicas on the device
  // NVMe, whole blocks. Reads are those of later micro-batches, and of start_read().
  std::uint64_t nvme_read_bytes = 0;
  std::uint64_t nvme_written_bytes = 0;
};

// Values of this rank's shard, `numel` of them without padding. Where gradients are sent to other
// ranks the shard's padding follows, and is zero.
struct ShardGradient {
  float* data = nullptr;  // fp32 in the device's memory; null: on NVMe, or see `values`
  std::int64_t numel = 0;
  const void* values = nullptr;  // in `dtype`; null: on NVMe
  DType dtype = DType::kFloat32;
  // Where the reduce stream puts optim's sum of squares of `values`, in pinned memory; null: it is
  // not made on the way.
  const double* squares = nullptr;
  // It is the sum of these, in pinned memory of the host, of which `values` and `dtype` are the
  // first; see HostAddends.
  bool is_on_host = false;
  const void* low = nullptr;
  std::vector<const void*> later;
  device::Pending ready;  // of all of them
};

class Reducer {
 public:
  // Parameters that are trainable now are those whose gradients are reduced, dynamic or not as they
  // are now; where that changes, clear(), destroy the reducer and make another, on all ranks.
  Reducer(const ReducerParts& parts, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // A backward has begun. add(), reduce_dynamic() and finish_backward() say it by themselves.
  void begin_backward();
  // Throws ConfigError for a gradient of a frozen parameter, one of a type that cannot be converted
  // here, and one that comes twice in one backward: a hook fires once per parameter and backward,
  // so two mean two backward calls without finish_backward(). Nothing has changed then.
  void add(const shard::Param& param, FullGradient gradient);
  // Ids, ascending, of dynamic parameters whose gradient was added in this backward and has not
  // been reduced. Where nothing is sent to other ranks there are none.
  std::vector<int> pending_dynamic() const;
  // Every rank gives the same ids of dynamic parameters in the same order, each at most once.
  // Starts their reductions, and counts each gradient once, however often its parameter is listed.
  void reduce_dynamic(std::span<const int> ids);
  // Forgets what is pending, after an exception.
  void drop_dynamic();
  // REQUIRES: nothing is pending; anything else is an InternalError that names it. No rank has
  // another list in this backward: this one waits for buckets that the others may send only here.
  void finish_backward();
  bool in_backward() const { return in_backward_; }
  // Behind the last backward of a step: the sums over replicas are started, of those buckets and
  // dynamic parameters whose sums were not started at a boundary. Collective, on all ranks of
  // `replicas` and `group`, outside of a backward; does nothing where all are started. What reads
  // gradients, and wait(), do it by themselves: without this call their first is collective.
  // Backwards that follow count as behind the boundary.
  void finish_replica_sums();
  // Some rank got a gradient of it since clear(): torch would update it. Outside of a backward.
  // Waits for the other ranks' word, not for the device.
  bool has_gradient(int param);
  // Blocks until all sums are where they stay; throws what went wrong, on NVMe with the parameter's
  // name. What reads gradients does it by itself.
  void wait();
  // Waits for all reductions. Zero where no gradient came since clear(). What reads one on
  // the host waits for `ready`.
  ShardGradient shard_gradient(int param);
  // Whether the reduce stream alone orders gradients: on a discrete device, where none goes to the
  // host or to NVMe, and reductions are work of streams.
  bool is_ordered() const;
  // The same for work on the reduce stream, without a wait for the device. Where ranks compare tags
  // before they enqueue, it waits for their threads. REQUIRES: is_ordered().
  ShardGradient ordered_gradient(int param);
  // What becomes a parameter by work of the reduce stream: blocks until all ranks have started the
  // same reductions; throws what went wrong. Waits for no device where is_ordered().
  void wait_agreed();
  // Blocks until all reductions have ended, and not for what the stream was given behind them;
  // throws what went wrong.
  void wait_reduced();

  bool is_on_nvme(int param) const;
  // On NVMe: elements [begin, begin + numel) of the shard, where begin is a multiple of
  // 1024; zeros where none was added since clear(). `to` holds whole blocks and is aligned
  // to one; behind the end of the shard are zeros. On another thread than the reducer's only after
  // wait(). REQUIRES: clear() comes when all such reads are done.
  device::Pending start_read(int param, std::int64_t begin, std::int64_t numel, float* to);
  // What optim's sum_of_squares() of this rank's shard is, to the bit, where it was made on the
  // way: on NVMe, and of whole gradients (ReducerParts::sum_of_squares). Nothing is
  // read for it.
  std::optional<double> sum_of_squares(int param);

  // Nobody needs this gradient but the update that was started. In a group of one autograd's memory
  // is freed as soon as Param::updated() is done, and not only in clear().
  void free_gradient(int param);

  int num_backwards() const { return num_backwards_; }  // finished ones, since clear()
  // After the update; also the way back after an exception: waits for what is in flight, forgets
  // what was added. Throws nothing: a reduction that failed has poisoned its group, which repeats
  // it. After an exception every rank must have got the same gradients: then all start the same
  // reductions, here at the latest. Ranks that may have stopped at different gradients, or that use
  // different ones, call drop_dynamic() and finish_backward() first: then all have started all, if
  // they stood between the same two lists.
  void clear();
  // For an owner that goes because something has failed, and cannot rely on the other ranks: they
  // may need this one for something else before they start what is in flight here. Gives them a
  // second to do so, and then aborts the groups, so that clear() and the destructor wait for
  // nobody. The destructor does it where an exception is the reason for it.
  void leave() noexcept;
  const BucketLayout& layout() const { return layout_; }
  ReducerStats take_stats();

 private:
  const shard::Param& trainable(int id) const;
  // Blocks until all sums are there. Outside of a backward.
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
  bool is_total_ = false;    // what is at home is summed over replicas
  bool is_finished_ = true;  // nothing has been started since the last wait
  const std::unique_ptr<ShardGradients> shards_;
  const std::unique_ptr<GradientBuckets> buckets_;  // null: nothing is sent
  const int num_exceptions_ = std::uncaught_exceptions();
};

}  // namespace tessera::grad
