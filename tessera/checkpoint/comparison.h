// What two checkpoints differ in.
//
// Tensors are compared by the content hashes of their manifests, and read only where these differ.
// On how many ranks each was saved does not matter, but for what ranks have for themselves.
//
// Threads: as the readers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_reader.h"

namespace tessera::checkpoint {

struct ValueDifference {
  std::string name;  // "step", "ranks", or behind "state: ", "config: ", "user: " the key
  std::optional<std::string> first, second;  // none: that one does not have it
};

// A parameter or tensor that only one has, or that has another shape or type in the other.
struct FormDifference {
  std::string what;           // "parameter "h.0.weight""
  std::string first, second;  // "[3, 5], frozen", "BF16"; empty: not there
};

struct TensorDifference {
  std::string what;  // "tensor "exp_avg" of parameter "h.0.weight""
  std::int64_t numel = 0;
  std::int64_t num_different = 0;  // elements whose bits differ
  std::int64_t num_nan = 0;        // of these, where one is NaN
  double largest = 0;              // absolute difference, of those without NaN
};

struct CheckpointDifferences {
  std::vector<ValueDifference> values;
  std::vector<FormDifference> forms;
  std::vector<TensorDifference> tensors;

  bool empty() const { return values.empty() && forms.empty() && tensors.empty(); }
};

// IoError, CorruptError. Memory: both readers' staging and kBytesAtOnce of each.
inline constexpr std::size_t kBytesAtOnce = std::size_t{4} << 20;
CheckpointDifferences compare(const CheckpointReader& first, const CheckpointReader& second);

}  // namespace tessera::checkpoint
