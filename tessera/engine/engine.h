// Sharded training of a LibTorch model: every parameter, gradient and optimizer state is cut over
// the ranks, and a parameter is whole only while a unit uses it. docs/cpp-guide.md is the guide.
//
//   tessera::Runtime runtime(config);
//   tessera::Engine engine(runtime);
//   auto block = engine.unit("block", std::make_shared<BlockImpl>());    // sharded as it is made
//   for (...) {
//     at::Tensor loss = ...block(x)...;
//     engine.backward(loss, num_tokens);   // once per micro-batch
//     tessera::StepResult result = engine.step();
//   }
//
// Units are made in the same order on every rank, all before the first forward. A model built unit
// by unit never holds more than one unit in full.
//
// Means: backward(loss, weight) adds weight * gradient(loss); step() divides by the sum of the loss
// weights over micro-batches and ranks. With token counts as weights that is the mean over tokens.
// On one rank training equals unsharded training bit for bit. Leaf tensors of the user that are no
// parameters of the engine (a prompt, a temperature) get the gradient of (weight *
// loss).backward(); in fp16 it is multiplied by StepResult::loss_scale and divided by a power of
// two, the smallest that is at least the largest weight of the first backward.
//
// As in torch, a parameter that no rank has used in a step is not updated: its states and its own
// step count stay. If any rank has used it, it is updated on all. Backward through a graph from
// before an update is an error where torch has one, and for every recomputed unit. Parameters may
// be frozen and unfrozen between steps, by set_trainable() or requires_grad_(), on all ranks alike;
// their optimizer states stay.
//
// Types: with the option precision, floating parameters and buffers are converted to that type as
// units are made, as by module->to(), and master weights keep the values from before the
// conversion; a BuildScope with a type overrides it. Losses are scaled where parameters are fp16.
//
// Order of collectives: uses and plan (coordinator.h) for gathers, registration (reducer.h) for
// reductions, the caller for the rest. step(): a comparison of uses and one all-reduce; a unit: one
// small exchange and one broadcast per parameter with module values; the first backward in fp16:
// one all-reduce. Where Engine says "collective", every rank calls it at the same point.
//
// Errors: an exception in a unit's forward reaches the caller, and earlier micro-batches of the
// step are kept. After one in a backward step() refuses until zero_grad() was called. All ranks
// must do the same: a rank that gave up a pass on its own is named at the next step(). What one
// rank may refuse (a path, a parameter) is agreed on first, and refused by all. A failed collective
// poisons its group.
//
// Threads: one thread at a time; during backward() autograd's threads act on its behalf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include "tessera/comm/mesh.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/engine/engine_tiers.h"
#include "tessera/engine/init.h"
#include "tessera/engine/param_scopes.h"
#include "tessera/engine/runtime.h"
#include "tessera/engine/save_options.h"
#include "tessera/engine/unit.h"
#include "tessera/grad/reducer.h"
#include "tessera/shard/param.h"

