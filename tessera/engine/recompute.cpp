#include "tessera/engine/recompute.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/empty.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/custom_class.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine_objects.h"
#include "tessera/engine/graph_walk.h"
#include "tessera/engine/unit_core.h"

namespace tessera::engine {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::variable_list;

// Shares the memory until one of the two is written to, where the memory is torch's own.
at::Tensor copy_on_write(const at::Tensor& tensor) {
  try {
    return at::_lazy_clone(tensor);
  } catch (const c10::Error&) {
    return tensor.detach().clone();
  }
}

// What a forward finds around it and may depend on. Autocast is the calling thread's; generators
// and buffers are shared, and whoever runs a forward has them for itself.
class ForwardState {
 public:
  ForwardState() = default;
  // What is there now. A buffer that nobody writes to afterwards costs no copy.
  ForwardState(const std::vector<at::Tensor>& buffers, bool with_cuda)
      : autocast_{{of_device(at::kCPU), of_device(at::kCUDA)}},
        autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
    if (with_cuda) {  // the current GPU's
      add_generator(at::globalContext().defaultGenerator(at::Device(at::kCUDA, -1)));
    }
    add_generator(at::detail::getDefaultCPUGenerator());
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : buffers) {
      if (buffer.defined() && buffer.has_storage()) {
        buffers_.emplace_back(buffer, copy_on_write(buffer));
      }
    }
  }

  void apply() const {
    for (const Autocast& each : autocast_) {
      at::autocast::set_autocast_dtype(each.device, each.dtype);
      at::autocast::set_autocast_enabled(each.device, each.enabled);
    }
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    for (const auto& [generator, state] : generators_) {
      at::Generator target = generator;
      const std::lock_guard<std::mutex> lock(target.mutex());
      target.set_state(state);
    }
    // Without a trace in the version counters: torch's own running statistics leave none either.
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, value] : buffers_) {
      if (buffer.const_data_ptr() != value.const_data_ptr()) {
        buffer.variable_data().copy_(value);
      }
    }
  }

 private:
  struct Autocast {
    at::DeviceType device = at::kCPU;
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  static Autocast of_device(at::DeviceType device) {
    return {device, at::autocast::is_autocast_enabled(device),
            at::autocast::get_autocast_dtype(device)};
  }
  void add_generator(at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    generators_.emplace_back(std::move(generator), state);
  }

  std::array<Autocast, 2> autocast_ = {};
  bool autocast_cache_ = false;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  // with the value of then
};

struct Call : torch::CustomClassHolder {
  std::string name;  // of the unit, for messages
  std::shared_ptr<UnitCore> unit;
  RecomputedForward forward;
  ForwardState state;                  // before the first forward
  std::vector<Edge> outer;             // that lead out of it
  std::vector<bool> has_gradient;      // by output: it is the node's
  std::int64_t num_updated_steps = 0;  // of the engine, when it ran
};

bool is_on_cuda(const UnitCore* unit, const std::vector<at::Tensor>& inputs) {
  return (unit != nullptr && unit->engine()->context.runtime.on_cuda()) ||
         std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor& input) { return input.is_cuda(); });
}

// Around the second forward: what is around it is that of the first one, and afterwards what it
// was.
class StateOfFirst {
 public:
  StateOfFirst(const ForwardState& first, const std::vector<at::Tensor>& buffers, bool with_cuda)
      : now_(buffers, with_cuda) {
    first.apply();
  }
  ~StateOfFirst() { now_.apply(); }
  StateOfFirst(const StateOfFirst&) = delete;
  StateOfFirst& operator=(const StateOfFirst&) = delete;

 private:
  const ForwardState now_;
};

const std::vector<at::Tensor>& buffers_of(const Call& call) {
  return call.unit == nullptr ? call.forward.buffers : call.unit->engine()->model.buffers();
}

// "parameter 'blocks.0.weight'", or what else can be said of where an edge leads.
std::string describe(const Edge& edge, const Call& call) {
  const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get());
  if (leaf == nullptr) {
    return detail::concat("a tensor made by ", edge.function->name());
  }
  if (call.unit != nullptr) {
    const EngineObjects& engine = *call.unit->engine();
    if (const std::optional<int> id = engine.model.find(leaf->variable)) {
      return detail::concat("parameter '", engine.context.params[*id].name(), "'");
    }
  }
  return detail::concat("a leaf of sizes ", leaf->variable.sizes());
}

// Made inside of the forward, and gone with it: nobody could look at its gradient.
bool is_left_behind(const Edge& edge) {
  const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get());
  return leaf != nullptr && leaf->variable.use_count() == 1;
}

// A tensor that stands for what an edge leads to: as an input of a node it gives that edge.
at::Tensor input_for(const Edge& edge) {
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get())) {
    return leaf->variable;
  }
  at::Tensor input = at::empty({0});
  torch::autograd::impl::set_gradient_edge(input, edge);
  return input;
}

