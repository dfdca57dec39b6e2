// The torch side of a sharded parameter: a tensor that keeps its identity while its storage comes
// and goes.
//
// bind_tensor() gives the tensor a storage of its own with room for the padding. Sizes stay; strides
// stay if they cover the storage without holes or overlap, else they become contiguous. Elements
// are counted in memory order, so a transposed weight is gathered as it lies. Values are not kept:
// copy them into the shard first (storage_elements()).
//
// While detached, an access throws an error that names the parameter and says how to gather it,
// prepared once. Torch 2.11 and 2.12 cannot take such an error back, so there (decided by CMake,
// TESSERA_STORAGE_ERRORS) a detached storage is empty and the error is torch's own.
//
// Threads: as Param.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/core/dtype.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/param.h"

namespace tessera::shard {

// Throws ConfigError with the name for a type that is not fp32, bf16 or fp16.
DType dtype_of(const at::Tensor& tensor, const std::string& name);
at::ScalarType scalar_type_of(DType dtype);

// The tensor's elements in the memory order that it will have once bound: one dimension.
at::Tensor storage_elements(const at::Tensor& tensor);

// Starts detached. REQUIRES: layout.numel() == tensor.numel(). Throws ConfigError with the name for
// what cannot be sharded: sparse, quantised, without storage, or not of the device's kind.
std::unique_ptr<FullTensor> bind_tensor(const at::Tensor& tensor, const std::string& name,
                                        const Layout& layout);

}  // namespace tessera::shard
