#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <ATen/Parallel.h>

#include "cli/metrics.h"
#include "cli/progress.h"
#include "cli/train_plan.h"
#include "cli/train_summary.h"
#include "cli/train_trainer.h"
#include "cli/train_verify.h"
#include "tessera/core/error.h"
#include "tessera/optim/rule.h"

namespace tessera::cli {
namespace {

RuntimeOptions runtime_options(const TrainPlan& plan) {
  RuntimeOptions options;
  options.cuda_device = plan.cuda_device;
  options.num_update_threads = plan.num_threads;
  if (!plan.trace.empty()) {
    options.num_spans = static_cast<std::size_t>(plan.config.get_int("trace.ring_spans"));
  }
  return options;
}

const char* plural(std::int64_t count) { return count == 1 ? "" : "s"; }

class Run {
 public:
  Run(const TrainPlan& plan, models::TokenSource& data, Runtime& runtime)
      : plan_(plan),
        data_(data),
        runtime_(runtime),
        speaks_(runtime.rank() == 0),
        batches_(data, plan),
        trainer_(plan.unsharded ? make_plain_trainer(plan, runtime)
                                : make_sharded_trainer(plan, runtime)) {
    if (speaks_ && plan.verify) {
      twin_.emplace(plan, runtime);
    }
  }

  void train() {
    if (!plan_.save_init.empty()) {
      trainer_->save(plan_.save_init);
    }
    if (speaks_) {
      std::cout << head_text() << std::flush;
    }
    run_steps();
    if (!plan_.save.empty()) {
      trainer_->save(plan_.save);
    }
    if (!plan_.trace.empty()) {
      runtime_.spans().write_chrome_trace(file_of_rank(plan_.trace, runtime_.rank()),
                                          runtime_.rank());
    }
    if (plan_.verify) {
      compare_params();
    }
    if (speaks_) {
      std::cout << totals_.text() << std::flush;
      plan_.verify ? pronounce() : print_memory();
    }
  }

 private:
  void run_steps() {
    std::optional<Progress> progress;
    std::optional<MetricsFile> file;
    if (speaks_) {
      progress.emplace(stdout_progress(plan_.num_steps), runtime_.clock());
    }
    if (speaks_ && !plan_.metrics.empty()) {
      file.emplace(plan_.metrics);
    }
    for (std::int64_t step = 0; step < plan_.num_steps; ++step) {
      const StepMetrics metrics = run_step(step);
      totals_.add(metrics);
      if (file) {
        file->append(metrics);
      }
      if (progress) {
        progress->show(metrics);
      }
    }
  }

  StepMetrics run_step(std::int64_t step) {
    const std::int64_t start_ns = runtime_.clock().now_ns();
    StepResult result;
    {
      const SpanScope span(runtime_.spans(), "step", {.sequence = step});
      for (std::int64_t i = 0; i < plan_.batch.accumulate; ++i) {
        trainer_->run(batches_.read(step, micro_batch_of(plan_.batch, runtime_.rank(), i)));
      }
      result = trainer_->step();
    }
    StepMetrics metrics;
    metrics.step_s = static_cast<double>(runtime_.clock().now_ns() - start_ns) * 1e-9;
    metrics.tokens_per_s =
        static_cast<double>(plan_.tokens_per_step()) / std::max(metrics.step_s, 1e-9);
    metrics.step = step;
    metrics.loss = result.loss;
    metrics.grad_norm = result.grad_norm;
    metrics.lr = result.lr;
    metrics.skipped = result.skipped;
    metrics.loss_scale = result.loss_scale;
    metrics.rss_peak_bytes = rss_peak_bytes();
    const EngineStats stats = trainer_->take_stats();
    metrics.full_bytes_peak = stats.gathers.full_bytes_peak;
    metrics.gathered_bytes = stats.gathered_wire_bytes;
    metrics.reduced_bytes = stats.reduced_wire_bytes;
    metrics.prefetch_hits = stats.gathers.prefetch_hits;
    metrics.prefetch_misses = stats.gathers.prefetch_misses;
    metrics.exposed_wait_s = stats.exposed_wait_s;
    if (twin_) {
      twin_->step(batches_, step, result);
    }
    return metrics;
  }

