// `tessera train`: what its flags say, and what is done with them.
//
// Everything that can be wrong with flags, options and data is found before ranks are started,
// memory is taken or a file is opened for writing. With --ranks the process that starts them
// checks for all, so that a mistake is one line and not one per rank.
//
// Threads: main thread only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/checkpoint_flags.h"
#include "cli/config_flags.h"
#include "cli/launch/stop_signals.h"
#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"

namespace CLI {
class App;
}

namespace tessera::cli {

inline constexpr const char* kDefaultPreset = "tiny";
inline constexpr const char* kDefaultData = "demo";
inline constexpr std::int64_t kDefaultSteps = 20;
inline constexpr std::int64_t kDefaultBatch = 8;
inline constexpr std::int64_t kDefaultEvalBatches = 10;

// As they were typed; empty: not given.
struct TrainFlags {
  ConfigFlags config;
  std::string ranks;

  std::string preset;
  std::string model;
  std::string width;
  std::string heads;
  std::string layers;
  std::string sequence;
  std::string vocabulary;
  std::string freeze;
  std::string adapters;
  std::string adapter_alpha;
  std::string freeze_base;
  std::string loss_chunk;
  bool deterministic = false;
  bool recompute = false;
  bool tie_head = false;

  std::string steps;
  std::string epochs;
  std::string batch;
  std::string accumulate;
  std::string precision;
  std::string lr;
  ScheduleFlags schedule;
  std::string clip;
  std::string seed;
  std::vector<std::string> data;
  std::vector<std::string> eval_data;
  std::string eval_every;
  std::string eval_batches;
  bool stop_on_divergence = false;
  std::string stop_after;

  std::string init;
  CheckpointFlags checkpoint;

  std::string device;
  std::string threads;
  bool unsharded = false;
  std::string verify;
  std::string verify_against;

  std::string host_budget;
  std::string device_budget;
  std::string nvme;
  std::string nvme_budget;
  std::string parameters;
  std::string optimizer;
  std::string cpu_share;

  std::string shard_size;
  bool hierarchical = false;
  std::string hpz_size;
  bool quantize_weights = false;
  std::string quantize_gradients;  // bits
  std::string ranks_per_host;

  std::string metrics;
  std::string tensorboard;
  std::string log_every;
  std::string peak_tflops;
  std::string trace;
  std::string save_init;
  std::string save;
};

// For people: "micro, tiny or small".
std::string preset_names_text();

// What a model is called on screen: its preset or file, and the shape that flags changed.
std::string model_name(const TrainFlags& flags);

// Those that say which model, for every command that has one.
void add_model_flags(CLI::App& app, TrainFlags& flags);

// Those that say how much memory there is, and where else shards may live.
void add_memory_flags(CLI::App& app, TrainFlags& flags);

// Those that say which ranks hold one copy of the model together.
void add_mesh_flags(CLI::App& app, TrainFlags& flags);

// Throws ConfigError, in one line, for whatever would stop this many ranks of this machine.
// Allocates and writes nothing.
void check_training(const TrainFlags& flags, int num_local_ranks);

// Trains as the rank that `rendezvous` says; collective over all of them. Rank 0 speaks. Returns 0,
// also behind --stop-after, or the signal that has stopped it behind a step; with everything
// written.
int train_this_rank(const TrainFlags& flags, const comm::Rendezvous& rendezvous,
                    comm::RankProcess& process, StopSignals& signals);

}  // namespace tessera::cli
