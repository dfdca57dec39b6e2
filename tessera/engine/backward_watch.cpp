#include "tessera/engine/backward_watch.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/engine/step_driver.h"

// [Note: release in backward]
// In backward a unit's parameters are needed from the moment that the gradient of one of its
// outputs is complete (a hook on that output) until no node of its forward can still read one.
// Three events end a use:
//
//  (1) Autograd is about to run a node that is older than the forward: the one that made an input
//      of the unit, or an output of an earlier unit. A queue of autograd pops the ready node that
//      was made last, so every node of the forward that could run has run. A node that still waits
//      for the gradient of another output gets a new use by that output's hook. Gradients of
//      parameters may be missing: an unused one gets none, and one that an earlier unit uses, too,
//      is complete only there.
//  (2) The gradients of all inputs and of all trainable parameters are complete, and the graph of
//      the forward leads to nothing else: not to a parameter of a unit inside, nor to a captured
//      tensor. So ends a unit whose inputs are leaves or need no gradient: autograd serves leaves
//      out of order, and one of them proves nothing. The graph is walked only for such units.
//  (3) The outermost backward is over.
//
// Where (1) does not count:
//   - Sequence numbers are per thread: a use is compared with nodes of the thread that made it. (On
//     CUDA a recomputed forward runs on autograd's thread.)
//   - Nodes on CPU and GPU in one graph have two queues. So the node must be on the engine's
//   device,
//     and all nodes of the forward, too; on a GPU the graph is walked for it. A detour outside of
//     the unit is harmless: it delays an output's gradient, whose hook begins a new use.
//   - A backward inside a hook or a recomputed unit runs before the outer one, whatever the
//   numbers:
//     only uses of the same graph task end.
//   - An input that the unit changed in place is made by a node of the unit. It is treated as one
//     whose gradient never arrives.
// A unit inside a unit ends only itself: the outer one began earlier.
//
// The output of one unit is usually the input of the next. With two hooks on it, in the order of
// registration, the earlier unit would be gathered before the later one is released. So there is
// one hook per tensor, a Gate, which tells the consumers first, and then the producer.

namespace tessera::engine {
namespace {

using coordinator::Phase;
using torch::autograd::Node;

// Begins a unit's use before a node of its forward runs.
class KeptNodeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit KeptNodeHook(std::function<void()> begin) : begin_(std::move(begin)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    begin_();
    return gradients;
  }

 private:
  const std::function<void()> begin_;
};

}  // namespace

BackwardWatch::GateKey BackwardWatch::key_of(const at::Tensor& tensor) {
  return {tensor.grad_fn().get(), static_cast<std::size_t>(tensor.output_nr())};
}

BackwardWatch::Origin BackwardWatch::origin_of(const at::Tensor& tensor) const {
  const auto& node = tensor.grad_fn();
  return {{node->sequence_nr(), node->thread_id()},
          node->device().is_cuda() == ctx_.runtime.on_cuda()};
}

// Looks at the nodes that the forward has made, and at where they lead.
void BackwardWatch::explore(BackwardUse& use, const std::vector<at::Tensor>& inputs,
                            const std::vector<at::Tensor>& outputs) const {
  walk_graph(
      outputs, use.first_node,
      [&](const torch::autograd::Edge& edge) {
        use.one_queue =
            use.one_queue && edge.function->device().is_cuda() == ctx_.runtime.on_cuda();
      },
      [&](const torch::autograd::Edge& edge) {
        use.is_closed = use.is_closed && is_own_edge(*use.unit, edge.function.get(), inputs);
      });
}

// To a trainable parameter of the unit, or to an input.
bool BackwardWatch::is_own_edge(const UnitCore& unit, Node* node,
                                const std::vector<at::Tensor>& inputs) const {
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
  if (leaf != nullptr && model_.is_used_by(leaf->variable, unit)) {
    return true;
  }
  return std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
    return leaf != nullptr ? input.is_same(leaf->variable)
                           : !input.is_leaf() && input.grad_fn().get() == node;
  });
}

BackwardWatch::BackwardWatch(EngineContext& context, const Model& model, StepDriver& driver)
    : ctx_(context),
      model_(model),
      driver_(&driver),
      track_(ctx_.runtime.spans().enabled() ? ctx_.runtime.spans().add_track("backward of units")
                                            : 0) {}