  // Collective: rank 0 needs whole parameters.
  void compare_params() {
    const std::vector<Trainer::ParamInfo> infos = trainer_->params();
    for (int id = 0; id < static_cast<int>(infos.size()); ++id) {
      const at::Tensor value = trainer_->value(id);
      if (twin_) {
        twin_->compare_param(id, infos[static_cast<std::size_t>(id)], value);
      }
    }
  }

  void pronounce() const {
    const Comparison& comparison = twin_->comparison();
    std::cout << comparison.table() << std::flush;
    TESSERA_CHECK(comparison.failure().empty(), Error,
                  "verification failed: ", comparison.failure());
    std::cout << fmt::format("verified: {} step{} of {} rank{} in {} equal unsharded training{}\n",
                             plan_.num_steps, plural(plan_.num_steps), runtime_.num_ranks(),
                             plural(runtime_.num_ranks()), plan_.config.get_string("precision"),
                             runtime_.num_ranks() == 1 ? ", bit for bit" : " within the bounds");
  }

  ModelBytes model_bytes() const {
    ModelBytes bytes;
    for (const Trainer::ParamInfo& info : trainer_->params()) {
      bytes.num_params += info.numel;
      bytes.num_trainable += info.trainable ? info.numel : 0;
    }
    bytes.dtype = plan_.model.dtype;
    bytes.num_states =
        static_cast<int>(optim::state_names(optim::RuleOptions::from(plan_.config)).size());
    return bytes;
  }

  // Plain training takes its memory from torch, whose books are not ours.
  void print_memory() const {
    if (!plan_.unsharded) {
      std::cout << fmt::format("memory of rank 0 of {}\n", runtime_.num_ranks())
                << memory_text(model_bytes(), runtime_.ledger()) << std::flush;
    }
  }

  std::string head_text() const {
    const ModelBytes model = model_bytes();
    const std::string ranks =
        plan_.unsharded
            ? "unsharded"
            : fmt::format("sharded over {} rank{} ({})", runtime_.num_ranks(),
                          plural(runtime_.num_ranks()), runtime_.group().backend_name());
    const std::string micro_batches =
        plan_.batch.accumulate == 1 ? std::string()
                                    : fmt::format(" in {} micro-batches", plan_.batch.accumulate);
    return fmt::format("{}: {} parameters in {}, {} on {}, {} thread{}\n", plan_.preset,
                       count_text(static_cast<double>(model.num_params)),
                       plan_.config.get_string("precision"), ranks, runtime_.device().name(),
                       plan_.num_threads, plural(plan_.num_threads)) +
           fmt::format("{} step{} of {} sequence{} of {} tokens{}, data: {}\n", plan_.num_steps,
                       plural(plan_.num_steps), plan_.batch.total, plural(plan_.batch.total),
                       plan_.model.sequence, micro_batches, data_.name());
  }

  const TrainPlan& plan_;
  models::TokenSource& data_;
  Runtime& runtime_;
  const bool speaks_;
  Batches batches_;
  std::unique_ptr<Trainer> trainer_;
  std::optional<Twin> twin_;  // rank 0, with --verify
  RunTotals totals_;
};

}  // namespace

void train_this_rank(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
                     comm::RankProcess& process) {
  const TrainPlan plan = checked_plan(flags, rendezvous);
  const std::unique_ptr<models::TokenSource> data = models::open_data(plan.data);
  at::set_num_threads(plan.num_threads);
  Runtime runtime(plan.config, runtime_options(plan));
  process.set_board(runtime.board());
  Run(plan, *data, runtime).train();
}

}  // namespace tessera::cli