// A leaf of the shape of the gradients that pass an edge, without memory for its elements.
at::Tensor leaf_for(const Edge& edge) {
  const torch::autograd::InputMetadata& passes = edge.function->input_metadata(edge.input_nr);
  const at::NoGradGuard no_grad;
  return at::empty({}, passes.options())
      .expand_symint(passes.shape_as_dim_vector())
      .set_requires_grad(true);
}

// Around the second forward and its differentiation.
class BackwardScope {
 public:
  explicit BackwardScope(UnitCore* unit) : unit_(unit) {
    if (unit_ == nullptr || unit_->is_plain()) {
      return;
    }
    engine_ = unit_->engine();
    engine_->driver.enter_backward();
    engine_->driver.backward_watch().begin_recomputed();
    epoch_ = engine_->context.lifecycle.epoch();
    engine_->context.coordinator.begin_use(unit_->id(), coordinator::Phase::kBackward);
  }
  void finish() {
    if (engine_ != nullptr && engine_->context.lifecycle.epoch() == epoch_) {
      engine_->driver.backward_watch().end_recomputed();
      engine_->context.coordinator.end_use(unit_->id(), coordinator::Phase::kBackward);
    }
  }

 private:
  UnitCore* unit_;
  EngineObjects* engine_ = nullptr;
  std::uint64_t epoch_ = 0;
};

// The graph of the second forward ends where that of the first did: edges that lead out of it lead
// to leaves of ours, which are returned in the order of call.outer.
variable_list cut_graph(const Call& call, const variable_list& outputs, const NodeMark& begun) {
  std::unordered_map<Edge, std::size_t> indices;
  for (std::size_t i = 0; i < call.outer.size(); ++i) {
    indices.emplace(call.outer[i], i);
  }
  variable_list leaves(call.outer.size());
  std::vector<Edge> others;
  walk_graph(
      outputs, begun, [](const Edge&) {},
      [&](Edge& edge) {
        const auto index = indices.find(edge);
        if (index == indices.end()) {
          others.push_back(edge);
          return;
        }
        at::Tensor& leaf = leaves[index->second];
        if (!leaf.defined()) {
          leaf = leaf_for(edge);
        }
        edge = torch::autograd::impl::gradient_edge(leaf);
      });
  // A leaf that each forward makes for itself is another one each time.
  std::size_t num_left_behind = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].defined()) {
      continue;
    }
    TESSERA_CHECK(is_left_behind(call.outer[i]), ConfigError, "recomputed unit '", call.name,
                  "': its forward used ", describe(call.outer[i], call),
                  " the first time and not the second, so the gradient is unknown. What it reads "
                  "(members, captured variables, random numbers of a generator of its own) must be "
                  "the same in backward; pass what changes as an argument");
    ++num_left_behind;
  }
  TESSERA_CHECK(others.size() <= num_left_behind, ConfigError, "recomputed unit '", call.name,
                "': its forward used ", describe(others.front(), call),
                " the second time and not the first, so the gradient is unknown. What it reads "
                "(members, captured variables) must be the same in backward; pass what changes as "
                "an argument");
  return leaves;
}

variable_list saved_inputs(AutogradContext& context, const Call& call) {
  try {
    return context.get_saved_variables();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    TESSERA_CHECK(
        text.find("a second time") == std::string::npos, ConfigError, "unit '", call.name,
        "': a second backward through the graph of one forward; what it needs is freed by "
        "the first. Add the losses and call backward() once, or run the forward again");
    TESSERA_CHECK(text.find("inplace") == std::string::npos, ConfigError, "recomputed unit '",
                  call.name,
                  "': its input was changed in place after the forward, which backward has to run "
                  "again with the same input; use an operation that makes a new tensor");
    throw;
  }
}

struct Recompute : torch::autograd::Function<Recompute> {
  // `ends` have the edges of the node. The outputs are there already.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                               at::TensorList /*ends*/, const variable_list& inputs,
                               const variable_list& outputs) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->save_for_backward(inputs);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    UnitCore* const unit = call->unit.get();
    TESSERA_CHECK(unit == nullptr || unit->is_plain() || unit->engine() != nullptr, ConfigError,
                  "the backward of unit '", call->name, "' runs after its engine is gone");
    if (unit != nullptr && !unit->is_plain()) {
      TESSERA_CHECK(unit->engine()->driver.num_updated_steps() == call->num_updated_steps,
                    ConfigError, "recomputed unit '", call->name,
                    "': its parameters were updated by step() after this forward, which backward "
                    "would run again with the new ones; call backward() before step(), or run the "
                    "forward again");
    }
    const variable_list inputs = saved_inputs(*context, *call);
    BackwardScope scope(unit);
    variable_list found(call->outer.size());
    {
      variable_list outputs;
      const NodeMark begun = NodeMark::next();
      {
        const StateOfFirst state(call->state, buffers_of(*call), is_on_cuda(unit, inputs));
        const NoAutocastCache no_cache;
        const at::AutoGradMode with_grad(true);
        outputs = call->forward.run(inputs);
      }
      const variable_list leaves = cut_graph(*call, outputs, begun);
      variable_list roots;
      variable_list root_gradients;
      std::size_t next = 0;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!call->has_gradient[i]) {
          continue;
        }
        const at::Tensor& gradient = gradients[next++];
        if (gradient.defined()) {
          roots.push_back(outputs[i]);
          root_gradients.push_back(gradient);
        }
      }
      variable_list asked;
      for (const at::Tensor& leaf : leaves) {
        if (leaf.defined()) {
          asked.push_back(leaf);
        }
      }
      if (!roots.empty() && !asked.empty()) {
        variable_list answers =
            torch::autograd::grad(roots, asked, root_gradients, /*retain_graph=*/false,
                                  /*create_graph=*/false, /*allow_unused=*/true);
        std::size_t answer = 0;
        for (std::size_t i = 0; i < leaves.size(); ++i) {
          if (leaves[i].defined()) {
            found[i] = std::move(answers[answer++]);
          }
        }
      }
    }
    scope.finish();
    variable_list result{at::Tensor()};  // of `call`
    result.insert(result.end(), found.begin(), found.end());
    result.resize(result.size() + 2);  // of inputs and outputs
    return result;
  }
};

