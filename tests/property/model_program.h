// A drawn model as LibTorch modules: sharded by an engine, or plain. The same code builds and runs
// both, so that what differs between them is the engine alone.
//
// Threads: as Engine; the plain one: as any object.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/engine.h"
#include "tests/property/random_model.h"

namespace tessera::testing {

struct Batch {
  at::Tensor values;  // rows x columns
  at::Tensor ids;     // one integer per row
};

// Makes a run of a unit's module throw, as a user's code may.
struct Interruption : std::runtime_error {
  Interruption() : std::runtime_error("interrupted on purpose") {}
};
struct Interrupter {
  int runs_left = 0;         // until the module that throws; 0: none does
  bool in_backward = false;  // not in its forward, but when the gradient of its result comes
  bool is_armed = false;     // until the run that may be interrupted is over
};

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
struct SideEffects {
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> buffers;  // of all modules
  SegmentAliases aliases;
};

// A copy of them, and back.
std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors);
void assign(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values);

struct BuildOptions {
  // Null: plain.
  Engine* engine = nullptr;
  // Of the modules' own values: on ranks but 0 the engine must not take them.
  double shift = 0;
  // Of a plain model.
  bool recompute = true;
  bool in_double = false;
  // Of a plain model that does not recompute: gradients of what a recomputed unit uses are added
  // inside of it first, as recomputation does, so that no bit depends on it. See SegmentAliases.
  bool groups_gradients = false;
};

class ModelProgram {
 public:
  ModelProgram(const ModelPlan& plan, const BuildOptions& options);

  // One forward. The head's loss comes first; losses that need no gradient are left out unless
  // gradients are off.
  std::vector<at::Tensor> losses(const Batch& batch, const Moment& moment) const {
    return losses(input_of(batch), batch.ids, moment);
  }
  std::vector<at::Tensor> losses(const at::Tensor& input, const at::Tensor& ids,
                                 const Moment& moment) const;
  // Of the sum of the losses, outside of training: no parameter gets one.
  at::Tensor input_gradient(const Batch& batch, const Moment& moment) const;
  // In the order of the plan.
  const std::vector<at::Tensor>& params() const { return params_; }
  // Each rank has its own.
  const std::vector<at::Tensor>& buffers() const { return side_effects_->buffers; }
  // Of a plain model: what module->to(type) does.
  void to(at::ScalarType type) const;
  Interrupter& interrupter() const { return *interrupter_; }
  // Gradients of inputs that need one, in the order of the forwards since the last call.
  std::vector<at::Tensor> take_input_gradients() const;

  using Call =
      std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, const at::Tensor&)>;

 private:
  at::ScalarType value_type() const { return options_.in_double ? at::kDouble : at::kFloat; }
  at::Tensor input_of(const Batch& batch) const;
  at::Tensor make_value(std::size_t param, const UnitPlan& unit) const;
  void add_unit(const UnitPlan& unit);
  void add_weight_loss(const WeightLossPlan& loss);
  template <typename Module>
  Call wrap(const UnitPlan& unit);
  std::vector<at::Tensor> call(int unit, std::vector<at::Tensor> arguments,
                               const at::Tensor& ids) const;

  const ModelPlan& plan_;
  const BuildOptions options_;
  std::vector<at::Tensor> params_;
  std::vector<Call> units_;
  std::vector<std::function<at::Tensor()>> weight_losses_;
  const std::shared_ptr<Interrupter> interrupter_ = std::make_shared<Interrupter>();
  const std::shared_ptr<SideEffects> side_effects_ = std::make_shared<SideEffects>();
  mutable std::vector<at::Tensor> inputs_;  // leaves of the user's own
};

}  // namespace tessera::testing
