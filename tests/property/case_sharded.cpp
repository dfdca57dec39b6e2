// The run that is judged: ranks as threads, each with an engine.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/device/device.h"
#include "tessera/shard/tensor_storage.h"
#include "testing/mock_device.h"
#include "tests/property/random_case.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

class Findings {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(detail::concat(parts...));
  }
  std::vector<std::string> lines() const { return lines_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

class RankRun {
 public:
  RankRun(const CasePlan& plan, const std::vector<StepOutcome>& expected, Engine& engine,
          Findings& findings)
      : plan_(plan),
        expected_(expected),
        engine_(engine),
        findings_(findings),
        rank_(engine.runtime().rank()),
        program_(plan.model, {&engine, 0.5 * rank_}) {}

  void run() {
    for (int step = 0; step < plan_.steps; ++step) {
      run_step(step);
    }
  }

 private:
  template <typename... Parts>
  void find(int step, const Parts&... parts) {
    findings_.add("step ", step, ", rank ", rank_, ": ", parts...);
  }

  void run_step(int step) {
    const StepOutcome& expected = expected_[static_cast<std::size_t>(step)];
    change_params(step);
    std::vector<float> evaluations;
    if (plan_.evaluates_before_step[static_cast<std::size_t>(step)]) {
      evaluate(step, evaluations);
    }
    if (plan_.asks_for_input_gradients) {
      ask_for_input_gradient(step, expected);
    }
    run_micro_batches(step, step == plan_.interrupted_step ? interrupt(step) : 0);
    if (plan_.evaluates_before_update) {
      evaluate(step, evaluations);
    }
    const std::vector<at::Tensor> old =
        plan_.tries_old_graphs ? losses_of(step, 0) : std::vector<at::Tensor>();
    const StepResult result = engine_.step();
    if (!old.empty()) {
      try_old_graph(step, old, expected.refuses_old_graph);
    }
    if (evaluations != expected.evaluations[static_cast<std::size_t>(rank_)]) {
      find(step, "losses of the evaluation differ");
    }
    compare_leaves(step, expected.leaf_gradients[static_cast<std::size_t>(rank_)]);
    compare_result(step, result, expected);
    compare_params(step, expected);
    compare_buffers(step, expected.buffers[static_cast<std::size_t>(rank_)]);
    check_unused(step);
    check_limits(step);
  }

  void change_params(int step) {
    for (const FreezePlan& freeze : plan_.freezes) {
      if (freeze.step == step) {
        const at::Tensor& param = program_.params()[static_cast<std::size_t>(freeze.param)];
        if (freeze.by_user) {
          param.set_requires_grad(!param.requires_grad());
        } else {
          engine_.set_trainable(param, !param.requires_grad());
        }
      }
    }
    for (const EditPlan& each : plan_.edits) {
      if (each.step == step) {
        const at::Tensor& param = program_.params()[static_cast<std::size_t>(each.param)];
        GatheredScope scope = engine_.gathered({param}, each.rank);
        if (each.rank == rank_) {
          edit(param);
        }
        scope.close();
      }
    }
  }

  void run_micro_batches(int step, int first) {
    for (int micro = first; micro < plan_.micro_batches; ++micro) {
      set_complete(micro);
      program_.take_input_gradients();  // of what was interrupted, or is no training
      const std::vector<at::Tensor> losses = losses_of(step, micro);
      is_in_backward_ = true;
      engine_.backward(losses, plan_.weight(step, micro, rank_));
      is_in_backward_ = false;
      set_complete(micro + 1);
      for (at::Tensor& gradient : program_.take_input_gradients()) {
        leaf_gradients_.push_back(std::move(gradient));
      }
      if (plan_.evaluates_between) {
        std::vector<float> ignored;
        evaluate(step, ignored);
        program_.take_input_gradients();
      }
    }
  }

  void set_complete(int num_micro_batches) {
    num_complete_ = num_micro_batches;
    buffers_.resize(static_cast<std::size_t>(num_micro_batches));
    buffers_.push_back(values_of(program_.buffers()));
  }

  std::vector<at::Tensor> losses_of(int step, int micro) const {
    std::vector<at::Tensor> losses;
    for (int forward = 0; forward < plan_.forwards; ++forward) {
      const Moment moment{step, micro, forward, rank_};
      for (at::Tensor& loss : program_.losses(plan_.batch(moment, rank_), moment)) {
        losses.push_back(std::move(loss));
      }
    }
    return losses;
  }

  // Refused where plain LibTorch refuses it; and wherever something would be recomputed.
  void try_old_graph(int step, const std::vector<at::Tensor>& old, bool is_refused) {
    bool throws = false;
    try {
      engine_.backward(old);
    } catch (const ConfigError&) {
      throws = true;
    }
    engine_.zero_grad();
    if (throws != is_refused && !(throws && plan_.model.has_recompute())) {
      find(step, "a graph from before the step is ", throws ? "refused" : "accepted");
    }
  }

  // Returns the micro-batch to go on with. What was complete before a forward threw counts; after
  // an exception in a backward the step begins anew.
  int interrupt(int step) {
    program_.interrupter() = plan_.interrupter;
    program_.interrupter().is_armed = true;
    bool is_interrupted = false;
    try {
      run_micro_batches(step, 0);
    } catch (const Interruption&) {
      is_interrupted = true;
      check_unused(step);
    }
    program_.interrupter() = {};
    // Where ranks run different units they are interrupted in different micro-batches.
    const bool is_in_backward = std::exchange(is_in_backward_, false);
    const auto num_kept = is_interrupted && !is_in_backward && !plan_.model.has_dynamic()
                              ? static_cast<std::size_t>(num_complete_ * plan_.forwards)
                              : 0;
    leaf_gradients_.resize(std::min(leaf_gradients_.size(), num_kept));
    const int next =
        is_interrupted && !is_in_backward && !plan_.model.has_dynamic() ? num_complete_ : 0;
    if (next == 0) {
      engine_.zero_grad();
    }
    // Forwards that begin again find what they found before.
    assign(program_.buffers(), buffers_[static_cast<std::size_t>(next)]);
    return next;
  }

  void ask_for_input_gradient(int step, const StepOutcome& expected) {
    const Moment moment{step, -1, 1, rank_};
    const at::Tensor found = program_.input_gradient(plan_.batch(moment, rank_), moment);
    const at::Tensor& right = expected.input_gradients[static_cast<std::size_t>(rank_)];
    if (found.defined() != right.defined() || (right.defined() && !at::equal(found, right))) {
      find(step, "the gradient of the input differs");
    }
  }

  void evaluate(int step, std::vector<float>& losses) {
    const at::NoGradGuard no_grad;
    const Moment moment{step, -1, 0, rank_};
    for (const at::Tensor& loss : program_.losses(plan_.batch(moment, rank_), moment)) {
      losses.push_back(loss.item<float>());
    }
  }

  void compare_leaves(int step, const std::vector<at::Tensor>& expected) {
    const std::vector<at::Tensor> found = std::exchange(leaf_gradients_, {});
    bool same = found.size() == expected.size();
    for (std::size_t i = 0; same && i < found.size(); ++i) {
      same = found[i].defined() == expected[i].defined() &&
             (!found[i].defined() || at::equal(found[i], expected[i]));
    }
    if (!same) {
      find(step, "gradients of leaves of the user's own differ");
    }
  }

  // See [Note: no tolerance for gradients].
  void compare_result(int step, const StepResult& result, const StepOutcome& expected) {
    if (result.skipped) {
      find(step, "the step was skipped");
    }
    if (result.weight != expected.weight) {
      find(step, "weight ", result.weight, ", expected ", expected.weight);
    }
    const double unit = std::ldexp(1.0, -52);
    const double num_losses =
        plan_.ranks * plan_.micro_batches * plan_.forwards *
        static_cast<double>(1 + plan_.model.losses.size() + plan_.model.weight_losses.size() +
                            2 * plan_.model.calls.size());
    if (!(std::abs(result.loss - expected.loss) <= (num_losses + 2) * unit * expected.loss_terms)) {
      find(step, "loss ", result.loss, ", expected ", expected.loss);
    }
    double numel = 0;
    for (int id = 0; id < engine_.num_params(); ++id) {
      numel += static_cast<double>(engine_.param(id).layout().numel());
    }
    if (!(std::abs(result.grad_norm - expected.grad_norm) <=
          (numel + 2) * unit * expected.grad_norm)) {
      find(step, "norm ", result.grad_norm, ", expected ", expected.grad_norm);
    }
  }

  // Each rank its own elements: together they are all.
  void compare_params(int step, const StepOutcome& expected) {
    for (std::size_t i = 0; i < expected.params.size(); ++i) {
      const shard::Param* param = engine_.params().find(plan_.model.params[i].name);
      if (param == nullptr) {
        find(step, "the engine has no parameter '", plan_.model.params[i].name, "'");
        continue;
      }
      const shard::ElementRange range = param->range();
      const at::Tensor whole = expected.params[i].to(at::kFloat);
      const float* values = whole.const_data_ptr<float>() + range.begin;
      const at::Tensor own = shard_of(*param, expected.params[i].scalar_type()).to(at::kFloat);
      const auto* shard = own.const_data_ptr<float>();
      for (std::int64_t e = 0; e < range.numel; ++e) {
        if (shard[e] != values[e]) {
          find(step, "parameter '", param->name(), "' element ", range.begin + e, " is ", shard[e],
               ", expected ", values[e], ", apart by ", shard[e] - values[e]);
          break;
        }
      }
    }
  }

  // As the update leaves it. What is on NVMe is gathered, by all ranks.
  at::Tensor shard_of(const shard::Param& param, at::ScalarType type) {
    const shard::ElementRange range = param.range();
    if (param.is_on_nvme()) {
      return shard::storage_elements(engine_.full_value(param.id()))
          .narrow(0, range.begin, range.numel);
    }
    param.updated().wait();
    const at::Tensor own = at::empty({range.numel}, type);
    if (range.numel > 0) {
      param.start_read(0, range.numel, static_cast<std::byte*>(own.data_ptr())).wait();
    }
    return own;
  }

  void compare_buffers(int step, const std::vector<at::Tensor>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor& found = program_.buffers()[i];
      if (found.scalar_type() != expected[i].scalar_type() || !at::equal(found, expected[i])) {
        find(step, "buffer ", i, " is ", found.item<double>(), ", expected ",
             expected[i].item<double>());
      }
    }
  }

  // Nobody uses anything, and the arena is what it was. What is gathered ahead may be there.
  void check_unused(int step) {
    for (int id = 0; id < engine_.num_params(); ++id) {
      const shard::Param& param = engine_.param(id);
      if (param.num_users() != 0) {
        find(step, "parameter '", param.name(), "' is ", to_string(param.state()), " and has ",
             param.num_users(), " users after the step");
      }
    }
    const Tier tier = Tier::kDevice;
    const std::size_t full_bytes = engine_.runtime().ledger().current_bytes(tier, Role::kFull);
    if (step > 0 && full_bytes != full_bytes_) {
      find(step, full_bytes, " full bytes in the ledger, ", full_bytes_, " after the step before");
    }
    full_bytes_ = full_bytes;
  }

  // What a unit needs, with the padding of its parameters.
  std::int64_t largest_unit_bytes() const {
    std::int64_t largest = 0;
    for (const UnitPlan& unit : plan_.model.units) {
      std::int64_t bytes = 0;
      for (const SlotPlan& slot : unit.slots) {
        bytes += full_bytes_of(plan_.model.params[static_cast<std::size_t>(slot.param)]);
      }
      largest = std::max(largest, bytes);
    }
    return largest;
  }

  std::int64_t full_bytes_of(const ParamPlan& param) const {
    const shard::Param* found = engine_.params().find(param.name);
    return static_cast<std::int64_t>(found->layout().full_bytes());
  }

  void check_limits(int step) {
    const coordinator::CoordinatorStats stats = engine_.take_stats().gathers;
    std::int64_t limit = 0;
    for (const ParamPlan& param : plan_.model.params) {
      limit += full_bytes_of(param);
    }
    if (plan_.model.is_chain) {
      const planner::MemoryPlan* const placed = engine_.memory_plan();
      const std::int64_t live = placed != nullptr ? placed->live_limit_bytes
                                : plan_.ranks > 1 ? plan_.config().get_bytes("live.limit_bytes")
                                                  : 0;
      limit = std::min(limit, std::max(live, largest_unit_bytes()));
    }
    if (stats.full_bytes_peak > limit) {
      find(step, stats.full_bytes_peak, " full bytes at once, at most ", limit, " are allowed");
    }
  }

  const CasePlan& plan_;
  const std::vector<StepOutcome>& expected_;
  Engine& engine_;
  Findings& findings_;
  const int rank_;
  const ModelProgram program_;
  std::size_t full_bytes_ = 0;
  int num_complete_ = 0;  // micro-batches of this step
  bool is_in_backward_ = false;
  std::vector<std::vector<at::Tensor>> buffers_;  // before each of them, and after the last
  std::vector<at::Tensor> leaf_gradients_;        // of this step
};