// The tensor without its history; changes in place count for both.
at::Tensor without_graph(const at::Tensor& tensor) {
  at::Tensor shown = tensor.variable_data();
  torch::autograd::impl::set_version_counter(shown, torch::autograd::impl::version_counter(tensor));
  return shown;
}

// Nodes of the graph, watched without keeping them.
class GraphNodes {
 public:
  void add(const Edge& edge) { nodes_.emplace_back(edge.function); }
  // Of those that somebody keeps, the ones that no other of them leads to.
  std::vector<NodePtr> kept_ends() const {
    std::vector<NodePtr> kept;
    std::unordered_set<const torch::autograd::Node*> below;
    for (const WeakNode& node : nodes_) {
      if (NodePtr alive = node.lock()) {
        for (const Edge& edge : alive->next_edges()) {
          below.insert(edge.function.get());
        }
        kept.push_back(std::move(alive));
      }
    }
    std::erase_if(kept, [&](const NodePtr& node) { return below.count(node.get()) > 0; });
    return kept;
  }

 private:
  std::vector<WeakNode> nodes_;
};

std::vector<std::uint32_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

}  // namespace

std::vector<at::Tensor> run_recomputed(UnitCore* unit, const std::vector<at::Tensor>& inputs,
                                       RecomputedForward forward) {
  if (!at::GradMode::is_enabled()) {
    if (unit == nullptr) {
      return forward.run(inputs);
    }
    ForwardScope scope(*unit);
    std::vector<at::Tensor> outputs = forward.run(inputs);
    scope.finish({}, {});
    return outputs;
  }
  auto call = c10::make_intrusive<Call>();
  call->name = unit == nullptr ? "(plain)" : unit->name();
  call->unit = unit == nullptr ? nullptr : unit->shared_from_this();
  call->forward = std::move(forward);
  std::optional<ForwardScope> scope;
  if (unit != nullptr) {
    scope.emplace(*unit);
    call->num_updated_steps = unit->engine()->driver.num_updated_steps();
  }
  call->state = ForwardState(buffers_of(*call), is_on_cuda(unit, inputs));
  const std::vector<std::uint32_t> versions = versions_of(inputs);
  const NodeMark begun = NodeMark::next();
  variable_list outputs;
  {
    const NoAutocastCache no_cache;
    const auto run = [&] { return call->forward.run(inputs); };
    outputs = scope ? scope->run(run) : run();
  }
  TESSERA_CHECK(versions == versions_of(inputs), ConfigError, "recomputed unit '", call->name,
                "' changes its input in place, so backward could not run it again with the same "
                "input; use an operation that makes a new tensor, or do not recompute it");
  if (scope && call->forward.opaque_result != nullptr) {
    scope->check_seen(outputs, *call->forward.opaque_result);
  }
  GraphNodes nodes;
  std::unordered_set<Edge> known;
  walk_graph(
      outputs, begun, [&](const Edge& edge) { nodes.add(edge); },
      [&](const Edge& edge) {
        if (known.insert(edge).second) {
          call->outer.push_back(edge);
        }
      });
  variable_list shown;  // what the node makes
  for (at::Tensor& output : outputs) {
    // What was there before the forward is returned as it is.
    const bool is_made =
        output.requires_grad() && !output.is_leaf() && is_made_since(*output.grad_fn(), begun);
    call->has_gradient.push_back(is_made);
    if (is_made) {
      output = without_graph(output);
      shown.push_back(output);
    }
  }
  if (scope) {
    // The graph is gone now but for what somebody keeps.
    unit->engine()->driver.backward_watch().add_kept(*unit, begun, nodes.kept_ends());
    scope->finish({}, {});
  }
  if (shown.empty()) {
    return outputs;
  }
  variable_list ends;
  for (const Edge& edge : call->outer) {
    ends.push_back(input_for(edge));
  }
  const std::vector<bool> is_made = call->has_gradient;
  shown = Recompute::apply(call, at::TensorList(ends), inputs, shown);
  std::size_t next = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (is_made[i]) {
      outputs[i] = shown[next++];
    }
  }
  return outputs;
}

}  // namespace tessera::engine
