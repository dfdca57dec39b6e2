// What a run of a drawn model leaves behind, and what stands in for recomputation in a plain one.
//
// Threads: as any object.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::testing {

// Inside of a unit that would be recomputed, every tensor of outside is an alias of itself: uses
// inside meet at the alias, and outside sees one use.
class SegmentAliases {
 public:
  void begin() { segments_.emplace_back(); }
  void end() { segments_.pop_back(); }
  // Of a parameter: in every open one.
  at::Tensor of(at::Tensor param);
  // Of what is handed to the innermost.
  at::Tensor of_argument(const at::Tensor& argument) { return alias(segments_.back(), argument); }

 private:
  using Segment = std::map<const void*, at::Tensor>;
  static at::Tensor alias(Segment& segment, const at::Tensor& tensor);

  std::vector<Segment> segments_;  // open ones, from outside in
};

// What a run of the model leaves behind beside its results.
struct Leavings {
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> buffers;  // of all modules
  SegmentAliases aliases;
};

// A copy of them, and back.
std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors);
void assign(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values);

}  // namespace tessera::testing
