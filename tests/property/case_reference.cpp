// The reference: plain LibTorch, one batch after the other.

#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/optim/rule.h"
#include "tessera/shard/tensor_storage.h"
#include "tests/property/random_case.h"

namespace tessera::testing {
namespace {

// Gradients of one backward, by parameter of the plan; undefined where none came.
using Gradients = std::vector<at::Tensor>;

std::vector<at::Tensor> losses_of(const CasePlan& plan, const ModelProgram& program, int step,
                                  int micro_batch, int rank) {
  std::vector<at::Tensor> losses;
  for (int forward = 0; forward < plan.forwards; ++forward) {
    const Moment moment{step, micro_batch, forward, rank};
    for (at::Tensor& loss : program.losses(plan.batch(moment, rank), moment)) {
      losses.push_back(std::move(loss));
    }
  }
  return losses;
}

Gradients gradients_of(const std::vector<at::Tensor>& losses, double weight,
                       const ModelProgram& program) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& loss : losses) {
    weights.push_back(at::full_like(loss, weight));
  }
  if (!losses.empty()) {
    torch::autograd::backward(losses, weights);
  }
  Gradients gradients;
  for (const at::Tensor& param : program.params()) {
    gradients.push_back(std::exchange(param.mutable_grad(), at::Tensor()));
  }
  return gradients;
}

void add(at::Tensor& sum, const at::Tensor& term) {
  if (!sum.defined()) {
    sum = term;
  } else if (term.defined()) {
    sum = sum + term;
  }
}

class Reference {
 public:
  Reference(const CasePlan& plan, Planted planted)
      : plan_(plan),
        planted_(planted),
        program_(plan.model, plain_options()),
        rule_(optim::RuleOptions::from(plan.config())),
        states_(plan.model.params.size()) {
    for (std::size_t i = 0; i < states_.size(); ++i) {
      states_[i].master = shard::storage_elements(program_.params()[i].detach()).clone();
    }
    if (plan.precision == "bf16") {
      program_.to(at::kBFloat16);
      for (const UnitPlan& unit : plan.model.units) {
        for (const SlotPlan& slot : unit.slots) {
          if (unit.init_by_rule && slot.link == Link::kOwn) {
            reset_master(static_cast<std::size_t>(slot.param));  // a rule fills what it is given
          }
        }
      }
    }
    for (int rank = 0; rank < plan.ranks; ++rank) {
      buffers_.push_back(values_of(program_.buffers()));
    }
  }

  StepOutcome run_step(int step) {
    StepOutcome outcome;
    outcome.evaluations.resize(static_cast<std::size_t>(plan_.ranks));
    outcome.leaf_gradients.resize(static_cast<std::size_t>(plan_.ranks));
    for (const FreezePlan& freeze : plan_.freezes) {
      if (freeze.step == step) {
        const auto index = static_cast<std::size_t>(freeze.param);
        const at::Tensor& param = program_.params()[index];
        param.set_requires_grad(!param.requires_grad());
        // Nobody keeps values from before the conversion for what is frozen when training begins.
        if (step > 0 && param.requires_grad() && !states_[index].has_trained) {
          reset_master(index);
        }
      }
    }
    for (std::size_t i = 0; i < states_.size(); ++i) {
      states_[i].has_trained |= program_.params()[i].requires_grad();
    }
    for (const EditPlan& each : plan_.edits) {
      if (each.step == step) {
        edit(program_.params()[static_cast<std::size_t>(each.param)]);
        reset_master(static_cast<std::size_t>(each.param));
      }
    }
    if (plan_.evaluates_before_step[static_cast<std::size_t>(step)]) {
      evaluate(step, outcome);
    }
    if (plan_.asks_for_input_gradients) {
      for (int rank = 0; rank < plan_.ranks; ++rank) {
        const AsRank buffers(*this, rank);
        const Moment moment{step, -1, 1, rank};
        outcome.input_gradients.push_back(
            program_.input_gradient(plan_.batch(moment, rank), moment));
      }
    }
    Gradients sums(plan_.model.params.size());
    const int num_copies = plan_.ranks / plan_.shard_size;
    std::vector<Gradients> of_copies(static_cast<std::size_t>(num_copies), Gradients(sums.size()));
    for (int micro = 0; micro < plan_.micro_batches; ++micro) {
      const bool is_behind = micro >= plan_.accumulate;
      for (int copy = 0; copy < num_copies; ++copy) {
        Gradients over_ranks(sums.size());
        for (int place = 0; place < plan_.shard_size; ++place) {
          const int rank = copy * plan_.shard_size + place;
          const Gradients terms = run_micro_batch(step, micro, rank, outcome);
          for (std::size_t i = 0; i < terms.size(); ++i) {
            add(over_ranks[i], terms[i]);
          }
        }
        for (std::size_t i = 0; i < sums.size(); ++i) {
          at::Tensor& sum = of_copies[static_cast<std::size_t>(copy)][i];
          if (is_behind) {
            sum = at::Tensor();  // what was there is in the sums
          }
          add(sum, as_reduced(over_ranks[i]));
        }
      }
      const bool is_last = micro + 1 == plan_.micro_batches;
      if (micro + 1 >= plan_.accumulate || is_last) {
        add_copies(sums, of_copies, plan_.accumulate == 1 || is_behind);
      }
    }
    outcome.loss /= outcome.weight;
    outcome.loss_terms /= outcome.weight;
    if (plan_.evaluates_before_update) {
      evaluate(step, outcome);
    }
    if (planted_ == Planted::kGradientOff) {
      plant_factor(sums);
    }
    std::vector<at::Tensor> old;  // of rank 0: the others' are alike
    for (int rank = plan_.tries_old_graphs ? plan_.ranks - 1 : -1; rank >= 0; --rank) {
      const AsRank buffers(*this, rank);
      old = losses_of(plan_, program_, step, 0, rank);
    }
    update(sums, outcome);
    if (!old.empty()) {
      try {
        gradients_of(old, 1, program_);
      } catch (const c10::Error&) {
        outcome.refuses_old_graph = true;
      }
      gradients_of({}, 1, program_);  // forgets them
    }
    for (const std::vector<at::Tensor>& each : buffers_) {
      outcome.buffers.push_back(values_of(each));
    }
    return outcome;
  }

