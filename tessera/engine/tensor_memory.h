// Memory of torch's tensors.
//
// Torch takes it from the heap and gives it back for every tensor, and glibc hands all large blocks
// straight to the kernel: a step pays for fresh pages again and again, or, where the heap may keep
// them, holds far more than it uses. With keep_tensor_memory() tensors of kKeptTensorBytes and more
// come from one device::BlockCache, which keeps what a step gives back and never holds more than
// was once in use at the same time.
//
// Threads: any; keep_tensor_memory() before other threads make tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

inline constexpr std::size_t kKeptTensorBytes = std::size_t{1} << 18;

// For the whole process and until its end; a second call does nothing. `tessera train` calls it for
// a model on CPU; a program of one's own may.
void keep_tensor_memory();

// Of a GPU, by torch's allocator.
struct TorchMemory {
  std::int64_t taken_bytes = 0;  // by tensors, now
  std::int64_t held_bytes = 0;   // of the device, with what is kept for the next tensors
  std::int64_t peak_bytes = 0;   // taken at once, so far
};
TorchMemory torch_memory(int cuda_device);

}  // namespace tessera
