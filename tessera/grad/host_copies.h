// Internal to grad: the gradients of one shard in pinned host memory, for a discrete device, one
// per micro-batch.
//
//   next()         the buffer into which the next micro-batch is copied
//   end()          all of it is being copied; host threads may add up earlier micro-batches
//   addends()      the gradient, as a list whose sum it is
//
// There is a buffer for each micro-batch, or fewer. Micro-batches are added up in the place of the
// first ones, which frees the other buffers, when another micro-batch needs one; and before the
// last, if the readers of the gradient then read less. The last micro-batch is not added here: its
// readers read it anyway, and should not wait for another pass.
//
// The numbers of micro-batches and buffers fix what is added up when. No bit depends on it: sums
// are made in fp32 in the order of micro-batches either way.
//
// Threads: as Reducer. Sums are made on the thread of HostWork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/device/device.h"
#include "tessera/device/pending.h"
#include "tessera/grad/reducer.h"

namespace tessera::grad {

class HostCopies {
 public:
  // `num_micro_batches`: per step; 0: not known. `allocate`: makes a buffer for elements of
  // `dtype`.
  HostCopies(DType dtype, int num_micro_batches, std::function<device::Memory()> allocate);

  // Allocates this many buffers ahead; more are allocated when needed.
  void reserve(int num_buffers);
  // The buffer for the next micro-batch. If it held a micro-batch that was added up, waits for that
  // sum, which was started one micro-batch earlier.
  std::byte* next();
  // `left`: done when the copy into the buffer is. True: earlier micro-batches are to be added up,
  // by fold().
  bool end(device::Pending left);
  // Called if end() returned true: `sum` adds up the addends in place (ReducerParts::host_fold).
  void fold(const std::function<device::Pending(HostAddends addends, device::Pending ready)>& sum);

  // One addend of zeros before the first micro-batch.
  HostAddends addends();
  device::Pending ready() const;
  DType dtype() const { return dtype_; }
  // Starts over: the next micro-batch is the first. REQUIRES: no sum is running.
  void clear();

 private:
  const void* data(std::size_t buffer) const { return buffers_[buffer].data(); }

  const DType dtype_;
  const std::size_t num_sum_;  // buffers that an fp32 sum occupies
  const int num_micro_batches_;
  const std::function<device::Memory()> allocate_;
  std::vector<device::Memory> buffers_;
  std::vector<std::size_t> sum_;     // buffers of the sum; empty: nothing was added up
  std::vector<std::size_t> alone_;   // buffers of later micro-batches, one each
  std::vector<std::size_t> folded_;  // free once `made_` is done
  int num_ended_ = 0;
  device::Pending left_;
  device::Pending made_;
};

}  // namespace tessera::grad
