// Internal to engine: small tensors that each rank has for itself, as a save stores them and a load
// puts them back: buffers of modules, and states of random generators.
//
// A type that checkpoints have no name for is stored as bytes, with torch's name for it beside.
//
// Threads: as Engine.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/engine/model.h"

namespace tessera::engine {

struct RankTensor {
  std::string name;
  at::Tensor values;  // a copy on the host, contiguous
};

// Of every buffer that has elements. Throws ConfigError for one that is not dense.
std::vector<RankTensor> copy_buffers(const Model& model);
// "cpu", and "cuda" of this rank's device: those that torch's operators draw from unless they are
// given another.
std::vector<RankTensor> copy_generators(bool with_cuda);

// Type and shape, without fragments.
checkpoint::StoredRankTensor describe(const RankTensor& tensor);

// Why a stored buffer cannot become the values of `buffer`; empty: it can.
std::string why_not(const checkpoint::StoredRankTensor& stored, const at::Tensor& buffer);
// REQUIRES: why_not() is empty, and `bytes` are all of it.
void put_buffer(const at::Tensor& buffer, std::span<const std::byte> bytes);
void put_generator(const std::string& name, std::span<const std::byte> bytes);

}  // namespace tessera::engine
