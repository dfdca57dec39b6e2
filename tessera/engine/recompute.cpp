// Recomputation: a block's forward runs without keeping activations, and again in its backward.
//
// The parameters are inputs of the autograd node, as at::TensorList: a std::vector<Tensor> would
// silently not be differentiated. Backward differentiates with autograd::grad(), so that gradients
// of parameters leave through the node and fire their hooks once, also for tied weights; an inner
// backward() would fire them twice, and would not train a block whose input needs no gradient.

#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "tessera/core/error.h"
#include "tessera/engine/backward_watch.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/engine/unit_core.h"
#include "tessera/engine/unit_state.h"

namespace tessera::engine {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The state of the generators that forward may draw from (dropout).
class RandomState {
 public:
  static RandomState now(const std::vector<at::Tensor>& inputs) {
    RandomState state;
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.is_cuda()) {
        state.add(at::globalContext().defaultGenerator(input.device()));
        break;
      }
    }
    state.add(at::detail::getDefaultCPUGenerator());
    return state;
  }

  void restore() const {
    for (const auto& [generator, saved] : saved_) {
      at::Generator target = generator;
      const std::lock_guard<std::mutex> lock(target.mutex());
      target.set_state(saved);
    }
  }

 private:
  void add(at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    saved_.emplace_back(generator, state);
  }
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

// Puts the generators back to where they were when the guard was made.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(const std::vector<at::Tensor>& inputs)
      : state_(RandomState::now(inputs)) {}
  ~RandomStateGuard() { state_.restore(); }
  RandomStateGuard(const RandomStateGuard&) = delete;
  RandomStateGuard& operator=(const RandomStateGuard&) = delete;

 private:
  const RandomState state_;
};

struct Call : torch::CustomClassHolder {
  std::shared_ptr<UnitCore> unit;
  TensorsFn forward;
  std::size_t num_inputs = 0;
  RandomState random;
};

// Around the first forward: units inside it are trained, too, though grad mode is off.
class FirstPass {
 public:
  explicit FirstPass(Engine::Impl& engine) : engine_(engine) { ++engine_.recompute_depth(); }
  ~FirstPass() { --engine_.recompute_depth(); }
  FirstPass(const FirstPass&) = delete;
  FirstPass& operator=(const FirstPass&) = delete;

 private:
  Engine::Impl& engine_;
};

// Around the second forward and its differentiation.
class BackwardScope {
 public:
  explicit BackwardScope(UnitCore* unit) : unit_(unit) {
    if (unit_ == nullptr || unit_->is_plain()) {
      return;
    }
    engine_ = unit_->engine();
    TESSERA_CHECK(engine_ != nullptr, ConfigError, "the backward of unit '", unit_->name(),
                  "' runs after its engine is gone");
    engine_->enter_backward(*unit_);
    engine_->backward_watch().begin_recomputed();
    epoch_ = engine_->epoch();
    engine_->coordinator().begin_use(unit_->id(), coordinator::Phase::kBackward);
  }
  void finish() {
    if (engine_ != nullptr && engine_->epoch() == epoch_) {
      engine_->coordinator().end_use(unit_->id(), coordinator::Phase::kBackward);
    }
  }

 private:
  UnitCore* unit_;
  Engine::Impl* engine_ = nullptr;
  std::uint64_t epoch_ = 0;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                               at::TensorList inputs, at::TensorList params) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    call->num_inputs = inputs.size();
    variable_list saved(inputs.begin(), inputs.end());
    saved.insert(saved.end(), params.begin(), params.end());
    context->save_for_backward(saved);
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> arguments = inputs.vec();
    if (call->unit == nullptr) {
      return call->forward(arguments);
    }
    ForwardScope scope(*call->unit, coordinator::Phase::kForward);
    const FirstPass first(*call->unit->engine());
    variable_list outputs = call->forward(arguments);
    scope.finish({}, {});
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const variable_list saved = context->get_saved_variables();
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < call->num_inputs; ++i) {
      inputs.push_back(saved[i].detach().set_requires_grad(saved[i].requires_grad()));
    }
    variable_list sources;  // what gradients are asked for
    for (const at::Tensor& input : inputs) {
      if (input.requires_grad()) {
        sources.push_back(input);
      }
    }
    for (std::size_t i = call->num_inputs; i < saved.size(); ++i) {
      if (saved[i].requires_grad()) {
        sources.push_back(saved[i]);
      }
    }

    BackwardScope scope(call->unit.get());
    variable_list outputs;
    {
      const RandomStateGuard guard(inputs);
      call->random.restore();
      const at::AutoGradMode with_grad(true);
      outputs = call->forward(inputs);
    }
    variable_list roots;
    variable_list root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].requires_grad() && gradients[i].defined()) {
        roots.push_back(outputs[i]);
        root_gradients.push_back(gradients[i]);
      }
    }
    variable_list found;
    if (!roots.empty() && !sources.empty()) {
      found = torch::autograd::grad(roots, sources, root_gradients, /*retain_graph=*/false,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    }
    scope.finish();

    variable_list result{at::Tensor()};  // of `call`
    std::size_t next = 0;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      const bool asked = saved[i].requires_grad() && next < found.size();
      result.push_back(asked ? found[next++] : at::Tensor());
    }
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> run_recomputed(UnitCore* unit, const std::vector<at::Tensor>& params,
                                       const std::vector<at::Tensor>& inputs, TensorsFn forward) {
  if (!at::GradMode::is_enabled()) {
    if (unit == nullptr) {
      return forward(inputs);
    }
    ForwardScope scope(*unit);
    std::vector<at::Tensor> outputs = forward(inputs);
    scope.finish({}, {});
    return outputs;
  }
  auto call = c10::make_intrusive<Call>();
  call->unit = share(unit);
  call->random = RandomState::now(inputs);
  call->forward = std::move(forward);
  return Recompute::apply(call, at::TensorList(inputs), at::TensorList(params));
}

}  // namespace tessera::engine
