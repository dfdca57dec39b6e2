// Internal to grad: gradients of a group of one. The full gradient is the shard's, so an fp32 one
// is adopted where it lies; later micro-batches are added to it. bf16 and fp16 become fp32 in
// memory of our own, which is kept from step to step; but on a discrete device they are adopted as
// they are until a second micro-batch is added. Those on NVMe go there as they are added, those in
// host memory to pinned memory.
// Adopted memory is charged as our own would be, so that a parameter costs the same whether or not
// its gradient came. Dynamic parameters are like all others: there is nobody to agree with.
//
// Threads: as Reducer.
#pragma once

#include <optional>
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
  ShardGradient ordered_gradient(const shard::Param& param) override;
  std::optional<double> sum_of_squares(const shard::Param& param) override;
  void free_gradient(const shard::Param& param) override;
  void clear() noexcept override;

 private:
  struct Sum {
    const void* values = nullptr;  // null: no gradient since clear()
    DType dtype = DType::kFloat32;
    std::shared_ptr<void> owner;  // of an adopted gradient
    device::Memory own;           // fp32
    bool own_is_zero = false;
    bool is_put = false;      // on NVMe, since clear()
    bool has_square = false;  // of `values` as they are, or were
    bool is_freed = false;    // since clear()
    device::Memory host;      // of one that leaves: in the parameter's type
    device::Pending left;     // the copy to it
  };
  Sum& sum_of(const shard::Param& param) { return sums_[static_cast<std::size_t>(param.id())]; }
  float* own_memory(Sum& sum, const shard::Param& param);
  void adopt(Sum& sum, const shard::Param& param, FullGradient gradient);
  // Into memory of our own, in fp32.
  void widen(Sum& sum, const shard::Param& param, const void* values, DType dtype);
  void make_own(Sum& sum, const shard::Param& param, FullGradient gradient);
  void add(Sum& sum, const shard::Param& param, FullGradient gradient);
  void send_to_host(Sum& sum, const shard::Param& param, FullGradient gradient);
  void start_square(Sum& sum, const shard::Param& param, const void* values, DType dtype);

  GradientStream& stream_;
  std::vector<Sum> sums_;        // by id
  bool zeros_are_made_ = false;  // nobody has waited for them yet
  device::Memory squares_;  // by id: sums of squares, pinned; none: nobody makes them on the way
};

}  // namespace tessera::grad
