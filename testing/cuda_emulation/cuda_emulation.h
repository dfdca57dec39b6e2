// A GPU that is not there: the calls of CUDA that Tessera makes outside of kernels, on CPU threads.
// device_cuda.h and ipc_backend.h are compiled against it and tested where there is no GPU.
//
// A stream is a thread that takes its work in order. Memory of the device is a memfd, so that other
// processes can map it as they map a GPU's. It is as strict as a driver may be:
//
//  (1) One call at a time in a process, as under one lock. What waits for the end of given work
//      (synchronising with an event or a stream) does so without the lock.
//  (2) Freeing, unpinning and unmapping memory wait for all streams, and hold the lock meanwhile:
//      every other call of the process waits, too.
//  (3) A stream takes kMaxQueued pieces of work; who gives it more waits, and holds the lock.
//
// So what is made here of streams that wait for other processes ends, or stands still, for the same
// reasons as on a GPU, and always.
//
// Threads: any. A process starts it with its first call; a fork of it has none that work.
#pragma once

#include <cstddef>
#include <functional>

#include <cuda_runtime_api.h>

namespace tessera::testing {

inline constexpr std::size_t kMaxQueued = 1024;
inline constexpr std::size_t kEmulatedBytes = std::size_t{1} << 32;

// What a kernel would do.
void enqueue_emulated(cudaStream_t stream, std::function<void()> work);

}  // namespace tessera::testing
