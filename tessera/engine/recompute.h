// Recomputation: a forward keeps no activations, and runs again in its backward.
//
// The first forward runs with gradients. Its graph tells what it has used: every edge that leads
// out of it, to a leaf or to a node that was there before, however the tensor came to it (argument,
// capture, member, a parameter of a unit inside). The graph is dropped, and one node takes its
// place, with exactly those edges. In backward the forward runs again, must reach the same edges,
// and is differentiated with respect to them; anything else is a ConfigError that names the unit.
// Gradients leave through the node, so that hooks of tensors outside fire once.
//
// The second forward sees what the first saw: the random generators, autocast (without its cache of
// casts) and the values of registered buffers of every module that the engine knows (a plain unit:
// of its own module); afterwards buffers have the values that they had before it. A unit must not
// change its input in place. A segment from before an update of the parameters is refused.
//
// A tensor that the forward leaves somewhere in place of returning it (a member, a result in which
// it cannot be seen) keeps the part of the graph that it needs, with its activations; its gradient
// goes the usual way.
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
