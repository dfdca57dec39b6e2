// The device of an NVIDIA GPU. Neither torch nor CUDA is named here: the same header serves builds
// without CUDA, whose make_cuda_device() says how to get one with it (no_cuda.cpp).
//
// Streams do not wait for the legacy default stream and it not for them; gather and reduce have the
// higher priority, since the model waits for them. Pinned memory takes the bytes asked for rounded
// to pages, not to a power of two.
//
// [Note: what a CUDA stream can wait for]
// For a Pending of the same device (an event, or a list of such) the host only leaves an order in
// the stream. For work that another thread is about to hand to the device the host waits until it
// has, not until it is done. For anything else, a collective over Gloo or a read from disk,
// Stream::wait() blocks the calling thread until it is done: a host function that blocked instead
// would hold up the one thread on which the driver runs all host functions, and with it the work
// being waited for.
//
// [Note: pageable memory on CUDA]
// CUDA reads a pageable source when it is asked to, not when the stream reaches it. So a copy
// from pageable memory to the GPU first waits, on the host, for the stream; one from the GPU to
// pageable memory returns when it is done. Copies and fills inside host memory are host functions.
// Whatever should overlap goes through pinned memory.
//
// Threads: as device.h says. The calling thread's current CUDA device is left as it was.
#pragma once

#include <memory>
#include <string>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"

namespace tessera::device {

struct CudaDeviceOptions {
  int index = 0;
  Ledger* ledger = nullptr;  // may be null; must outlive the device and its memory
  // The cudaStream_t on which the model's operators run; null is the legacy default stream. Not
  // owned; it must outlive the device.
  void* compute_stream = nullptr;
  // Where the times of copies, fills, kernels and host functions go, on one track per stream ("gpu
  // read"). Null or off: nothing is timed. Must outlive the device.
  Spans* spans = nullptr;
};

// Was this program built with CUDA? It may still run where there is no GPU.
bool cuda_built();
// 0 if there is none, no driver, or no CUDA in this build; never throws.
int num_cuda_devices();
// For people, one line: driver, runtime and devices, or why there is none. Never throws.
std::string cuda_description();

// Throws DeviceError if there is no such GPU.
std::unique_ptr<Device> make_cuda_device(CudaDeviceOptions options = {});

}  // namespace tessera::device
