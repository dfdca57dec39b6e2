// The nodes of autograd that a forward has made, and the edges that lead out of them: to nodes that
// were there before, and to leaves.
//
// Threads: stateless; nobody changes the graph meanwhile.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/engine/forward_scope.h"

namespace tessera::engine {

// Torch owns its nodes by one kind of pointer or another, from release to release.
using NodePtr = decltype(torch::autograd::Edge::function);
template <typename Pointer>
struct WeakPointer;
template <typename T>
struct WeakPointer<std::shared_ptr<T>> {
  using Type = std::weak_ptr<T>;
};
template <typename T, typename Null>
struct WeakPointer<c10::intrusive_ptr<T, Null>> {
  using Type = c10::weak_intrusive_ptr<T, Null>;
};
using WeakNode = WeakPointer<NodePtr>::Type;

// Autograd serves nodes of leaves first: they carry the largest number.
inline bool is_leaf_node(const torch::autograd::Node& node) {
  return node.sequence_nr() == std::numeric_limits<std::uint64_t>::max();
}

// Made by the thread of `begun`, at it or later.
inline bool is_made_since(const torch::autograd::Node& node, const NodeMark& begun) {
  return node.thread_id() == begun.thread && node.sequence_nr() >= begun.sequence &&
         !is_leaf_node(node);
}

// Calls inside(edge) once for each node that was made since `begun` and that leads to one of the
// outputs, where `edge` is the first that was found to point at it; and outer(edge) for each edge
// from one of those to any other node. What outer() makes of the edge is kept.
template <typename Inside, typename Outer>
void walk_graph(const std::vector<at::Tensor>& outputs, const NodeMark& begun, const Inside& inside,
                const Outer& outer) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> next;
  const auto enter = [&](const torch::autograd::Edge& edge) {
    if (seen.insert(edge.function.get()).second) {
      inside(edge);
      next.push_back(edge.function.get());
    }
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && !output.is_leaf() && is_made_since(*output.grad_fn(), begun)) {
      enter(torch::autograd::impl::gradient_edge(output));
    }
  }
  while (!next.empty()) {
    torch::autograd::Node* node = next.back();
    next.pop_back();
    for (torch::autograd::Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) {
        continue;
      }
      if (is_made_since(*edge.function, begun)) {
        enter(edge);
      } else {
        outer(edge);
      }
    }
  }
}

}  // namespace tessera::engine
