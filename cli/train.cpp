#include "cli/train.h"

#include <malloc.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "cli/flag_values.h"
#include "cli/guarded_output.h"
#include "cli/launch/launcher.h"
#include "cli/local_ranks.h"
#include "tessera/core/resource_limits.h"
#include "tessera/tier/scratch_file.h"

namespace tessera::cli {
namespace {

// Every thread takes 64 MiB of address space for what it allocates. Where that is limited they
// share one such region, and it is spent on what is used.
void spare_address_space() {
#ifdef M_ARENA_MAX
  if (address_space_limit()) {
    mallopt(M_ARENA_MAX, 1);
  }
#endif
}

// Nothing that only watches a run may end it: output that cannot be written is dropped.
int run_rank(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
             comm::RankProcess& process) {
  int signal = 0;
  spare_address_space();
  {
    const GuardedOutput output(std::cout, STDOUT_FILENO);
    StopSignals signals(
        {process.launcher_pid(), tier::unlink_scratch_files, !process.launched_by_us()});
    signal = train_this_rank(flags, rendezvous, process, signals);
  }
  if (signal != 0) {
    process.report_stopped();
    return end_as(128 + signal);
  }
  return kExitOk;
}

int run_train(const TrainFlags& flags, const Arguments& arguments) {
  let_writes_fail();
  const comm::Environment env = comm::process_environment();
  const int num_ranks = flags.ranks.empty() ? 0 : parse_ranks(flags.ranks);
  if (num_ranks > 0) {
    check_no_rendezvous(env);
  }
  if (num_ranks > 1) {
    check_training(flags, num_ranks);
    return start_local_ranks(num_ranks, arguments);
  }
  const comm::Rendezvous rendezvous =
      num_ranks == 1 ? comm::Rendezvous() : comm::find_rendezvous(env);
  comm::RankProcess process(env);
  if (rendezvous.world_size == 1) {
    return run_rank(flags, rendezvous, process);
  }
  process.set_clean_up(tier::unlink_scratch_files);
  return process.run([&] { return run_rank(flags, rendezvous, process); });
}

void add_value(CLI::App& app, const char* name, std::string& value, const std::string& text,
               const char* type) {
  app.add_option(name, value, text)->type_name(type);
}

// May be given several times.
void add_values(CLI::App& app, const char* name, std::vector<std::string>& values,
                const std::string& text, const char* type) {
  // One value each time: CLI11 would otherwise take everything that follows.
  app.add_option(name, values, text)
      ->type_name(type)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void add_switch(CLI::App& app, const char* name, bool& value, const char* text) {
  app.add_flag(name, value, text)->disable_flag_override();
}

// Flags that are only a shorter way to set an option say which one; the option's own text, range
// and default are in `tessera options`.
std::string sets(const char* option) { return std::string("Sets option ") + option; }

void add_training_flags(CLI::App& app, TrainFlags& flags) {
  add_value(app, "--steps", flags.steps, "Steps (default " + std::to_string(kDefaultSteps) + ")",
            "N");
  add_value(app, "--epochs", flags.epochs,
            "In place of --steps: passes over the data's files, each in an order of its own", "N");
  add_value(app, "--batch", flags.batch,
            "Sequences per step of all ranks together; sets batch.total (default " +
                std::to_string(kDefaultBatch) + ", or the next number that ranks can share)",
            "N");
  add_value(app, "--accumulate", flags.accumulate, sets("batch.accumulate"), "N");
  add_value(app, "--precision", flags.precision, sets("precision") + ": fp32, bf16 or fp16",
            "NAME");
  add_value(app, "--lr", flags.lr, sets("optim.lr"), "X");
  add_value(app, "--clip", flags.clip, sets("grad.clip_norm"), "X");
  add_value(app, "--seed", flags.seed, sets("seed"), "N");
  add_values(
      app, "--data", flags.data,
      "demo, random, text:PATH (bytes), tokens:PATH (16-bit tokens) or tokens32:PATH; PATH is "
      "a file or a directory; may be given several times (default " +
          std::string(kDefaultData) + ")",
      "SOURCE");
  add_values(app, "--eval-data", flags.eval_data,
             "Data that is not trained on; its mean loss is shown after the last step", "SOURCE");
  add_value(app, "--eval-every", flags.eval_every,
            "Shows the loss of --eval-data after every N steps, too", "N");
  add_value(app, "--eval-batches", flags.eval_batches,
            "Batches of --eval-data, the same each time (default " +
                std::to_string(kDefaultEvalBatches) + ", or all that there are)",
            "N");
  add_switch(app, "--stop-on-divergence", flags.stop_on_divergence,
             "Ends the run after 10 steps in a row without a finite loss and gradient");
  add_value(app, "--stop-after", flags.stop_after,
            "Ends the run behind the step during which this time is over (30s, 45min, 2h), as a "
            "signal does, with exit code 0",
            "TIME");
  add_value(app, "--init", flags.init,
            "Initial parameters: a safetensors file, or a directory in the style of Hugging Face, "
            "with our names or GPT-2's",
            "DIR");
}

void add_run_flags(CLI::App& app, TrainFlags& flags) {
  add_value(
      app, "--device", flags.device,
      "cpu (default), or cuda: each rank takes the GPU of its number on the machine; with any "
      "comm.backend but nccl ranks may share GPUs",
      "NAME");
  add_value(app, "--threads", flags.threads,
            "Threads of each rank's operators (default: cores divided by local ranks)", "N");
  add_switch(app, "--deterministic", flags.deterministic,
             "Only operators that give the same bits in every run; slower on a GPU");
  add_switch(app, "--unsharded", flags.unsharded,
             "Trains the same model in plain LibTorch, in one process");
  add_value(app, "--verify", flags.verify,
            "Trains N steps beside unsharded training, compares loss, norm and parameters, "
            "and fails where they differ",
            "N");
  add_value(
      app, "--verify-against", flags.verify_against,
      "turns (default): unsharded training that takes the ranks' micro-batches in turn, so "
      "that what differs is sharding; plain: the one-process run of --unsharded, whose larger "
      "batches round differently",
      "WHAT");
  add_value(app, "--log-every", flags.log_every,
            "A line on screen every N steps that stays there (default: on a terminal about ten in "
            "the run, elsewhere about one per second)",
            "N");
  add_value(app, "--metrics", flags.metrics,
            "One JSON object per step, from rank 0; readable while it grows, emptied at the start, "
            "or cut to the steps before --resume; `tessera plot` shows it",
            "FILE");
  add_value(app, "--tensorboard", flags.tensorboard,
            "Scalars of every step for TensorBoard, in a new file of this directory", "DIR");
  add_value(app, "--peak-tflops", flags.peak_tflops,
            "Peak of one rank's device in this precision, for MFU in the metrics (default: known "
            "for common NVIDIA GPUs)",
            "X");
  add_value(app, "--trace", flags.trace,
            sets("trace.path") + "; other ranks put .rankN before the ending", "FILE");
  add_value(app, "--save-init", flags.save_init, "Initial parameters, as safetensors", "FILE");
  add_value(app, "--save", flags.save,
            "Parameters after the last step, or after the one that SIGINT, SIGTERM, SIGHUP or "
            "--stop-after stops, as safetensors",
            "FILE");
}

}  // namespace

void add_model_flags(CLI::App& app, TrainFlags& flags) {
  add_value(app, "--preset", flags.preset,
            preset_names_text() + " (default " + kDefaultPreset + ")", "NAME");
  add_value(app, "--model", flags.model,
            "In place of a preset: the shape in a config.json in the style of Hugging Face",
            "FILE");
  add_value(app, "--width", flags.width, "Elements per token, a multiple of --heads (preset's)",
            "N");
  add_value(app, "--heads", flags.heads, "Heads of attention (preset's)", "N");
  add_value(app, "--layers", flags.layers, "Blocks (default: the preset's)", "N");
  add_value(app, "--seq", flags.sequence, "Tokens per sequence, positions too (preset's)", "N");
  add_value(app, "--vocab", flags.vocabulary, "Size of the vocabulary (preset's)", "N");
  add_value(app, "--freeze", flags.freeze, "Does not train the first N blocks (default 0)", "N");
  add_value(app, "--adapters", flags.adapters,
            "Low-rank adapters (LoRA) of rank R on the linear layers of all blocks; the base is "
            "frozen unless --freeze-base says otherwise",
            "R");
  add_value(app, "--adapter-alpha", flags.adapter_alpha,
            "Adapters' output is scaled by this over R (default 2 R)", "X");
  add_value(app, "--freeze-base", flags.freeze_base,
            "What of the model's own weights is trained and how they are held: full (default with "
            "--adapters; frozen, in the run's precision), int8 or int4 (frozen, as blocks of so "
            "many bits; changes numbers), none (trained, too)",
            "HOW");
  add_value(app, "--loss-chunk", flags.loss_chunk,
            "Tokens whose logits exist at a time; the same loss in less memory (default 0: all)",
            "N");
  add_switch(app, "--recompute", flags.recompute,
             "Runs each block's forward again in backward instead of keeping activations");
  add_switch(app, "--tie-head", flags.tie_head, "The head uses the token embedding's weight");
}

void add_memory_flags(CLI::App& app, TrainFlags& flags) {
  add_value(app, "--host-budget", flags.host_budget, sets("memory.host") + ", for each rank",
            "SIZE");
  add_value(app, "--device-budget", flags.device_budget, sets("memory.device") + ", for each rank",
            "SIZE");
  add_value(app, "--nvme", flags.nvme, "Directories for what memory does not hold; sets nvme.paths",
            "DIR[,DIR]");
  add_value(app, "--nvme-budget", flags.nvme_budget, sets("memory.nvme") + ", for each rank",
            "SIZE");
  add_value(app, "--parameters", flags.parameters,
            sets("place.parameters") + ": auto, device, host or nvme", "PLACE");
  add_value(app, "--optimizer", flags.optimizer,
            sets("place.optimizer") + ": auto, device, host or nvme", "PLACE");
  add_value(app, "--cpu-share", flags.cpu_share,
            sets("optim.cpu_share") + ": of the update beside a GPU, from 0 to 1", "X");
}

void add_mesh_flags(CLI::App& app, TrainFlags& flags) {
  add_value(app, "--shard-size", flags.shard_size,
            sets("shard.group_size") +
                ": ranks that hold one copy of the model together (MiCS; default 0: all)",
            "N");
  add_switch(app, "--hierarchical", flags.hierarchical,
             "Gathers across hosts first and inside each host second; sets option "
             "shard.hierarchical_gather");
  add_value(app, "--hpz-size", flags.hpz_size,
            sets("shard.secondary_group_size") +
                ": ranks of a host that share a second copy of the shards, from which every gather "
                "but the first after an update comes",
            "N");
  add_switch(app, "--quantize-weights", flags.quantize_weights,
             "Gathers parameters as int8 blocks, which changes numbers (qwZ); sets option "
             "quant.weights");
  // In braces is what it means without a value.
  app.add_flag(
      "--quantize-gradients{4}", flags.quantize_gradients,
      "Reduces gradients as blocks of int4, or with =8 of int8; changes numbers (qgZ); sets "
      "options quant.gradients and quant.gradient_bits");
  add_value(app, "--ranks-per-host", flags.ranks_per_host,
            sets("comm.ranks_per_host") +
                ": ranks of each host (default: as found); fewer than there are make one host "
                "several",
            "N");
}

Action add_train(CLI::App& app) {
  auto flags = std::make_shared<TrainFlags>();
  add_model_flags(app, *flags);
  add_ranks_flag(app, flags->ranks);
  add_training_flags(app, *flags);
  add_schedule_flags(app, flags->schedule);
  add_memory_flags(app, *flags);
  add_mesh_flags(app, *flags);
  add_run_flags(app, *flags);
  add_checkpoint_flags(app, flags->checkpoint);
  add_config_flags(app, flags->config);
  return [flags](const Arguments& arguments) { return run_train(*flags, arguments); };
}

}  // namespace tessera::cli
