// A module whose parameters are whole only while it runs.
//
//   Unit<BlockImpl> block = engine.unit("blocks.0", std::make_shared<BlockImpl>(width, heads));
//   x = block(x);
//
// The call gathers, runs the module's forward and releases; autograd hooks do the same in backward.
// tensor_pack.h says in which arguments and results tensors are found; a result that needs a
// gradient and in which no tensor is found is a ConfigError. With `recompute` no activations are
// kept and the forward runs again in backward; recompute.h has the contract.
//
// A unit made from a module alone is plain: it only calls the module, so the same model code also
// trains unsharded. Engine::to_plain() makes every unit of its engine plain.
//
// Threads: as Engine.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "tessera/engine/forward_scope.h"
#include "tessera/engine/recompute.h"
#include "tessera/engine/tensor_pack.h"
#include "tessera/engine/unit_core.h"

namespace tessera {

template <typename Module>
class Unit {
 public:
  Unit() = default;
  // Plain.
  explicit Unit(std::shared_ptr<Module> module, bool recompute = false)
      : module_(std::move(module)), recompute_(recompute) {}
  // Made by Engine::unit().
  Unit(std::shared_ptr<Module> module, engine::UnitCore* core, bool recompute)
      : Unit(std::move(module), recompute) {
    core_ = core == nullptr ? nullptr : core->shared_from_this();
  }

  template <typename... Args>
  auto operator()(Args&&... args) const {
    return forward(std::forward<Args>(args)...);
  }

  template <typename... Args>
  auto forward(Args&&... args) const {
    using Result = std::decay_t<decltype(module_->forward(std::forward<Args>(args)...))>;
    if (recompute_) {
      return run_again_in_backward<Result>(std::make_tuple(std::decay_t<Args>(args)...));
    }
    if (is_plain()) {
      return Result(module_->forward(std::forward<Args>(args)...));
    }
    std::vector<at::Tensor> inputs;
    (engine::pack_tensors(args, inputs), ...);
    engine::ForwardScope scope(*core_);
    Result result =
        scope.run([&] { return Result(module_->forward(std::forward<Args>(args)...)); });
    std::vector<at::Tensor> outputs;
    engine::pack_tensors(result, outputs);
    if constexpr (engine::is_opaque<Result>()) {
      scope.check_seen(outputs, typeid(Result));
    }
    scope.finish(inputs, outputs);
    return result;
  }

  Module* operator->() const { return module_.get(); }
  const std::shared_ptr<Module>& module() const { return module_; }
  engine::UnitCore* core() const { return core_.get(); }

 private:
  bool is_plain() const { return core_ == nullptr || core_->is_plain(); }

  template <typename Result, typename Tuple>
  Result run_again_in_backward(Tuple args) const {
    std::vector<at::Tensor> inputs;
    engine::pack_tensors(args, inputs);
    // Autograd owns the inputs. Arguments that also held them would keep them until the loss is
    // freed.
    std::size_t taken = 0;
    engine::unpack_tensors(args, std::vector<at::Tensor>(inputs.size(), at::empty({0})), taken);
    // The positions of tensors in the result; needed for the first run only.
    auto shape = std::make_shared<std::optional<Result>>();
    engine::RecomputedForward forward;
    forward.run = [module = module_, args = std::move(args),
                   first = std::weak_ptr(shape)](const std::vector<at::Tensor>& tensors) mutable {
      std::size_t next = 0;
      Tuple replaced = args;
      engine::unpack_tensors(replaced, tensors, next);
      Result result = std::apply([&](auto&... each) { return module->forward(each...); }, replaced);
      std::vector<at::Tensor> outputs;
      engine::pack_tensors(result, outputs);
      if (const auto shape = first.lock()) {
        next = 0;
        engine::unpack_tensors(result, std::vector<at::Tensor>(outputs.size(), at::empty({0})),
                               next);
        *shape = std::move(result);
      }
      return outputs;
    };
    if constexpr (engine::is_opaque<Result>()) {
      forward.opaque_result = &typeid(Result);
    }
    if constexpr (requires { module_->buffers(); }) {
      if (is_plain()) {
        forward.buffers = module_->buffers();
      }
    }
    const std::vector<at::Tensor> outputs =
        engine::run_recomputed(is_plain() ? nullptr : core_.get(), inputs, std::move(forward));
    Result result = std::move(**shape);
    shape->reset();
    std::size_t next = 0;
    engine::unpack_tensors(result, outputs, next);
    return result;
  }

  std::shared_ptr<Module> module_;
  std::shared_ptr<engine::UnitCore> core_;
  bool recompute_ = false;
};

template <typename Callable>
class FunctionModule {
 public:
  FunctionModule(Callable callable, std::vector<at::Tensor> params)
      : callable_(std::move(callable)), params_(std::move(params)) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    return callable_(std::forward<Args>(args)...);
  }
  const std::vector<at::Tensor>& parameters() const { return params_; }

 private:
  Callable callable_;
  std::vector<at::Tensor> params_;
};

}  // namespace tessera
