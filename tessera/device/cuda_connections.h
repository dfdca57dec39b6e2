// How many connections to the GPU this process has: queues in hardware onto which CUDA maps
// streams.
//
// [Note: streams that share a connection]
// Work of two streams on one connection is done in the order in which it was enqueued. A stream
// that waits for another process, as those of ipc_backend.h do, then holds up a stream on which
// that process may be waiting: two ranks wait for each other for ever. Under MPS a process has two
// connections unless it asks for more, and all processes of a GPU share what it has, about a
// hundred.
//
// CUDA reads the number from the environment when it starts, so it is asked for before our first
// call of CUDA. A number that the user has set stays.
//
// Threads: any.
#pragma once

#include <string>

namespace tessera::device {

// Enough for the streams of a device and of several groups of ranks, and for four ranks of one GPU
// under MPS.
inline constexpr int kCudaConnections = 16;

// Before a call that may start CUDA.
void ask_for_cuda_connections();
// Why streams of this process may share connections; empty: they do not. Names the remedy.
std::string why_too_few_cuda_connections();

}  // namespace tessera::device
