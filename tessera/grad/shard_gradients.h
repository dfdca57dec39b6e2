// Internal to grad: where the gradients of this rank's shards live, and how micro-batches add up.
//
// It takes pieces that are summed over the ranks, in the order in which they become complete and in
// the type in which they were reduced, and puts each into the tier of its parameter's Placement.
// Where nothing is sent (GradientStream::sends()) a piece is autograd's whole gradient.
//
//   device   the first micro-batch in its type: adopted with its owner where it is not sent, else
//            in the region, into which the reduction may write directly. Sums of several are fp32,
//            and so is what is dynamic and sent: any backward may list it more than once.
//   host     pinned memory; copied D2H on a separate stream, in its type (host_copies.h). The
//            reader adds the micro-batches (ShardGradient), except those that host threads have
//            already added up. Memory is kept from step to step.
//   NVMe     sums in fp32 (nvme_gradients.h); from a discrete device a thread copies them D2H
//
// Where other ranks have copies of the same shards, these gradients may be summed over them: load()
// copies a gradient to device memory, and replace() puts the sum in its place. A gradient in host
// memory that may be summed so is one fp32 sum, to which a thread adds each micro-batch; so is a
// dynamic one that is sent, since the number of its rounds is not known.
//
// Adopted memory returns to autograd's allocator once the update has read it (free_gradient()).
// Other memory is kept from step to step: freeing it would wait for all of the device's work.
//
// Invariants:
//  (1) No bit depends on the placement: widening is exact, and sums are made in fp32 in the order
//      of micro-batches.
//  (2) A round is all pieces of a shard, in ascending order. The first since clear() replaces the
//      gradient, later ones are added. Pieces of one shard are put in the order of their rounds.
//  (3) The sum of squares is made on the way: of a single micro-batch, and of what replace() puts,
//      by the device, piece by piece; of several on the host by its threads when the last has come,
//      while backward goes on.
//  (4) Adopted memory is charged like allocated memory, so that a parameter costs the same whether
//      or not it got a gradient.
//
// Threads: as Reducer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/grad/bucket.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/host_copies.h"
#include "tessera/grad/host_work.h"

namespace tessera::grad {

class ShardGradients {
 public:
  // `layout` outlives this. `wire_dtype`: type of reduced gradients; gradients that are not sent
  // have autograd's types.
  ShardGradients(GradientStream& stream, const BucketLayout& layout, DType wire_dtype);
  ~ShardGradients();
  ShardGradients(const ShardGradients&) = delete;
  ShardGradients& operator=(const ShardGradients&) = delete;

  // Throws ConfigError with the name unless a gradient of this type can be taken.
  void check(const shard::Param& param, DType dtype) const;

  void begin_backward();
  // Where nothing is sent: takes the whole gradient of a micro-batch.
  void take(const shard::Param& param, FullGradient gradient);
  // Where gradients are sent: a reduction of these pieces is about to be started. Returns the
  // address to which it may write its result; null: the result will be passed to put().
  void* target_of(std::span<const Piece> pieces);
  // Takes the result of a reduction, in order, when the stream is ordered after it. The Pending is
  // done when only the stream still reads `result`.
  device::Pending put(std::span<const Piece> pieces, const std::byte* result);

  // Copies the gradients to device memory, piece by piece as in a bucket, converted to `dtype`
  // without loss. REQUIRES: all pieces are put; a gradient in host memory is an fp32 sum
  // (GradientStream), or one micro-batch in the wire type.
  void load(std::span<const Piece> pieces, void* to, DType dtype);
  // Replaces the pieces by `values`, which count for all rounds put so far; otherwise as put(), in
  // the order of each shard's pieces.
  device::Pending replace(std::span<const Piece> pieces, const float* values);
  // The next piece that is put replaces the gradient, like the first since clear().
  void restart(int param);

  // The gradient for work on the reduce stream; readers of host memory wait for `ready`. Zero if no
  // gradient was put.
  ShardGradient gradient(const shard::Param& param);
  // The same for the host: zeros are written on return.
  ShardGradient finished_gradient(const shard::Param& param);
  std::optional<double> sum_of_squares(const shard::Param& param) const;
  void free_gradient(const shard::Param& param);
  void clear() noexcept;

 private:
  struct Sum {
    int num_started = 0;           // rounds since clear(): a reduction is under way, ...
    int num_rounds = 0;            // ... or all of it is put
    const void* values = nullptr;  // on the device; null: no gradient
    DType dtype = DType::kFloat32;
    std::shared_ptr<void> owner;  // owner of an adopted gradient
    device::Memory own;           // fp32
    bool own_is_zero = false;
    bool is_freed = false;               // since clear()
    std::int64_t num_squared = 0;        // elements in the sum of squares, ...
    int num_squared_rounds = 0;          // ... which is of the first rounds
    std::unique_ptr<HostCopies> copies;  // on the host; null: it is not there
    std::byte* copy = nullptr;           // of these, of the round that comes
    device::Pending left;                // the last of its pieces
    device::Memory host_sum;             // fp32, where it may be summed over replicas
    device::Pending added;               // the last round
    device::Pending squared;             // by the host
  };
  Sum& sum_of(const shard::Param& param) { return sums_[static_cast<std::size_t>(param.id())]; }
  bool is_first(const Sum& sum) const { return sum.num_rounds == 0; }
  bool is_alone() const { return !stream_.sends(); }
  double* square_of(const shard::Param& param) const;
  bool has_square(const shard::Param& param) const;
  std::int64_t own_numel(const shard::Param& param) const;
  float* own_memory(Sum& sum, const shard::Param& param);
  void take_regions();
  std::byte* in_region(const shard::Param& param, std::int64_t begin);
  // As it was when the layout was made.
  bool is_dynamic(const shard::Param& param) const {
    return layout_.is_dynamic[static_cast<std::size_t>(param.id())];
  }
  DType region_dtype(const shard::Param& param) const {
    return is_dynamic(param) ? DType::kFloat32 : region_dtype_;
  }

  void put_piece(const ShardPiece& piece, const std::byte* values);
  void start_square(Sum& sum, const ShardPiece& piece, const void* values, DType dtype);
  void square_piece(Sum& sum, const ShardPiece& piece, const void* values, DType dtype);
  // All pieces of a round are being copied to the host.
  void end_host_round(Sum& sum, const shard::Param& param);
  device::Pending send_to_host(Sum& sum, const ShardPiece& piece, const void* values, DType dtype,
                               const device::Pending& made);
  void adopt(Sum& sum, const shard::Param& param, FullGradient gradient);
  // Converts into allocated memory, in fp32.
  void widen(Sum& sum, const shard::Param& param, const void* values, DType dtype);
  void add(Sum& sum, const ShardPiece& piece, const void* values, DType dtype);

  GradientStream& stream_;
  const BucketLayout& layout_;
  const DType wire_dtype_;
  const DType region_dtype_;
  std::vector<Sum> sums_;  // by id
  device::Memory region_;
  device::Memory dynamic_region_;  // after region_ in the layout
  bool zeros_are_made_ = false;    // and not waited for yet
  device::Memory squares_;         // by id: sums of squares, pinned; empty: none made on the way
  std::unique_ptr<HostWork> host_work_;  // null: at most one micro-batch on the host
};

}  // namespace tessera::grad