namespace tessera {

namespace engine {
struct EngineObjects;
}
namespace optim {
class Optimizer;
}

struct NamedTensor {
  std::string name;  // inside the unit
  at::Tensor tensor;
};

struct UnitOptions {
  bool recompute = false;
  // Some ranks may skip it in a step (mixture of experts); also unit.dynamic_names.
  bool dynamic = false;
  // Prefix of the parameters' names; null: the unit's name and a dot.
  std::optional<std::string> param_prefix = {};
  // Initial values, by the parameter's name inside the unit; null: Init::module().
  std::function<Init(const std::string& name)> init = {};
  // Multiplies the optimizer's weight decay; null: 1.
  std::function<double(const std::string& name, const at::Tensor& param)> weight_decay_scale = {};
  // How a frozen parameter is stored: 4 or 8: as blocks of integers of that many bits; 0: as it is.
  // Null: the options quant.frozen_bits and quant.frozen_names decide.
  std::function<int(const std::string& name, const at::Tensor& param)> frozen_bits = {};
};

struct EngineOptions {
  // Number of steps of the schedule where schedule.total_steps is 0.
  std::int64_t run_steps = 0;
  // Shapes of the model that will be built. With them memory is planned before anything is
  // allocated: a model that does not fit is refused, and every shard is made in its final tier.
  // Without them that happens at the first forward, and shards may move then.
  std::optional<planner::ModelShapes> shapes = {};
  // What is known of a step's memory, to find budgets that were not given; see memory_planning.h.
  StepExpectations step = {};
  // The result of plan_memory() for these shapes, if it was called before.
  std::optional<MemoryPlanning> planning = {};
};

struct StepResult {
  std::int64_t step = 0;  // from 1; skipped ones count
  bool skipped = false;   // a gradient was not finite: nothing was updated
  double loss = 0;        // weighted mean over ranks and micro-batches
  double grad_norm = 0;   // of the mean gradient, before clipping
  double lr = 0;
  double loss_scale = 1;
  double weight = 0;  // sum of loss weights over ranks and micro-batches
  bool stop = false;  // a rank has called request_stop(): the same on all ranks
};

// One step's work of this rank, since the last take_stats().
struct EngineStats {
  coordinator::CoordinatorStats gathers;
  grad::ReducerStats reductions;
  std::uint64_t gathered_wire_bytes = 0;  // sent by this rank
  std::uint64_t reduced_wire_bytes = 0;
  // With quantised reductions: relative error of this rank's contributions to its own shards, as a
  // ratio of roots of sums of squares; and the parameter with the largest error.
  double grad_quant_error = 0;
  std::string worst_quantised_gradient;
  // All payload that this rank has sent: to ranks of its host, and to ranks of other hosts.
  std::uint64_t sent_inside_bytes = 0;
  std::uint64_t sent_across_bytes = 0;
  // With quant.weights: relative error of this rank's shards as the step has gathered them, as a
  // ratio of roots of sums of squares; and the parameter with the largest error, empty if nothing
  // was quantised.
  double weight_quant_error = 0;
  std::string weight_quant_error_param;
  engine::TierIo io;  // NVMe
  // Copies between the host and a discrete device.
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  double exposed_wait_s = 0;  // blocked on gathers, reductions and the norm
};

class Engine {
 public:
  explicit Engine(Runtime& runtime, const EngineOptions& options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Collective. Shards the module's parameters and releases them; tied weights are one shard.
  // Buffers get rank 0's values; what the module writes to them later (running statistics) stays
  // local to each rank.
  template <typename Module>
  Unit<Module> unit(const std::string& name, std::shared_ptr<Module> module,
                    const UnitOptions& options = {}) {
    std::vector<NamedTensor> params;
    for (const auto& item : module->named_parameters()) {
      params.push_back({item.key(), item.value()});
    }
    engine::UnitCore* core = add_unit(name, params, options, c10::demangle(typeid(Module).name()));
    std::vector<NamedTensor> buffers;
    for (const auto& item : module->named_buffers()) {
      buffers.push_back({item.key(), item.value()});
    }
    send_buffers(name, buffers);
    return Unit<Module>(std::move(module), core, options.recompute);
  }
  // A unit whose forward is any callable that uses parameters of other units: a weight in the loss,
  // a weight derived outside of its unit. `params` are gathered while it runs. REQUIRES: they
  // belong to units made before.
  template <typename Callable>
  Unit<FunctionModule<Callable>> function(const std::string& name,
                                          const std::vector<at::Tensor>& params, Callable callable,
                                          const UnitOptions& options = {}) {
    engine::UnitCore* core = add_unit(name, {}, options);
    for (const at::Tensor& param : params) {
      add_external_param(*core, param);
    }
    return {std::make_shared<FunctionModule<Callable>>(std::move(callable), params), core,
            options.recompute};
  }
  // Declares that `unit` also uses `param`, which belongs to another unit: a tied weight.
  template <typename Module>
  void add_external(Unit<Module>& unit, const at::Tensor& param) {
    add_external_param(*unit.core(), param);
  }
  // The parts of unit(), for callers that run modules by other means than Unit.
  engine::UnitCore* add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                             const UnitOptions& options, const std::string& module_type = {});
  void add_external_param(engine::UnitCore& unit, const at::Tensor& param);
  // Collective.
  void send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers);

  // Marks leaf units. A leaf is gathered whole, with all units inside it, which are those whose
  // names begin with its name and a dot. Call it after the units are made and before the first
  // forward. Units are selected by name (with '*' in front: by the end of names) or by any rule; a
  // rule that matches no unit is a ConfigError. Options: unit.leaf_*.
  void set_leaf(const std::string& name);
  void set_leaf(const coordinator::LeafRule& rule);
  void clear_leaf(const std::string& name);
  void clear_leaf(const coordinator::LeafRule& rule);
  std::vector<std::string> leaf_units();

