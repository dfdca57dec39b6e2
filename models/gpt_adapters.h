// A checkpoint's adapters as part of the weights beside which they lie: what export writes for
// programs that know of none. Internal to models.
//
// A linear layer's weight gets scale * B * A added, in fp32: the sum over the rank in ascending
// order, then the scale. Only the two matrices of one layer are held.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/dtype.h"

namespace tessera::models {

class GptCheckpoint;

// Whether the weight is beside an adapter, in the checkpoint's model.
bool has_adapter(const GptCheckpoint& checkpoint, const std::string& weight);

class AdapterProduct {
 public:
  // `wanted`: see GptCheckpoint::stored(). REQUIRES: has_adapter().
  AdapterProduct(const GptCheckpoint& checkpoint, const std::string& weight, DType wanted);

  // `values`: elements from `begin` on of the layer's weight, in memory order.
  void add_to(std::int64_t begin, std::span<float> values);

 private:
  std::size_t rank_;
  std::size_t inputs_;
  float scale_;
  std::vector<float> a_;    // [rank, inputs]
  std::vector<float> b_;    // [outputs, rank]
  std::vector<float> row_;  // of the product
};

}  // namespace tessera::models