 private:
  // The buffers of a rank, while its batches run.
  class AsRank {
   public:
    AsRank(Reference& reference, int rank)
        : current_(reference.program_.buffers()),
          own_(reference.buffers_[static_cast<std::size_t>(rank)]) {
      assign(current_, own_);
    }
    ~AsRank() { assign(own_, current_); }
    AsRank(const AsRank&) = delete;
    AsRank& operator=(const AsRank&) = delete;

   private:
    const std::vector<at::Tensor>& current_;
    const std::vector<at::Tensor>& own_;
  };

  // What ranks have summed has the type in which it travels, that of the parameters.
  at::Tensor as_reduced(const at::Tensor& sum) const {
    return plan_.ranks > 1 && plan_.precision == "bf16" && sum.defined()
               ? sum.to(at::kBFloat16).to(at::kFloat)
               : sum;
  }

  // What has passed over the wire in its type is rounded to it.
  void add_copies(Gradients& sums, const std::vector<Gradients>& of_copies,
                  bool in_wire_type) const {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      at::Tensor over_copies;
      for (const Gradients& each : of_copies) {
        add(over_copies, each[i]);
      }
      add(sums[i], in_wire_type ? as_reduced(over_copies) : over_copies);
    }
  }

  void reset_master(std::size_t param) {
    states_[param].master.copy_(shard::storage_elements(program_.params()[param].detach()));
  }

  void evaluate(int step, StepOutcome& outcome) {
    const at::NoGradGuard no_grad;
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      const AsRank buffers(*this, rank);
      const Moment moment{step, -1, 0, rank};
      for (const at::Tensor& loss : program_.losses(plan_.batch(moment, rank), moment)) {
        outcome.evaluations[static_cast<std::size_t>(rank)].push_back(loss.item<float>());
      }
    }
  }

  Gradients run_micro_batch(int step, int micro, int rank, StepOutcome& outcome) {
    const AsRank buffers(*this, rank);
    const double weight = plan_.weight(step, micro, rank);
    program_.take_input_gradients();  // of evaluations
    const std::vector<at::Tensor> losses = losses_of(plan_, program_, step, micro, rank);
    outcome.weight += weight;
    for (const at::Tensor& loss : losses) {
      outcome.loss += loss.item<double>() * weight;
      outcome.loss_terms += std::abs(loss.item<double>() * weight);
    }
    Gradients gradients = gradients_of(losses, weight, program_);
    for (at::Tensor& gradient : program_.take_input_gradients()) {
      outcome.leaf_gradients[static_cast<std::size_t>(rank)].push_back(std::move(gradient));
    }
    if (planted_ == Planted::kMicroBatchLeftOut && rank == plan_.ranks - 1 &&
        micro == plan_.micro_batches - 1) {
      return Gradients(gradients.size());
    }
    for (at::Tensor& gradient : gradients) {
      gradient = gradient.defined() ? gradient.to(at::kFloat) : gradient;
    }
    return gradients;
  }

  // Of the largest, which an update does not round away.
  static void plant_factor(Gradients& sums) {
    at::Tensor* largest = nullptr;
    double size = 0;
    for (at::Tensor& sum : sums) {
      const double found = sum.defined() && sum.numel() > 0 ? sum.abs().max().item<double>() : 0.0;
      if (found > size) {
        size = found;
        largest = &sum;
      }
    }
    *largest = *largest * (1 + std::ldexp(1.0, -10));
  }

  void update(const Gradients& sums, StepOutcome& outcome) {
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const at::Tensor& param = program_.params()[i];
      if (sums[i].defined()) {
        squares += sums[i].to(at::kDouble).pow(2).sum().item<double>();
        update_param(i, sums[i], 1 / outcome.weight);
      }
      outcome.params.push_back(shard::storage_elements(param.detach()).clone());
    }
    if (planted_ == Planted::kParamOff) {
      at::Tensor first = outcome.params.back().narrow(0, 0, 1);
      first.copy_(at::nextafter(first, first * 2));
    }
    outcome.grad_norm = std::sqrt(squares) / outcome.weight;
    if (!std::isfinite(outcome.grad_norm)) {
      throw NotFinite("gradients are not finite");
    }
  }

  // As torch's optimizers do: nobody calls this for what has no gradient.
  void update_param(std::size_t i, const at::Tensor& gradient, double scale) {
    const at::Tensor& param = program_.params()[i];
    if (param.numel() == 0) {
      return;
    }
    State& state = states_[i];
    // Elements as they lie in the parameter's memory.
    const at::Tensor ordered = shard::storage_elements(
        at::empty_strided(param.sizes(), param.strides(), gradient.options()).copy_(gradient));
    optim::UpdateScalars scalars;
    scalars.step = ++state.num_updates;
    scalars.lr = kLearningRate;
    scalars.gradient_scale = scale;
    optim::UpdateSpan span;
    span.master = state.master.data_ptr<float>();
    span.gradient = ordered.const_data_ptr<float>();
    span.numel = param.numel();
    for (std::size_t each = 0; each < optim::state_names(rule_).size(); ++each) {
      at::Tensor& tensor = state.tensors[each];
      if (!tensor.defined()) {
        tensor = at::zeros_like(state.master);
      }
      span.states[each] = tensor.data_ptr<float>();
    }
    optim::update(rule_, scalars, span);
    shard::storage_elements(param.detach()).copy_(state.master);
    torch::autograd::impl::bump_version(param);
  }

  static BuildOptions plain_options() {
    BuildOptions options;
    options.recompute = false;
    options.groups_gradients = true;
    return options;
  }

  struct State {
    at::Tensor master;  // as elements lie in the parameter's memory
    std::array<at::Tensor, optim::kMaxStates> tensors;
    std::int64_t num_updates = 0;
    bool has_trained = false;
  };

  const CasePlan& plan_;
  const Planted planted_;
  ModelProgram program_;
  const optim::RuleOptions rule_;
  std::vector<State> states_;                     // by parameter
  std::vector<std::vector<at::Tensor>> buffers_;  // by rank
};

}  // namespace

