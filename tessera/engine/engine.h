// Sharded training of a LibTorch model: every parameter, gradient and optimizer state is cut over
// the ranks, and a parameter is whole only while a unit uses it.
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
// Means: backward(loss, weight) adds weight * gradient(loss); step() divides by the loss weights of
// all micro-batches and ranks. With token counts as weights that is the mean over tokens. On one
// rank training equals unsharded training bit for bit. Leaves of the user's own (a prompt, a
// temperature) get what (weight * loss).backward() gives them; in fp16 times StepResult::loss_scale
// and divided by a power of two: the one at or above the largest weight of the first backward.
//
// As in torch, a parameter that no rank has used in a step is not updated, with its states and its
// own count of steps; used by any rank, it is updated on all. Backward through a graph from before
// an update is an error where torch has one, and for every recomputed unit. Parameters may be
// frozen and unfrozen between steps, by set_trainable() or requires_grad_(), on all ranks alike;
// their optimizer states stay.
//
// Types: with the option precision, floating parameters and buffers become that type as units are
// made, as by module->to(), and master weights keep the values of before; a BuildScope with a type
// wins. Losses are scaled where parameters are fp16.
//
// Order of collectives: uses and plan (coordinator.h) for gathers, registration (reducer.h) for
// reductions, the caller for the rest. step(): a comparison of uses and one all-reduce; a unit: one
// small exchange and one broadcast per parameter with module values; the first backward in fp16:
// one all-reduce. Where Engine says "collective", every rank calls it at the same point.
//
// Errors: an exception in a unit's forward reaches the caller, and earlier micro-batches of the
// step are kept. After one in a backward step() refuses until zero_grad() was called. All ranks do
// the same: one that gave up a pass on its own is named at the next step(). What one rank refuses
// (a path, a parameter) is agreed on first, and refused by all. A failed collective poisons its
// group.
//
// Threads: one thread at a time; during backward() autograd's threads act for it.
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
  // Stands before the names of the parameters; null: the unit's name and a dot.
  std::optional<std::string> param_prefix = {};
  // By the parameter's name inside the unit; null: Init::module().
  std::function<Init(const std::string& name)> init = {};
  // Multiplies the optimizer's weight decay; null: 1.
  std::function<double(const std::string& name, const at::Tensor& param)> weight_decay_scale = {};
  // Of a frozen parameter: 4 or 8 stores it as blocks of integers of so many bits, 0 as it is;
  // null: as quant.frozen_bits and quant.frozen_names say.
  std::function<int(const std::string& name, const at::Tensor& param)> frozen_bits = {};
};

struct EngineOptions {
  // For schedule.total_steps = 0.
  std::int64_t run_steps = 0;
  // What will be built. With it memory is planned, and a model that does not fit is refused, before
  // anything is allocated, and every shard is made where it stays. Without it that is done at the
  // first forward, and shards may move then.
  std::optional<planner::ModelShapes> shapes = {};
  // What is known of steps, for budgets that nobody gave; see memory_planning.h.
  StepExpectations step = {};
  // What plan_memory() gave for these shapes, where that was asked before.
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
  // Where gradients are quantised: the root of the sum of squares of what that changed in those
  // that this rank gave to its own shards, beside theirs; and the parameter with the largest.
  double grad_quant_error = 0;
  std::string worst_quantised_gradient;
  // All payload that this rank has sent, to ranks of its host and to those of others.
  std::uint64_t sent_inside_bytes = 0;
  std::uint64_t sent_across_bytes = 0;
  // What quant.weights has cost, of this rank's shards as the step has gathered them: the relative
  // error in the root of sums of squares, and the parameter with the largest one; empty: nothing
  // was quantised.
  double weight_quant_error = 0;
  std::string weight_quant_error_param;
  engine::TierIo io;  // NVMe
  // Between the host and a device with memory of its own.
  std::uint64_t h2d_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  double exposed_wait_s = 0;  // gathers, reductions and the norm
};

