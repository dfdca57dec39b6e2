// A drawn model as LibTorch modules: sharded by an engine, or plain. The same code builds and runs
// both, so that what differs between them is the engine alone.
//
// Threads: as Engine; the plain one: as any object.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/engine.h"
#include "tests/property/random_model.h"

namespace tessera::testing {

struct Batch {
  at::Tensor values;  // rows x columns
  at::Tensor ids;     // one integer per row
};

struct BuildOptions {
  // Null: plain.
  Engine* engine = nullptr;
  // Of the modules' own values: on ranks but 0 the engine must not take them.
  double shift = 0;
  // Of a plain model.
  bool recompute = true;
  bool in_double = false;
};

class ModelProgram {
 public:
  ModelProgram(const ModelPlan& plan, const BuildOptions& options);

  // One forward. The head's loss comes first; losses that need no gradient are left out unless
  // gradients are off.
  std::vector<at::Tensor> losses(const Batch& batch, const Moment& moment) const;
  // In the order of the plan.
  const std::vector<at::Tensor>& params() const { return params_; }

  using Call =
      std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, const at::Tensor&)>;

 private:
  at::Tensor make_value(std::size_t param, const UnitPlan& unit) const;
  void add_unit(const UnitPlan& unit);
  template <typename Module>
  Call wrap(const UnitPlan& unit);
  std::vector<at::Tensor> call(int unit, std::vector<at::Tensor> arguments,
                               const at::Tensor& ids) const;
  // What a unit reaches through the units inside of it.
  std::vector<at::Tensor> inner_params(const UnitPlan& unit) const;

  const ModelPlan& plan_;
  const BuildOptions options_;
  std::vector<at::Tensor> params_;
  std::vector<Call> units_;
};

}  // namespace tessera::testing
