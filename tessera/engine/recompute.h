// Recomputation (activation checkpointing): a forward keeps no activations, and runs again in its
// backward.
//
// The first forward runs with gradients. The edges that lead out of its graph, to leaves and to
// older nodes, are all that it has used, whether by argument, capture, member or a unit inside. The
// graph is dropped, and one node with exactly those edges replaces it. In backward the forward runs
// again, must reach the same edges, and is differentiated with respect to them; anything else is a
// ConfigError that names the unit. Gradients leave through the node, so hooks of tensors outside
// fire once.
//
// The second forward sees what the first saw: random generators, autocast (without its cache), and
// the registered buffers of every module that the engine knows (a plain unit: of its own module);
// afterwards buffers have the values from before it. A unit must not change its input in place. A
// graph from before an update of the parameters is refused.
//
// A tensor that the forward keeps without returning it (a member, an opaque result) keeps its part
// of the graph, with activations; its gradient goes the usual way.
//
// Collectives: those of units, in the order of uses, which is the same in both forwards.
//
// Threads: as Engine.
#pragma once

#include <functional>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::engine {

class UnitCore;

struct RecomputedForward {
  // Tensors in, tensors out. Called twice; all else that it uses, it holds.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> run;
  // Of a plain model, where no engine knows them.
  std::vector<at::Tensor> buffers;
  // The type of its result, if tensors in that cannot be seen.
  const std::type_info* opaque_result = nullptr;
};

// `unit` null: for a plain model.
std::vector<at::Tensor> run_recomputed(UnitCore* unit, const std::vector<at::Tensor>& inputs,
                                       RecomputedForward forward);

}  // namespace tessera::engine
