// Takes full gradients as backward finishes them, and leaves this rank's piece of their sum over
// ranks and micro-batches, in fp32.
//
//   add()              a gradient has come: copied into its bucket if that bucket's turn has come,
//                      else kept until it has
//   (bucket full)      reduce-scatter is started; the next bucket's turn begins
//   finish_backward()  sends the rest, with zeros for what this rank did not touch
//   shard_gradient()   after it: sums over ranks and micro-batches since clear()
//
// What fixes the order of reductions: bucket layout, hence registration. A bucket whose turn has
// come waits until it is full or backward has ended; every backward reduces every bucket once, on
// every rank, whether or not this rank has touched it. So a gradient that did not come is zero,
// never last step's, and ranks that used different parameters still meet. When a bucket becomes
// full depends on what this rank has used: give the reducer a group of its own where ranks may
// differ in that.
//
// Copies: a bucket that is one whole parameter without padding, whose gradient has the wire's type,
// is reduced straight from the gradient's memory. Everything else is copied once.
//
// Memory, taken when first needed: two buckets of wire elements, so that one fills while the other
// is on the wire; one region of fp32 shards; and two scratch shards from the second micro-batch on.
// In a group of one an fp32 gradient is adopted as it is: no copy, no region, no call.
//
// Waits: add() waits only for a bucket buffer that is still on the wire, two buckets back;
// finish_backward() likewise. The rest is waited for by shard_gradient() and clear().
//
// Threads: as Param. Works on the reduce stream; gradients are read after what the compute stream
// has been given. What reads shard gradients asynchronously does so on the reduce stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

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
  // Type on the network: fp32, bf16 or fp16. A gradient of another type is converted.
  DType wire_dtype = DType::kFloat32;
  // `param_dtype` decides "auto". Throws ConfigError for what is not there: sums in less than fp32,
  // and a backend's own order of summation.
  static ReducerOptions from(const Config& config, DType param_dtype);
};

struct ReducerParts {
  comm::Group& group;
  device::Device& device;
  shard::ParamTable& params;
  const Clock& clock;
  Spans& spans;
  // sum[i] += value[i], in the order of the stream. Null: on the host, which a device with memory
  // of its own refuses.
  std::function<device::Pending(float* sum, const float* value, std::int64_t numel,
                                device::Stream& stream)>
      add = {};
};

// A full gradient in the memory order of its parameter, without padding. The memory belongs to the
// reducer from then on, and is written to: nobody else may use it.
struct FullGradient {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::shared_ptr<void> owner;  // keeps the memory; dropped as soon as it is not needed
};

struct ReducerStats {
  std::uint64_t num_reductions = 0;  // calls
  std::uint64_t reduced_bytes = 0;   // of buckets, all ranks' parts
  std::int64_t held_bytes_peak = 0;  // gradients that waited for their bucket's turn
  double exposed_wait_s = 0;
};

// fp32 values of this rank's shard, `numel` of them without padding. In a group of several ranks
// the shard's padding follows, and is zero.
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

  // A backward has begun. add() and finish_backward() say it by themselves.
  void begin_backward();
  // Throws ConfigError for a gradient of a frozen parameter, one of a type that cannot be converted
  // here, and one that comes twice in one backward: a hook fires once per parameter and backward,
  // so two mean two backward calls without finish_backward(). Nothing has changed then.
  void add(const shard::Param& param, FullGradient gradient);
  void finish_backward();
  bool in_backward() const;
  // Waits for all reductions. Zero where no gradient came since clear().
  ShardGradient shard_gradient(int param);
  int num_backwards() const;  // finished ones, since clear()
  // After the update; also the way back after an exception: waits for what is in flight, forgets
  // what has come. Throws nothing: a reduction that failed has poisoned its group, which repeats
  // it. After an exception every rank must have started the same reductions. Ranks that may have
  // stopped at different gradients call finish_backward() first: then all have started all.
  void clear();
  const BucketLayout& layout() const;
  ReducerStats take_stats();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::grad
