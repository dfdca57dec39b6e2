// Takes full gradients as backward finishes them, and leaves this rank's piece of their sum over
// ranks and micro-batches, in fp32.
//
//   add()              a gradient has come: copied into its bucket if that bucket's turn has come,
//                      else kept until it has
//   (bucket full)      reduce-scatter is started; the next bucket's turn begins
//   finish_backward()  sends the rest, with zeros for what this rank did not touch
//   shard_gradient()   after it: sums over ranks and micro-batches since clear()
//
// What fixes the order of reductions: bucket layout, hence registration. A bucket whose turn has come
// waits until it is full or backward has ended; every backward reduces every bucket once, on every
// rank, whether or not this rank has touched it. So a gradient that did not come is zero, never last
// step's, and ranks that used different parameters still meet.
//
// Memory: two buckets of wire elements, one region of fp32 shards, and one scratch shard from the
// second micro-batch on. In a group of one an fp32 gradient is adopted as it is: no copy, no region.
//
// Threads: as Param. Works on the reduce stream; gradients are read after what the compute stream
// has been given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/clock.h"
#include "tessera/core/dtype.h"
#include "tessera/core/spans.h"
#include "tessera/device/device.h"
#include "tessera/grad/bucket.h"
#include "tessera/shard/param.h"

namespace tessera {
class Config;
}

namespace tessera::grad {

struct ReducerOptions {
  std::int64_t bucket_bytes = std::int64_t{64} << 20;
  // Type on the network. Not set: that of the parameter's gradient; parameters of one engine have
  // one type, so one type is on the wire.
  DType wire_dtype = DType::kFloat32;
  // `param_dtype` decides "auto".
  static ReducerOptions from(const Config& config, DType param_dtype);
};

struct ReducerParts {
  comm::Group& group;
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
};

// A full gradient in the memory order of its parameter, without padding.
struct FullGradient {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::shared_ptr<void> owner;  // keeps the memory; dropped as soon as it is not needed
};

struct ReducerStats {
  std::uint64_t num_reductions = 0;   // calls
  std::uint64_t reduced_bytes = 0;    // of buckets, all ranks' parts
  std::int64_t held_bytes_peak = 0;   // gradients that waited for their bucket's turn
  double exposed_wait_s = 0;
};

// fp32 values of this rank's shard, `numel` of them without padding.
struct ShardGradient {
  float* data = nullptr;
  std::int64_t numel = 0;
};

class Reducer {
 public:
  // All trainable parameters of the table are known now; memory is taken at the first gradient.
  Reducer(const ReducerParts& parts, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Throws ConfigError for a gradient that comes twice in one backward: a hook fires once per
  // parameter and backward, so two mean two backward calls without finish_backward().
  void add(const shard::Param& param, FullGradient gradient);
  void finish_backward();
  bool in_backward() const;
  // Waits for all reductions. Zero where no gradient came since clear().
  ShardGradient shard_gradient(int param);
  int num_backwards() const;  // since clear()
  // After the update; also the way back after an exception: waits for what is in flight, forgets
  // what has come.
  void clear();
  const BucketLayout& layout() const;
  ReducerStats take_stats();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::grad
