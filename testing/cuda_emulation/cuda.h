// The part of CUDA's driver interface that Tessera names, for cuda_emulation.h.
#pragma once

#include <cstdint>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUstream = struct CUstream_st*;
inline constexpr CUresult CUDA_SUCCESS = 0;

enum CUstreamBatchMemOpType {
  CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
  CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2
};
inline constexpr unsigned CU_STREAM_WAIT_VALUE_GEQ = 0;

union CUstreamBatchMemOpParams {
  CUstreamBatchMemOpType operation;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    std::uint32_t value;
    unsigned flags;
  } waitValue;
  struct {
    CUstreamBatchMemOpType operation;
    CUdeviceptr address;
    std::uint32_t value;
    unsigned flags;
  } writeValue;
};