  // Throws ConfigError if the loss is not one number or the loss weight is negative or not finite,
  // and what autograd throws.
  void backward(const at::Tensor& loss, double weight = 1);
  // Several roots of one graph; their sum is the loss.
  void backward(const std::vector<at::Tensor>& losses, double weight = 1);
  StepResult step();
  // Asks for the end of the run, after a signal for instance. The next step() tells all ranks in
  // its own all-reduce (StepResult::stop), so that all stop after the same step and can save.
  void request_stop();
  // For a rank that runs out of data before the others: joins their next step with loss weight
  // zero. Null: no rank has data any more. REQUIRES: unit.uneven_data=true on all ranks.
  std::optional<StepResult> join();
  // Drops the gradients of this step.
  void zero_grad();

  // Collective: for generation and evaluation. All parameters are gathered once and stay until the
  // scope is closed, if they fit into live.limit_bytes; else units gather as usual, and the log
  // says so. backward() and step() inside are errors.
  [[nodiscard]] ResidentScope resident();

  // Collective: whole parameters for reading, or for changing on one rank. See param_scopes.h.
  [[nodiscard]] GatheredScope gathered(const std::vector<at::Tensor>& params,
                                       int modifier_rank = -1);
  [[nodiscard]] GatheredScope gathered_ids(const std::vector<int>& ids, int modifier_rank = -1);
  // Between steps, on all ranks alike.
  void set_trainable(const at::Tensor& param, bool trainable);
  // Collective: every parameter becomes an ordinary tensor with its current values and strides,
  // units become plain calls, and the model is independent of the engine, which trains no more.
  void to_plain();

  std::int64_t num_steps() const;
  int num_params() const;
  const shard::Param& param(int id) const;
  shard::ParamTable& params();
  // Replaced after the first step, if that step has fixed the placement.
  optim::Optimizer& optimizer();
  // Logical sizes, also of a released parameter.
  const at::Tensor& tensor(int id) const;
  // Collective: a copy of the whole parameter on the host, on every rank.
  at::Tensor full_value(int id);
  // Collective: rank 0 writes all parameters, in registration order, as safetensors. If it cannot,
  // every rank throws, and the parameters are unchanged.
  void save_parameters(const std::string& path);

  // --- checkpoints: docs/formats.md --- Collective, between steps: writes everything that training
  // needs to resume as a new save in the directory `root`, of which the newest few are kept. Every
  // rank writes its own part. If one rank cannot, every rank throws, and the older saves are
  // intact. Returns the path of the new save.
  std::string save(const std::string& root, const SaveOptions& options = {});
  // The same, while training goes on: the save has the values at the time of this call. What an
  // update is about to overwrite and is not written yet is copied to a buffer, or the update waits.
  // The step() that finds all ranks done completes the save. One at a time: the next call waits for
  // the save before it.
  SavePrediction start_save(const std::string& root, const SaveOptions& options = {});
  // Outcome of a save that start_save() began and that has ended: known after a step(), the same on
  // all ranks. Null: there is none, or it was taken before.
  std::optional<SaveOutcome> take_save_outcome();
  // Collective: waits for the running save. Null: none runs, and no outcome is left to take.
  std::optional<SaveOutcome> finish_save();
  // Collective, when all units are made: restores parameters, optimizer states, buffers, loss scale
  // and step. `path`: a save, or a directory of saves, of which the newest is taken. It may have
  // been saved with any number of ranks, tiers and precision; random generators are restored if as
  // many ranks load it as saved it. If a file cannot be read, every rank throws, and the engine is
  // unusable until a load succeeds.
  LoadResult load(const std::string& path, const LoadOptions& options = {});

  EngineStats take_stats();
  Runtime& runtime() const;
  // For inspection (inspection.h) and tests.
  const coordinator::Coordinator& coordinator() const;
  const comm::Group& group() const;  // all ranks that train the model
  // Which of these ranks hold a copy together, and which hold the same shard; by rank of group().
  const comm::Mesh& mesh() const;
  const comm::Group& shard_group() const;    // the ranks over which parameters are cut, by shard
  const comm::Group* replica_group() const;  // the ranks that hold this shard; null: one copy
  // Null: not made yet, or no option asked for a plan and everything fits. See
  // planner/memory_plan.h.
  const planner::MemoryPlan* memory_plan() const;
  // The NVMe store of parameters, gradients or states; null: none of them are on NVMe.
  const tier::Store* store(Role role) const;

 private:
  std::unique_ptr<engine::EngineObjects> objects_;
};

}  // namespace tessera