void BackwardWatch::add(UnitCore& unit, const NodeMark& begun,
                        const std::vector<at::Tensor>& inputs,
                        const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled() ||
      std::none_of(outputs.begin(), outputs.end(),
                   [](const at::Tensor& output) { return output.requires_grad(); })) {
    return;
  }
  auto use = std::make_shared<BackwardUse>();
  use->unit = &unit;
  use->epoch = ctx_.lifecycle.epoch();
  use->first_node = begun;
  bool proves_end = false;  // an input does, by (1)
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    const bool again = std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const at::Tensor& other) { return other.is_same(input); });
    if (input.requires_grad() && !again) {
      ++use->num_inputs;
      proves_end = watch_input(use, input) || proves_end;
    }
  }
  use->one_queue = true;
  if (!proves_end || ctx_.runtime.on_cuda()) {
    use->is_closed = true;
    explore(*use, inputs, outputs);
  }
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) {
      watch_output(use, output);
    }
  }
}

std::shared_ptr<BackwardWatch::Gate> BackwardWatch::gate_of(const at::Tensor& tensor,
                                                            const Origin& origin) {
  std::weak_ptr<Gate>& known = gates_[key_of(tensor)];
  std::shared_ptr<Gate> gate = known.lock();
  if (gate == nullptr) {
    gate = std::make_shared<Gate>();
    known = gate;
    tensor.register_hook([self = shared_from_this(), gate, origin](const at::TensorBase&) {
      self->pass(*gate);
      self->end_uses_after(origin);
      for (const auto& producer : gate->producers) {
        self->begin(producer);
      }
    });
  }
  return gate;
}

std::shared_ptr<BackwardWatch::Gate> BackwardWatch::leaf_gate_of(const at::Tensor& leaf) {
  std::weak_ptr<Gate>& known = leaf_gates_[{leaf.unsafeGetTensorImpl(), 0}];
  std::shared_ptr<Gate> gate = known.lock();
  if (gate == nullptr) {
    gate = std::make_shared<Gate>();
    known = gate;
    leaf.register_hook(
        [self = shared_from_this(), gate](const at::TensorBase&) { self->pass(*gate); });
    std::erase_if(leaf_gates_, [](const auto& each) { return each.second.expired(); });
  }
  return gate;
}

void BackwardWatch::add_consumer(Gate& gate, const std::shared_ptr<BackwardUse>& use) {
  if (gate.consumers.size() >= gate.prune_at) {
    std::erase_if(gate.consumers, [](const auto& each) { return each.expired(); });
    gate.prune_at = 2 * gate.consumers.size() + 16;
  }
  gate.consumers.push_back(use);
}

void BackwardWatch::pass(const Gate& gate) {
  for (const auto& consumer : gate.consumers) {
    if (const auto use = consumer.lock()) {
      on_input_gradient(*use);
    }
  }
}

bool BackwardWatch::watch_input(const std::shared_ptr<BackwardUse>& use, const at::Tensor& input) {
  if (input.is_leaf()) {
    add_consumer(*leaf_gate_of(input), use);
    return false;
  }
  const Origin origin = origin_of(input);
  const bool is_comparable = origin.on_device && origin.mark.thread == use->first_node.thread;
  if (is_comparable && origin.mark.sequence >= use->first_node.sequence) {
    return false;  // changed in place: see [Note: release in backward]
  }
  add_consumer(*gate_of(input, origin), use);
  return is_comparable;
}

void BackwardWatch::watch_output(const std::shared_ptr<BackwardUse>& use,
                                 const at::Tensor& output) {
  if (output.is_leaf()) {
    return;
  }
  const Origin origin = origin_of(output);
  if (origin.mark.thread != use->first_node.thread ||
      origin.mark.sequence < use->first_node.sequence) {
    return;  // it came in as it is: no node of this forward stands behind it
  }
  gate_of(output, origin)->producers.push_back(use);
}

void BackwardWatch::add_kept(UnitCore& unit, const NodeMark& begun,
                             const std::vector<NodePtr>& ends) {
  if (ends.empty()) {
    return;
  }
  const auto use = std::make_shared<BackwardUse>();
  use->unit = &unit;
  use->epoch = ctx_.lifecycle.epoch();
  use->first_node = begun;
  use->one_queue = !ctx_.runtime.on_cuda();  // else nobody has looked
  for (const NodePtr& node : ends) {
    node->add_pre_hook(
        std::make_unique<KeptNodeHook>([self = shared_from_this(), use] { self->begin(use); }));
  }
}