RuntimeOptions runtime_of(const CasePlan& plan, int rank, bool on_mock) {
  RuntimeOptions options{-1, 1};
  if (on_mock || plan.is_discrete) {
    options.make_device = [&plan, rank](device::CpuDeviceOptions host) {
      device::MockDeviceOptions mock;
      // A call that is lazy work of a stream would never begin on a rank that only sends.
      mock.mode = plan.seed % 2 == 0 && !plan.calls_on_streams ? device::LateMode::kLazy
                                                               : device::LateMode::kRandom;
      mock.seed = plan.seed * 8 + static_cast<std::uint64_t>(rank);
      mock.own_memory = plan.is_discrete;
      mock.host = std::move(host);
      return device::make_mock_device(std::move(mock));
    };
  }
  return options;
}

// Nothing is measured.
Config config_in(const CasePlan& plan, const std::string& directory) {
  Config config = plan.config();
  if (plan.uses_nvme) {
    config.apply_flag("nvme.paths=" + directory);
    config.apply_flag("nvme.block_bytes=4KiB");
    config.apply_flag("nvme.queue_depth=2");
    config.apply_flag("nvme.threads=1");
  }
  return config;
}

}  // namespace

std::vector<std::string> run_sharded(const CasePlan& plan, const std::vector<StepOutcome>& expected,
                                     const ShardedOptions& options) {
  Findings findings;
  comm::ThreadWorldOptions world = options.world;
  world.num_ranks = plan.ranks;
  world.on_streams = plan.calls_on_streams;
  const DiskDirectory directory;
  const Config config = config_in(plan, directory.path().string());
  comm::GroupOptions group_options;
  group_options.pack_below_bytes = plan.pack_below_bytes;
  group_options.timeout = std::chrono::seconds(60);
  try {
    comm::run_ranks(world, group_options, [&](comm::Group& group) {
      const RuntimeOptions runtime_options = runtime_of(plan, group.rank(), options.on_mock);
      Runtime runtime(config, group, runtime_options);
      Engine engine(runtime);
      RankRun(plan, expected, engine, findings).run();
      if (plan.runs_twice) {
        Runtime second(config, runtime.group(), runtime_options);
        Engine again(second);
        RankRun(plan, expected, again, findings).run();
      }
    });
  } catch (const std::exception& error) {
    const std::string text = error.what();  // torch's have a stack behind the first line
    findings.add("an exception: ", text.substr(0, text.find('\n')));
  }
  return findings.lines();
}

}  // namespace tessera::testing
