// Internal to grad: gradients of a group of one. The full gradient is the shard's, so an fp32 one
// is adopted where it lies; later micro-batches are added to it. bf16 and fp16 become fp32 in
// memory of our own, which is kept from step to step. Stored ones go into the store as they come.
// Adopted memory is charged as our own would be, so that a parameter costs the same whether or not
// its gradient came. Dynamic parameters are like all others: there
// is nobody to agree with.
//
// Threads: as Reducer.
#pragma once

#include <span>
#include <vector>

#include "tessera/grad/gradient_sink.h"
#include "tessera/grad/gradient_stream.h"

namespace tessera::grad {

class SoloSink final : public GradientSink {
 public:
  explicit SoloSink(GradientStream& stream);
  ~SoloSink() override;

  void begin_backward(bool is_first) override;
  void check(const shard::Param& param, const FullGradient& gradient) const override;
  void take(const shard::Param& param, FullGradient gradient) override;
  std::vector<int> pending_dynamic() const override { return {}; }
  void reduce_dynamic(std::span<const int> /*ids*/) override {}
  void drop_dynamic() noexcept override {}
  void finish_backward() override {}
  void wait() override { stream_.synchronize(); }
  ShardGradient shard_gradient(const shard::Param& param, bool is_zero) override;
  void clear() noexcept override;

 private:
  struct Sum {
    float* data = nullptr;        // null: no gradient has come since clear()
    std::shared_ptr<void> owner;  // of an adopted gradient
    device::Memory own;
    bool own_is_zero = false;
    bool is_put = false;  // into the store, since clear()
  };
  bool is_stored(const shard::Param& param) const;
  float* own_memory(Sum& sum, const shard::Param& param);

  GradientStream& stream_;
  std::vector<Sum> sums_;  // by id
};

}  // namespace tessera::grad
