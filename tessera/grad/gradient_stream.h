// Internal to grad: the work on gradients on the reduce stream, and the lifetime of their memory.
//
// Everything here is enqueued and ordered after the work that the compute stream had when
// order_behind_compute() was called. Conversions and sums are kernels of ReducerParts, if given;
// otherwise they run on the host, which requires that device memory is host memory.
//
// [Note: NVMe on the stream] Transfers to NVMe are work of the stream, too: they wait there for
// buffers and for earlier writes, which depend on the disk alone and never on a waiter for this
// stream. So memory that they read may be reused after them in stream order, as after any copy. A
// discrete device's stream waits for no disk: there a thread transfers, in the same order and after
// the stream's earlier work, and memory that it reads may be reused when it is done.
//
// Threads: as Reducer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "tessera/grad/gradient_bytes.h"
#include "tessera/grad/host_work.h"
#include "tessera/grad/nvme_gradients.h"
#include "tessera/grad/reducer.h"

namespace tessera::grad {

inline std::int64_t bytes_of_full(const shard::Param& param, const FullGradient& gradient) {
  return param.layout().numel() * static_cast<std::int64_t>(bytes_of(gradient.dtype));
}

class GradientStream {
 public:
  explicit GradientStream(const ReducerParts& parts);

  // Throws ConfigError with the name unless elements of `from` can become elements of `to` here.
  void check_convertible(const std::string& name, DType from, DType to) const;
  // Throws ConfigError unless sums can be made here.
  void check_can_add() const;

  void order_behind_compute();
  void copy(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t numel);
  void zero(void* to, std::size_t bytes);
  // sum[i] += value[i]
  void add(float* sum, const void* value, DType value_dtype, std::int64_t numel);

  // The same for a piece on NVMe, which is set to `values` or to which they are added; wait_nvme()
  // reports failures. The result is done when a discrete device's `values` are read; empty if the
  // stream reads them.
  device::Pending put_on_nvme(const ShardPiece& piece, const void* values, DType dtype, bool adds);
  // to[i] = the piece's values on NVMe: by work of the stream, or before the stream's later work.
  void get_from_nvme(const ShardPiece& piece, void* to, DType dtype);
  NvmeGradients* nvme() { return nvme_.get(); }  // null: no gradient is on NVMe
  // Blocks until everything is written; throws the first failure. REQUIRES: the stream is done.
  void wait_nvme();
  void clear_nvme() noexcept;
  // True if some gradient goes to host memory or to NVMe.
  bool leaves_device() const { return leaves_device_; }

  device::Pending compute_record() { return compute_.record(); }
  // Copies to host memory, after `made`, on a separate stream.
  device::Pending start_to_host(void* to, const void* from, std::size_t bytes,
                                const device::Pending& made);

  // Keeps `owner` until the work enqueued so far and `also` are done. `bytes`: of a full gradient
  // that copies or kernels still read. Blocks until all kept gradients are within
  // ReducerParts::most_kept_bytes, because a host that runs ahead of its device would keep them
  // all. The work it waits for is already enqueued, and needs nothing more from this thread.
  void retire(std::shared_ptr<void> owner, const device::Pending& also = {},
              std::int64_t bytes = 0);
  // The same for a gradient that a reduction keeps: counted until `reduced` is done. Once *met is
  // true its end depends on no rank's thread; before that nothing here waits for it.
  void count_kept(device::Pending reduced, std::shared_ptr<const std::atomic<bool>> met,
                  std::int64_t bytes);
  // Orders the stream after `pending`; time for which the host blocks counts as exposed.
  void wait_for(const device::Pending& pending);
  // Blocks until each is done; throws the first failure.
  void wait_on_host(std::span<const device::Pending> pendings);
  // Blocks until the stream has done everything; throws its failure.
  void synchronize();
  // The same with copies to the host, and without throwing; called before memory is freed.
  void drain() noexcept;

  // True if gradients are sent: to ranks with other shards, or to ranks with other copies of this
  // shard.
  bool sends() const { return parts_.group.size() > 1 || parts_.replicas != nullptr; }
  // True if this parameter's sum over replicas may be made of the accumulated gradient, in fp32.
  bool has_totals(const shard::Param& param) const {
    return param.dynamic() ? replica_sums_.has_dynamic_totals() : replica_sums_.has_totals();
  }
  // In memory of the host it is one sum in fp32: a total, or of as many rounds as lists name it.
  bool is_summed_on_host(const shard::Param& param) const {
    return has_totals(param) || (param.dynamic() && sends());
  }
  const ReplicaSums& replica_sums() const { return replica_sums_; }
  // The shard that rank r of the group holds.
  std::int64_t shard_of(int rank) const {
    return parts_.shard_of_rank.empty() ? rank
                                        : parts_.shard_of_rank[static_cast<std::size_t>(rank)];
  }
  bool shards_are_in_rank_order() const {
    return std::is_sorted(parts_.shard_of_rank.begin(), parts_.shard_of_rank.end());
  }
  bool is_discrete() const { return is_discrete_; }
  device::Stream& stream() { return reduce_; }
  device::Device& device() { return parts_.device; }
  const ReducerParts& parts() const { return parts_; }
  ReducerStats& stats() { return stats_; }
  ReducerStats take_stats();
  // Counts bytes of gradients kept for their turn or for a buffer; note_held() records a peak.
  void hold(std::int64_t bytes) { held_bytes_ += bytes; }
  void unhold(std::int64_t bytes) { held_bytes_ -= bytes; }
  void note_held() { stats_.held_bytes_peak = std::max(stats_.held_bytes_peak, held_bytes_); }

 private:
  struct Kept {
    device::Pending used;
    std::shared_ptr<void> owner;
    std::int64_t bytes = 0;
    std::shared_ptr<const std::atomic<bool>> met = {};  // null: depends on no other rank
  };
  void keep(Kept kept);
  void free_retired();
  void free_oldest();

  const ReducerParts parts_;  // `replicas` null: this rank has the only copy
  const ReplicaSums replica_sums_;
  device::Stream& compute_;
  device::Stream& reduce_;
  const bool is_discrete_;  // device memory that the host cannot access
  const std::unique_ptr<NvmeGradients> nvme_;
  bool leaves_device_ = false;
  std::deque<Kept> retired_;
  std::int64_t kept_bytes_ = 0;  // of those
  device::Pending last_to_host_;
  ReducerStats stats_;
  std::int64_t held_bytes_ = 0;
  // Beside a discrete device: see [Note: NVMe on the stream]. Last: it uses everything above.
  std::unique_ptr<HostWork> nvme_work_;
};

}  // namespace tessera::grad
