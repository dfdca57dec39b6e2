// Watches backward for the units of one engine: begins a unit's use when the gradient of one of its
// outputs is complete, and ends it as soon as nothing of that forward can still read a weight. See
// [Note: release in backward] in backward_watch.cpp.
//
// Lifetime: hooks in the user's graph share the watch; a graph may outlive the engine, and its
// hooks then do nothing.
//
// Threads: hooks run on the caller's thread on CPU and on autograd's device thread on CUDA, while
// the caller waits in backward(). Never both at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/engine_context.h"
#include "tessera/engine/graph_walk.h"

namespace tessera::engine {

class Model;
class StepDriver;
class UnitCore;

// One forward whose backward may come. Held by the hooks on what it has made: when its graph is
// gone, so is this.
struct BackwardUse {
  UnitCore* unit = nullptr;
  std::uint64_t epoch = 0;
  int num_inputs = 0;   // tensors that get a gradient in backward
  int inputs_left = 0;  // of them, in this backward
  bool open = false;    // begun and not ended
  NodeMark first_node;  // of the forward
  // Of the nodes that the forward has made: see [Note: release in backward].
  bool one_queue = false;     // autograd runs all of them on the engine's device
  bool is_closed = false;     // they lead to the unit's inputs and parameters alone
  int graph_task = -1;        // in which it was opened
  std::int64_t begun_ns = 0;  // for the trace
};

class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  BackwardWatch(EngineContext& context, const Model& model, StepDriver& driver);
  // The engine goes; its hooks may stay.
  void detach() { driver_ = nullptr; }

  // The forward of `unit` that began at `begun` has run with these tensors.
  void add(UnitCore& unit, const NodeMark& begun, const std::vector<at::Tensor>& inputs,
           const std::vector<at::Tensor>& outputs);
  // The node that autograd runs now is the backward of a recomputed unit.
  void begin_recomputed();
  // Its graph is gone: so are the uses that were begun in it.
  void end_recomputed();
  // The graph of a recomputed forward was dropped but for these nodes, and what they lead to:
  // somebody keeps tensors that they made.
  void add_kept(UnitCore& unit, const NodeMark& begun, const std::vector<NodePtr>& ends);
  void on_param_gradient(UnitCore& unit);
  // In the epilogue: ends what is still open.
  void close();
  // Nothing is open any more, whatever was.
  void forget();

 private:
  // Fires when the gradient of one tensor is complete and before anything uses it: the units that
  // took the tensor as input have done their part, and the unit that made it is about to do its
  // own.
  struct Gate {
    std::vector<std::weak_ptr<BackwardUse>> consumers;
    std::vector<std::shared_ptr<BackwardUse>> producers;  // of units inside each other: inner first
    std::size_t prune_at = 16;  // consumers, before those that are gone are dropped
  };
  struct GateKey {
    const void* node = nullptr;  // of a leaf: the tensor
    std::size_t output = 0;
    bool operator==(const GateKey&) const = default;
  };
  struct GateKeyHash {
    std::size_t operator()(const GateKey& key) const {
      return std::hash<const void*>()(key.node) * 31 + key.output;
    }
  };
  // Of the node that made a tensor.
  struct Origin {
    NodeMark mark;
    bool on_device = false;  // autograd runs it on the engine's device
  };
  using Gates = std::unordered_map<GateKey, std::weak_ptr<Gate>, GateKeyHash>;

  static GateKey key_of(const at::Tensor& tensor);
  Origin origin_of(const at::Tensor& tensor) const;
  void explore(BackwardUse& use, const std::vector<at::Tensor>& inputs,
               const std::vector<at::Tensor>& outputs) const;
  bool is_own_edge(const UnitCore& unit, torch::autograd::Node* node,
                   const std::vector<at::Tensor>& inputs) const;
  // Each tensor has one hook, whoever uses it and however often.
  std::shared_ptr<Gate> gate_of(const at::Tensor& tensor, const Origin& origin);
  std::shared_ptr<Gate> leaf_gate_of(const at::Tensor& leaf);
  static void add_consumer(Gate& gate, const std::shared_ptr<BackwardUse>& use);
  void pass(const Gate& gate);
  // True if the gradient's coming will prove that the forward's nodes have run.
  bool watch_input(const std::shared_ptr<BackwardUse>& use, const at::Tensor& input);
  void watch_output(const std::shared_ptr<BackwardUse>& use, const at::Tensor& output);

  void begin(const std::shared_ptr<BackwardUse>& use);
  void on_input_gradient(BackwardUse& use);
  // A node of this origin is about to run.
  void end_uses_after(const Origin& node);
  void end_if_complete(BackwardUse& use);
  void end(BackwardUse& use);

  void record_span(const BackwardUse& use);

  EngineContext& ctx_;
  const Model& model_;
  StepDriver* driver_;  // null: the engine is gone
  const TrackId track_;
  std::pair<std::int64_t, std::int64_t> last_span_;  // on the track: begin and end
  std::vector<std::shared_ptr<BackwardUse>> open_;   // in the order of their begins
  // The hook on the tensor owns its gate, so a gate whose node is gone is gone, too, and a new node
  // at the same address finds nothing.
  Gates gates_;
  Gates leaf_gates_;  // they outlive a backward, as leaves do
};

}  // namespace tessera::engine
