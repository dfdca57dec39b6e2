// The torch side of a sharded parameter: a tensor that keeps its identity while its storage comes
// and goes.
//
// bind_tensor() gives the tensor a storage of its own with room for the padding. Sizes stay;
// strides stay if they cover the storage without holes or overlap, else they become contiguous.
// Elements are counted in memory order, so a transposed weight is gathered as it lies. Values are
// not kept: copy them into the shard first (storage_elements()). Views that were made before stay
// with the tensor's old memory; views made later, by anybody, follow the parameter.
//
// While detached, an access throws an error that names the parameter and says how to gather it,
// prepared once.
//
// Threads: as Param.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "tessera/core/dtype.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/param.h"

namespace tessera::shard {

// Stands in the message of torch's error when a released parameter is read.
inline constexpr std::string_view kReleasedText = "' is released";

// Throws ConfigError with the name for a type that is not fp32, bf16 or fp16.
DType dtype_of(const at::Tensor& tensor, const std::string& name);
at::ScalarType scalar_type_of(DType dtype);

// An engine has taken its memory, and has not given it back: what bind_tensor() was told of it.
std::optional<std::string> owner_of(const at::Tensor& tensor);

// The tensor's elements in the memory order that it will have once bound: one dimension, without
// gradient. A view where strides stay, else a copy.
at::Tensor storage_elements(const at::Tensor& tensor);

// Starts detached. `owner`: whose it is, for errors of others; may be shared. REQUIRES:
// layout.numel() == tensor.numel(), and the tensor's type is the layout's. Throws ConfigError with
// the name for what cannot be sharded: undefined, sparse, quantised, without storage, not on a CPU
// or GPU, or computed from other tensors.
std::unique_ptr<FullTensor> bind_tensor(const at::Tensor& tensor, const std::string& name,
                                        const Layout& layout,
                                        std::shared_ptr<const std::string> owner = nullptr);

// The way back: the tensor is an ordinary one from here on, with the storage of `value`.
// REQUIRES: equal sizes, strides and type, and that nobody else writes to `value`.
void unbind_tensor(const at::Tensor& tensor, const at::Tensor& value);

}  // namespace tessera::shard