class Engine {
 public:
  explicit Engine(Runtime& runtime, const EngineOptions& options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Shards the module's parameters and releases them; tied weights are one shard. Buffers, too, get
  // rank 0's values; what the module writes to them later (running statistics) is each rank's own.
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
  // a weight derived outside of its unit. `params` are gathered while it runs; they belong to units
  // made before.
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
  // `param` belongs to another unit, and this one uses it, too: a tied weight.
  template <typename Module>
  void add_external(Unit<Module>& unit, const at::Tensor& param) {
    add_external_param(*unit.core(), param);
  }
  // What unit() does, for those who watch modules in another way.
  engine::UnitCore* add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                             const UnitOptions& options, const std::string& module_type = {});
  void add_external_param(engine::UnitCore& unit, const at::Tensor& param);
  // Collective.
  void send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers);

  // A leaf is gathered whole, with all units inside it, whose names begin with its name and a dot.
  // Before the first forward, when the units are made. By name ('*' in front: by the end of names),
  // or by any rule; one that matches no unit is a ConfigError. Options: unit.leaf_*.
  void set_leaf(const std::string& name);
  void set_leaf(const coordinator::LeafRule& rule);
  void clear_leaf(const std::string& name);
  void clear_leaf(const coordinator::LeafRule& rule);
  std::vector<std::string> leaf_units();

  // Throws ConfigError for a loss that is not one number, or a negative or non-finite loss weight;
  // and what autograd throws.
  void backward(const at::Tensor& loss, double weight = 1);
  // Several roots of one graph; their sum is the loss.
  void backward(const std::vector<at::Tensor>& losses, double weight = 1);
  StepResult step();
  // This rank wants the run to end (a signal, say): the next step() tells all ranks, in its own
  // all-reduce, so that all stop behind the same step and can save.
  void request_stop();
  // For a rank that is out of data before the others: joins their next step with loss weight zero.
  // Null: no rank has data any more. Wants unit.uneven_data=true on all ranks.
  std::optional<StepResult> join();
  // Gradients of this step are dropped.
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
  // Another one behind the first step, if that has fixed placement.
  optim::Optimizer& optimizer();
  // Logical sizes, also of a released parameter.
  const at::Tensor& tensor(int id) const;
  // Collective: a copy of the whole parameter on the host, on every rank.
  at::Tensor full_value(int id);
  // Collective: rank 0 writes all parameters, in registration order, as safetensors. If it cannot,
  // every rank throws, and nothing is lost.
  void save_parameters(const std::string& path);

  // --- checkpoints: docs/formats.md ---
  // Collective, between steps: all that training needs to go on, as a new save in the directory
  // `root`, which keeps the newest few. Every rank writes its own part; all ranks or none: if one
  // cannot, every rank throws, and the saves of before are there. Returns the new one's path.
  std::string save(const std::string& root, const SaveOptions& options = {});
  // The same beside training: the save has the values of now. What an update is about to change and
  // is not written yet is set aside, or the update waits. The step() that finds all ranks done
  // completes it. One at a time: the next waits for the one before.
  SavePrediction start_save(const std::string& root, const SaveOptions& options = {});
  // Of a save that start_save() began and that is over: known after a step(), the same on all
  // ranks. Null: none, or it was taken.
  std::optional<SaveOutcome> take_save_outcome();
  // Collective: waits for the one that runs. Null: none does, and none is left to take.
  std::optional<SaveOutcome> finish_save();
  // Collective, when all units are made: parameters, optimizer states, buffers, loss scale, step.
  // `path`: a save, or a directory of saves, of which it is the newest. Any number of ranks, tiers
  // and precision may have saved it; random generators go on where as many ranks load it. If a file
  // cannot be read, every rank throws, and the engine is unusable until a load succeeds.
  LoadResult load(const std::string& path, const LoadOptions& options = {});

  EngineStats take_stats();
  Runtime& runtime() const;
  // For those who look: see inspection.h.
  const coordinator::Coordinator& coordinator() const;
  const comm::Group& group() const;  // all ranks that train the model
  // Which of them hold a copy of it together, and which hold the same shard; ranks are the group's.
  const comm::Mesh& mesh() const;
  const comm::Group& shard_group() const;    // those that parameters are cut over, by shard
  const comm::Group* replica_group() const;  // those that hold this shard, by copy; null: one copy
  // Null: no option asked for a plan and everything fits, or it is not made yet. See
  // planner/memory_plan.h.
  const planner::MemoryPlan* memory_plan() const;
  // Of parameters, gradients or states; null: nothing of it is on NVMe.
  const tier::Store* store(Role role) const;

 private:
  std::unique_ptr<engine::EngineObjects> objects_;
};

}  // namespace tessera
