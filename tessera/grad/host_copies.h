// Internal to grad: gradients of one shard in pinned memory of the host, beside a discrete device,
// as several micro-batches make them.
//
//   next()         a buffer, into which a micro-batch is copied
//   end()          all of it is on its way; threads of the host may add up what has come
//   addends()      what is here: the gradient is their sum
//
// There is a buffer for each micro-batch, or fewer. What has come is added up in the place of the
// first ones, which frees the others, when no buffer is left and another micro-batch comes; and
// before the last, if whoever reads the gradient then reads less. The last stays as it is: it is
// added by its readers, who read it anyway and have no time to wait for another pass.
//
// Which of them are added up when follows from the numbers of micro-batches and buffers. No bit
// does: sums are made in fp32 in the order of micro-batches either way.
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
  // `num_micro_batches`: of a step; 0: not known. `allocate`: a buffer of this type.
  HostCopies(DType dtype, int num_micro_batches, std::function<device::Memory()> allocate);

  // Takes so many buffers ahead; more are taken when needed.
  void reserve(int num_buffers);
  // For the next micro-batch. Where its buffer is one that was added up it waits for that, which
  // was started a micro-batch ago.
  std::byte* next();
  // `left`: when what was copied there is. True: what has come is to be added up.
  bool end(device::Pending left);
  // After that: `sum` adds up what it is given, in its place (ReducerParts::host_fold).
  void fold(const std::function<device::Pending(HostAddends addends, device::Pending ready)>& sum);

  // Values of zero before the first.
  HostAddends addends();
  device::Pending ready() const;
  DType dtype() const { return dtype_; }
  // The next is the first. Nothing is being added up any more.
  void clear();

 private:
  const void* data(std::size_t buffer) const { return buffers_[buffer].data(); }

  const DType dtype_;
  const std::size_t num_sum_;  // buffers that a sum takes
  const int num_micro_batches_;
  const std::function<device::Memory()> allocate_;
  std::vector<device::Memory> buffers_;
  std::vector<std::size_t> sum_;     // buffers of what was added up; none: nothing was
  std::vector<std::size_t> alone_;   // and of each micro-batch behind it
  std::vector<std::size_t> folded_;  // that are free with `made_`
  int num_ended_ = 0;
  device::Pending left_;
  device::Pending made_;
};

}  // namespace tessera::grad