void BackwardWatch::begin(const std::shared_ptr<BackwardUse>& use) {
  if (driver_ == nullptr || use->unit->is_plain()) {
    return;
  }
  driver_->enter_backward();
  if (use->open && use->epoch == ctx_.lifecycle.epoch()) {
    return;  // another output of the same forward
  }
  use->epoch = ctx_.lifecycle.epoch();
  use->inputs_left = use->num_inputs;
  use->graph_task = torch::autograd::get_current_graph_task_id();
  use->open = true;
  use->begun_ns = ctx_.runtime.spans().now_ns();
  open_.push_back(use);
  ctx_.coordinator.begin_use(use->unit->id(), Phase::kBackward);
}

void BackwardWatch::begin_recomputed() {
  if (const auto node = torch::autograd::get_current_node()) {
    end_uses_after({{node->sequence_nr(), node->thread_id()},
                    node->device().is_cuda() == ctx_.runtime.on_cuda()});
  }
}

void BackwardWatch::end_recomputed() {
  // Tasks are numbered as they begin, and those inside of this one have ended.
  const int task = torch::autograd::get_current_graph_task_id();
  for (std::size_t i = open_.size(); i-- > 0;) {
    if (open_[i]->graph_task > task) {
      end(*open_[i]);
    }
  }
}

void BackwardWatch::on_input_gradient(BackwardUse& use) {
  if (driver_ == nullptr || !use.open || use.epoch != ctx_.lifecycle.epoch()) {
    return;  // the output of that forward had no part in this backward
  }
  --use.inputs_left;
  end_if_complete(use);
}

void BackwardWatch::end_uses_after(const Origin& node) {
  if (driver_ == nullptr || !node.on_device || open_.empty()) {
    return;
  }
  const int task = torch::autograd::get_current_graph_task_id();
  for (std::size_t i = open_.size(); i-- > 0;) {
    BackwardUse& use = *open_[i];
    if (use.one_queue && use.graph_task == task && use.first_node.thread == node.mark.thread &&
        use.first_node.sequence > node.mark.sequence) {
      end(use);
    }
  }
}

void BackwardWatch::on_param_gradient(UnitCore& unit) {
  unit.count_gradient();
  // Ending removes from open_.
  for (std::size_t i = open_.size(); i-- > 0;) {
    if (open_[i]->unit == &unit) {
      end_if_complete(*open_[i]);
    }
  }
}

void BackwardWatch::end_if_complete(BackwardUse& use) {
  if (use.is_closed && use.inputs_left <= 0 && use.unit->has_all_gradients() &&
      use.num_inputs + use.unit->num_trainable() > 0) {
    end(use);
  }
}

void BackwardWatch::end(BackwardUse& use) {
  use.open = false;
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& each) { return each.get() == &use; });
  const std::shared_ptr<BackwardUse> keep = std::move(*found);
  open_.erase(found);
  record_span(use);
  ctx_.coordinator.end_use(use.unit->id(), Phase::kBackward);
  ctx_.tiers.end_backward_of(use.unit->id());
}

// Units of branches may be open at the same time, which one track cannot show: the later one is
// drawn from the end of the other.
void BackwardWatch::record_span(const BackwardUse& use) {
  Spans& spans = ctx_.runtime.spans();
  if (!spans.enabled()) {
    return;
  }
  const std::int64_t end_ns = spans.now_ns();
  const std::int64_t start_ns =
      use.begun_ns > last_span_.first ? std::max(use.begun_ns, last_span_.second) : use.begun_ns;
  last_span_ = {start_ns, end_ns};
  SpanArgs args;
  args.unit = ctx_.coordinator.unit(use.unit->id()).label;
  spans.record_on(track_, "backward", start_ns, end_ns, args);
}

void BackwardWatch::close() {
  while (!open_.empty()) {
    end(*open_.back());
  }
  gates_.clear();
}

void BackwardWatch::forget() {
  for (const auto& use : open_) {
    use->open = false;
  }
  open_.clear();
  gates_.clear();
}

}  // namespace tessera::engine