std::vector<StepOutcome> run_reference(const CasePlan& plan, Planted planted) {
  Reference reference(plan, planted);
  std::vector<StepOutcome> outcomes;
  for (int step = 0; step < plan.steps; ++step) {
    outcomes.push_back(reference.run_step(step));
  }
  return outcomes;
}

// Sums in another order: the difference is some hundreds of roundings of 2^-53, and 2^-30 leaves
// room for terms that cancel each other to a part in a thousand.
std::string check_recomputation(const CasePlan& plan) {
  Gradients found[2];
  for (const bool recompute : {false, true}) {
    BuildOptions options;
    options.recompute = recompute;
    options.in_double = true;
    const ModelProgram program(plan.model, options);
    found[recompute ? 1 : 0] = gradients_of(losses_of(plan, program, 0, 0, 0), 1, program);
  }
  double largest = 0;
  for (const at::Tensor& gradient : found[0]) {
    if (gradient.defined() && gradient.numel() > 0) {
      largest = std::max(largest, gradient.abs().max().item<double>());
    }
  }
  for (std::size_t i = 0; i < found[0].size(); ++i) {
    const at::Tensor plain = found[0][i];
    const at::Tensor again = found[1][i];
    if (!plain.defined() || plain.numel() == 0) {
      continue;
    }
    const double apart = again.defined() ? (plain - again).abs().max().item<double>()
                                         : plain.abs().max().item<double>();
    if (!(apart <= largest * std::ldexp(1.0, -30))) {
      return detail::concat("  recomputation changes the gradient of '", plan.model.params[i].name,
                            "' by ", apart, ", the largest of all is ", largest, "\n");
    }
  }
  return {};
}

}  // namespace tessera::testing
