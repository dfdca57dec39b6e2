// Internal to grad: what is done with gradients on the reduce stream, and how long their memory is
// kept.
//
// Everything here is enqueued and ordered behind what the compute stream had been given when
// order_behind_compute() was called. Conversions and sums are kernels of ReducerParts, if given;
// else they run on the host, whose memory the device's must be then.
//
// [Note: NVMe on the stream] What goes to NVMe is work of the stream as well: it waits there for
// buffers and for earlier writes, which depends on the disk and on nobody who waits for this
// stream. So whatever it reads may be used again behind it, as behind any copy. A discrete device's
// stream waits for no disk: there a thread does it, in the same order, behind what the stream has
// been given, and what it reads may be used again when it is done.
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

  // The same of a piece on NVMe, which begins with `values`; wait_nvme() tells what became of it.
  // Done, on a discrete device: `values` are not read any more. Nothing: the stream reads them.
  device::Pending put_on_nvme(const ShardPiece& piece, const void* values, DType dtype, bool adds);
  // to[i] = what is there of the piece, by work of the stream, too; or the stream is behind it.
  void get_from_nvme(const ShardPiece& piece, void* to, DType dtype);
  NvmeGradients* nvme() { return nvme_.get(); }  // null: nothing is there
  // Blocks until everything is there; throws what went wrong. REQUIRES: the stream is done.
  void wait_nvme();
  void clear_nvme() noexcept;
  // Some gradient goes to the host or to NVMe.
  bool leaves_device() const { return leaves_device_; }

  device::Pending compute_record() { return compute_.record(); }
  // To memory of the host, behind `made`, on a stream of its own.
  device::Pending start_to_host(void* to, const void* from, std::size_t bytes,
                                const device::Pending& made);

  // Keeps `owner` until the stream has done what it has been given so far, and `also` is done.
  // `bytes`: of a full gradient that copies or kernels still read. Blocks until those kept, with
  // this one, are within ReducerParts::most_kept_bytes: a host that is ahead of its device would
  // keep them all. What it waits for is on streams already, and needs nothing more from this
  // thread.
  void retire(std::shared_ptr<void> owner, const device::Pending& also = {},
              std::int64_t bytes = 0);
  // The same of one that a reduction keeps: counts until that is done. Once `met` is true its end
  // depends on no rank's thread; before that nobody waits for it here.
  void count_kept(device::Pending reduced, std::shared_ptr<const std::atomic<bool>> met,
                  std::int64_t bytes);
  // Orders the stream behind `pending`; the time for which the host had to wait is exposed.
  void wait_for(const device::Pending& pending);
  // Blocks until each is done; throws the first failure.
  void wait_on_host(std::span<const device::Pending> pendings);
  // Blocks until the stream has done everything; throws its failure.
  void synchronize();
  // The same, copies to the host included, before memory is given back, whatever has become of the
  // work.
  void drain() noexcept;

  // Something has to be sent to somebody: to ranks with other shards, or to those with other copies
  // of this one.
  bool sends() const { return parts_.group.size() > 1 || parts_.replicas != nullptr; }
  // This parameter's sum over replicas may be made of what is at home, in fp32.
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
  // Bytes of gradients that wait for their turn or a buffer; a peak is what was still held
  // afterwards.
  void hold(std::int64_t bytes) { held_bytes_ += bytes; }
  void unhold(std::int64_t bytes) { held_bytes_ -= bytes; }
  void note_held() { stats_.held_bytes_peak = std::max(stats_.held_bytes_peak, held_bytes_); }

 private:
  struct Kept {
    device::Pending used;
    std::shared_ptr<void> owner;
    std::int64_t bytes = 0;
    std::shared_ptr<const std::atomic<bool>> met = {};  // null: by no other rank
  };
  void keep(Kept kept);
  void free_retired();
  void free_oldest();

  const ReducerParts parts_;  // `replicas` null: there are none but this one
  const ReplicaSums replica_sums_;
  device::Stream& compute_;
  device::Stream& reduce_;
  const bool is_discrete_;  // that the host cannot reach
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
