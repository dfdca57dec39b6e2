// Internal to grad: what is done with gradients on the reduce stream, and how long their memory is
// kept.
//
// Everything here is enqueued and ordered behind what the compute stream had been given when
// order_behind_compute() was called. Conversions run on the host, so a device with memory of its
// own does same-type copies only, and adds with the kernel of ReducerParts.
//
// Threads: as Reducer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

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

  // Keeps `owner` until the stream has done what it has been given so far.
  void retire(std::shared_ptr<void> owner);
  // Orders the stream behind `pending`; the time for which the host had to wait is exposed.
  void wait_for(const device::Pending& pending);
  // Blocks until the stream has done everything; throws its failure.
  void synchronize();
  // The same before memory is given back, whatever has become of the work.
  void drain() noexcept;

  device::Stream& stream() { return reduce_; }
  device::Device& device() { return parts_.device; }
  const ReducerParts& parts() const { return parts_; }
  ReducerStats& stats() { return stats_; }
  ReducerStats take_stats();
  // Bytes of gradients that wait for their turn or a buffer; a peak is what was still held
  // afterwards.
  void hold(std::int64_t bytes) { held_bytes_ += bytes; }
  void let_go(std::int64_t bytes) { held_bytes_ -= bytes; }
  void note_held() { stats_.held_bytes_peak = std::max(stats_.held_bytes_peak, held_bytes_); }

 private:
  void free_retired();

  const ReducerParts parts_;
  device::Stream& compute_;
  device::Stream& reduce_;
  const bool has_own_memory_;  // that the host cannot reach
  std::deque<std::pair<device::Pending, std::shared_ptr<void>>> retired_;
  ReducerStats stats_;
  std::int64_t held_bytes_ = 0;
};

}  // namespace tessera::grad
