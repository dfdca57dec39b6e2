// The data of a run, from its flags: sources, epochs, and what is evaluated.
#include <algorithm>

#include "cli/flag_values.h"
#include "cli/train_plan.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxEpochs = std::int64_t{1} << 20;
constexpr std::int64_t kMaxEvalBatches = std::int64_t{1} << 24;
// The same for every run: validation losses of runs with other seeds can be compared, and what is
// generated is not what a usual seed trains on.
constexpr std::uint64_t kEvalSeed = 0x6576616c;

EvalPlan checked_evaluation(const TrainFlags& flags, const TrainPlan& plan) {
  EvalPlan evaluation;
  if (!flags.eval_every.empty()) {
    evaluation.every = parse_count("--eval-every", flags.eval_every, 1, kMaxSteps);
  }
  const std::int64_t num_batches =
      flags.eval_batches.empty()
          ? kDefaultEvalBatches
          : parse_count("--eval-batches", flags.eval_batches, 1, kMaxEvalBatches);
  evaluation.data = plan.data;
  evaluation.data.sources = flags.eval_data;
  evaluation.data.seed = kEvalSeed;
  evaluation.data.order = models::DataOrder::kEpochs;
  const std::int64_t wanted = num_batches * plan.batch.total;
  const std::int64_t available = models::count_sequences(evaluation.data);
  evaluation.data.batch = available == 0 ? wanted : std::min(wanted, available);
  return evaluation;
}

}  // namespace

void plan_data(const TrainFlags& flags, TrainPlan& plan) {
  if (!flags.data.empty()) {
    plan.data.sources = flags.data;
  }
  plan.data.vocabulary = plan.model.vocabulary;
  plan.data.sequence = plan.model.sequence;
  plan.data.batch = plan.batch.total;
  plan.data.seed = plan.seed;
  if (!flags.epochs.empty()) {
    TESSERA_CHECK(flags.steps.empty(), ConfigError,
                  "--epochs and --steps both say how long to train; leave one of them out");
    plan.num_epochs = parse_count("--epochs", flags.epochs, 1, kMaxEpochs);
    plan.data.order = models::DataOrder::kEpochs;
    plan.sequences_per_epoch = models::count_sequences(plan.data);
    TESSERA_CHECK(plan.sequences_per_epoch > 0, ConfigError, "--epochs ", plan.num_epochs, ": ",
                  plan.data.sources.front(), " data has no end; use --steps N, or files");
    TESSERA_CHECK(plan.sequences_per_epoch >= plan.batch.total, ConfigError, "--epochs ",
                  plan.num_epochs, ": the data has ", plan.sequences_per_epoch, " sequences of ",
                  plan.model.sequence, " tokens, fewer than one batch of ", plan.batch.total,
                  "; use more data, a smaller --batch or a shorter --seq");
    TESSERA_CHECK(plan.sequences_per_epoch / plan.batch.total <= kMaxSteps / plan.num_epochs,
                  ConfigError, "--epochs ", plan.num_epochs, " of ",
                  plan.sequences_per_epoch / plan.batch.total, " steps each are more than ",
                  kMaxSteps, " steps; use fewer epochs or a larger --batch");
  }
  if (!flags.eval_data.empty()) {
    plan.evaluation = checked_evaluation(flags, plan);
  }
  TESSERA_CHECK(plan.evaluation || (flags.eval_every.empty() && flags.eval_batches.empty()),
                ConfigError, flags.eval_every.empty() ? "--eval-batches" : "--eval-every",
                " needs data to evaluate; give --eval-data SOURCE");
}

}  // namespace tessera::cli
