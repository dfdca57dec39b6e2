// A training run drawn from a seed: a model, ranks, options, batches and weights; run unsharded as
// the reference, and sharded over ranks as threads.
//
// [Note: no tolerance for gradients]
// The reference runs every rank's micro-batches through plain LibTorch, one after the other, and
// adds their gradients in the order that the engine promises: over ranks of a copy in rank order in
// fp32, rounded once to the type on the wire, then over micro-batches in fp32, then over copies,
// see [Note: sums over replicas] in grad/reducer.h. Every operator sees the same numbers in both
// runs, so parameters must be equal to the bit after every step, for every number of ranks and all
// options. Weights are multiples of 1/4, so their sums are exact; the learning rate is a power of
// two, so that an update rounds once, with and without fma.
//
// What is summed in fp64 in another order has a bound: the sum of n products, each rounded once,
// is off by at most n * 2^-53 * sum |term| (to first order), and so is the reference's; their
// difference is below n * 2^-52 * sum |term|. For a norm all terms are positive: its square has
// relative error n * 2^-52, its root half of that, and the division adds 2^-53.
//
// Threads: runs start threads of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/engine/engine.h"
#include "testing/thread_backend.h"
#include "tests/property/model_program.h"
#include "tests/property/random_model.h"

namespace tessera::testing {

// Before a step a rank changes a whole parameter: Engine::gathered().
struct EditPlan {
  int step = 0;
  int param = 0;
  int rank = 0;
};
// Before a step a parameter is frozen, or no longer.
struct FreezePlan {
  int step = 0;
  int param = 0;
  bool by_user = false;  // requires_grad_(), not Engine::set_trainable()
};
// What an edit does, in both runs.
void edit(const at::Tensor& param);

inline constexpr double kLearningRate = 1.0 / 256;

struct CasePlan {
  std::uint64_t seed = 0;
  ModelPlan model;
  int ranks = 1;
  int steps = 2;
  int micro_batches = 1;
  int forwards = 1;                         // before one backward
  std::vector<bool> evaluates_before_step;  // without gradients, by step
  bool evaluates_before_update = false;     // between the last backward and step()
  bool asks_for_input_gradients = false;    // outside of training, before every step
  std::vector<EditPlan> edits;
  std::vector<FreezePlan> freezes;
  // sgd, momentum (sgd with it) or adamw; the last two with weight decay: what is not used must not
  // move.
  std::string rule = "sgd";
  // Empty, or bf16: modules are made in fp32, and the engine converts them. Gradients are bf16, and
  // sums over micro-batches fp32; masters begin with the values from before.
  std::string precision;
  bool evaluates_between = false;  // between micro-batches
  bool runs_twice = false;         // on a second runtime over the first one's group
  bool tries_old_graphs = false;   // after every step: backward of a forward from before it
  int interrupted_step = -1;       // abandoned by an exception, and begun again
  Interrupter interrupter;
  std::vector<std::pair<std::string, std::string>> options;
  std::size_t pack_below_bytes = 0;
  // Of a shard group; hosts and phases are in the options.
  int shard_size = 1;
  // batch.accumulate: the micro-batch behind which copies are summed, if there are as many.
  int accumulate = 1;
  // Where shards live is in the options. Discrete: on the mock device, with memory of its own.
  bool is_discrete = false;
  bool calls_on_streams = false;
  bool uses_nvme = false;

  std::string describe() const;
  // Micro-batch -1: for evaluation.
  Batch batch(const Moment& moment, int rank) const;
  double weight(int step, int micro_batch, int rank) const;
  Config config() const;
};
CasePlan draw_case(std::uint64_t seed);

struct StepOutcome {
  double loss = 0;
  double loss_terms = 0;  // sum of their absolute values, over the weights
  double grad_norm = 0;
  double weight = 0;
  std::vector<at::Tensor> params;                // by plan, as they lie in memory
  std::vector<std::vector<float>> evaluations;   // by rank: losses
  std::vector<at::Tensor> input_gradients;       // by rank, where asked for
  bool refuses_old_graph = false;                // plain LibTorch does, where that is tried
  std::vector<std::vector<at::Tensor>> buffers;  // by rank, after the step
  // By rank: of inputs in training, which are leaves of the user's own, one per forward.
  std::vector<std::vector<at::Tensor>> leaf_gradients;
};

// Mistakes that the comparison must find; made on purpose, in the reference.
enum class Planted : std::uint8_t {
  kNothing,
  kGradientOff,        // of one parameter, by a factor of 1 + 2^-10
  kMicroBatchLeftOut,  // of one rank
  kParamOff,           // one element of one parameter, by one unit in the last place
};
// What plain LibTorch cannot train either; nothing can be said of such a case.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};
std::vector<StepOutcome> run_reference(const CasePlan& plan, Planted planted = Planted::kNothing);

// What else a test wants done to the runs of a case.
struct ShardedOptions {
  comm::ThreadWorldOptions world;  // its num_ranks is the case's
  bool on_mock = false;            // and not only where the case is discrete
};
// Lines that say what was wrong; empty: nothing.
std::vector<std::string> run_sharded(const CasePlan& plan, const std::vector<StepOutcome>& expected,
                                     const ShardedOptions& options = {});

// Recomputation in a plain model against none, in fp64; empty: the same.
std::string check_recomputation(const CasePlan& plan);

// All of it: what was found, what was drawn, and how to run it alone. Empty: all is well.
std::string judge(const CasePlan& plan, Planted planted = Planted::kNothing,
                  const ShardedOptions& options = {});

}  // namespace tessera::testing
