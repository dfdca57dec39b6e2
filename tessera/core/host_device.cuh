// Marks functions that nvcc compiles for both sides, in headers that the host's
// compiler reads, too.
#pragma once

#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif
