// Internal to engine: loads a checkpoint (docs/formats.md) into an engine, whatever number of
// ranks, types and tiers it was saved with.
//
// Each rank reads what it owns, tile by tile. Ranks hash what they read, by its place in the tensor
// (checkpoint::ContentHash); the sums must be those of the save, so a byte that no rank has read,
// or that a wrong rank has, is found, and named.
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

  // Collective; the model is complete, and no save runs.
  LoadResult load(const std::string& path, const LoadOptions& options);

 private:
  // What a parameter here takes from the checkpoint.
  struct Match {
    const checkpoint::StoredParam* stored = nullptr;  // null: it keeps what it has
    const checkpoint::StoredTensor* value = nullptr;
    // By number in Optimizer::tensor_names(); null: zeros, or the value widened for a master.
    std::vector<const checkpoint::StoredTensor*> tensors;
  };

  void match(const checkpoint::Manifest& manifest, bool partial);
  void match_param(const checkpoint::Manifest& manifest, int id);
  void match_states(int id, Match& match);
  void match_buffers(const checkpoint::Manifest& manifest);
  // Local: only reads and writes.
  void read_all();
  void read_param(int id);
  // Gives this rank's tiles of a tensor to all `writes`, and keeps the hash of what was read.
  using Write = std::function<void(std::int64_t begin, std::span<const std::byte> bytes)>;
  void read_tiles(const checkpoint::StoredTensor& tensor, const shard::Param& param,
                  const std::vector<Write>& writes);
  // The same of a tensor that is stored as blocks there: of its bytes, then decoded.
  void read_decoded_tiles(const checkpoint::StoredTensor& tensor, const shard::Param& param,
                          const std::vector<Write>& writes);
  // Both have the same blocks.
  void read_stored(const checkpoint::StoredTensor& tensor, const shard::Param& param,
                   ShardWriter& writer);
  void clear_tensor(int id, std::size_t number);
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
  std::map<const checkpoint::StoredTensor*, std::uint64_t> hashes_;  // of what this rank has read
  std::vector<std::byte> tile_;
  std::vector<std::byte> converted_;
};

}  // namespace tessera::engine
