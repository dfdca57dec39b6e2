// Internal to engine: loads a checkpoint (docs/formats.md) into an engine, whatever number of
// ranks, types and tiers it was saved with.
//
// Each rank reads what it owns, piece by piece. Several threads do: each takes some parameters, the
// largest first, and what is next of them is read while it hashes and copies what has come. Another
// takes the memory of the optimizer's states meanwhile, if those are not made yet. Ranks hash what
// they read, by its place in the tensor (checkpoint::ContentHash); the sums must be those of the
// save, so a byte that no rank has read, or that a wrong rank has, is found, and named.
//
//   saved                          a parameter here            its master here
//   the same type                  as it was                   as it was; of fp32 the value
//   another type, with a master    the master, rounded         the master
//   another type, without          the value, converted        the value, widened
//
// What is stored as blocks (shard/stored_format.h), there or here, goes from bytes to bytes where
// both have the same format; else it is decoded and encoded, tile by tile.
//
// What fixes the order of collectives: the caller. What one rank refuses, all do, and before
// anything is changed unless reading fails; then the engine is unusable until a load succeeds.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/engine/engine_context.h"
#include "tessera/engine/model.h"
#include "tessera/engine/param_access.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/save_options.h"
#include "tessera/engine/shard_writer.h"
#include "tessera/engine/step_driver.h"
#include "tessera/engine/step_state.h"

namespace tessera::engine {

class CheckpointLoader {
 public:
  CheckpointLoader(EngineContext& context, RankAgreement& ranks, Model& model, StepDriver& driver,
                   ParamAccess& access);

  // Collective; the model is complete, and no save runs. `half_loaded`: the save of which a load
  // before has left parts behind; empty: none.
  LoadResult load(const std::string& path, const LoadOptions& options,
                  const std::string& half_loaded);

 private:
  // What a parameter here takes from the checkpoint.
  struct Match {
    const checkpoint::StoredParam* stored = nullptr;  // null: it keeps what it has
    const checkpoint::StoredTensor* value = nullptr;
    // By number in Optimizer::tensor_names(); null: zeros, or the value widened for a master.
    std::vector<const checkpoint::StoredTensor*> tensors;
    // Of what this rank has read for this parameter: others may read the same tensor, which was
    // tied there. Has its entries before threads begin.
    std::map<const checkpoint::StoredTensor*, std::uint64_t> hashes;
  };

  void match(const checkpoint::Manifest& manifest, bool partial, const std::string& half_loaded);
  void match_param(const checkpoint::Manifest& manifest, int id);
  void match_states(int id, Match& match);
  void match_buffers(const checkpoint::Manifest& manifest);
  // Local: only reads and writes.
  void read_all();
  // Parameters that one thread reads at once, in the order in which they are taken.
  std::vector<std::vector<int>> make_jobs() const;
  void read_jobs(const std::vector<std::vector<int>>& jobs);
  class ParamReader;  // of one thread
  // What a parameter here is read from.
  struct Sources {
    const checkpoint::StoredTensor* shard = nullptr;
    bool same_blocks = false;  // its bytes are the shard's
    // As in Match, with what takes the place of a master.
    std::vector<const checkpoint::StoredTensor*> tensors;
  };
  Sources sources_of(int id) const;
  // What all threads of a rank must have before they begin, and what is done behind them.
  void prepare(int id);
  void complete(int id);
  void read_rank_tensors();
  // Collective.
  void compare_hashes();

  EngineContext& ctx_;
  RankAgreement& ranks_;
  Model& model_;
  StepDriver& driver_;
  ParamAccess& access_;
  std::unique_ptr<checkpoint::CheckpointReader> reader_;
  StepState state_;
  std::vector<Match> matches_;         // by id
  std::vector<std::string> problems_;  // what `partial` has to accept
  std::vector<std::string> notes_;
  int num_threads_ = 1;
  double read_s_ = 0;
  std::mutex nvme_mutex_;  // held by who writes to a shard on NVMe: one at a time does
};

}  // namespace tessera::engine
