// Internal to engine: saves (docs/formats.md) of one engine, one at a time.
//
//   begin     the update is over; rank 0 makes the directory, and removes what is left of others;
//             each rank starts to write one file (checkpoint/snapshot.h)
//   written   every rank says what it wrote, and rank 0 completes the save: manifest, then its name
//   over      all ranks know
//
// No rank waits for a disk inside a collective, its own or another's: whatever takes as long as a
// disk does runs on threads, and ranks vote whether theirs are done. save() and finish() wait about
// a second for their own threads before each vote. start_save() goes on when writing has begun, and
// a step's all-reduce is the vote. One rank that has failed ends the save on all.
//
// [Note: collectives of a save] In this order, on all ranks:
//   begin     agree: this rank may save. Votes, until rank 0 has the directory. agree: it has.
//             Its path, from rank 0. agree: this rank writes
//   written   votes, until all have written or one has failed. agree: this rank has not failed.
//             What each rank wrote
//   over      votes, until rank 0 has completed it. agree: it has. The save's path, from rank 0
// Votes repeat until their sum says so, which all ranks see alike. Behind a failed agree the save
// is over. What fixes their place among others: the caller; of a save beside training the step
// whose votes say that all ranks are done, or one has failed.
//
// Whatever changes shards or states meanwhile asks first: ParamTable::before_overwrite(). What a
// rank lacks for a save (memory, threads, room on the disk) is an IoError of the save.
//
// Threads: as Engine. On rank 0 directories are made, saves completed, and old ones removed on
// threads of their own, one after the other; all touch files alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/engine_context.h"
#include "tessera/engine/model.h"
#include "tessera/engine/param_access.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/save_options.h"
#include "tessera/engine/step_driver.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/io_engine.h"

namespace tessera::engine {

class CheckpointSaver {
 public:
  CheckpointSaver(EngineContext& context, RankAgreement& ranks, Model& model, StepDriver& driver,
                  ParamAccess& access);
  // A save that is not complete is given up: nothing of it stays.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Collective; the model is complete. See Engine.
  std::string save(const std::string& root, const SaveOptions& options);
  SavePrediction start_save(const std::string& root, const SaveOptions& options);
  std::optional<SaveOutcome> finish();
  // Until none runs; what becomes of it can be taken afterwards.
  void wait();
  std::optional<SaveOutcome> take_outcome();
  // Collective, behind a step, with what its all-reduce says.
  void after_step();

 private:
  struct Save;  // that is not over

  void begin(const std::string& root, const SaveOptions& options, bool beside_training);
  // What this rank writes, and the manifest without the fragments.
  void collect(Save& save) const;
  void collect_param(Save& save, int id) const;
  void collect_rank_tensors(Save& save) const;
  // Of a rank of the group.
  bool saves_shards(int rank) const;
  // Updates change what belongs to the parameter `owner`.
  bool is_changed_by_updates(int owner) const;
  // On rank 0: starts to make the directory.
  void start_preparing(Save& save, const std::string& root);
  void start_writing(Save& save, bool beside_training);
  void make_buffer(const SaveOptions& options, std::int64_t most_bytes);
  // For a buffer of which the user said nothing.
  std::int64_t default_buffer_bytes() const;
  SavePrediction predict();
  // By what the save that runs writes now, before training goes on.
  void measure_writing();

  void drop_guard();
  // RankAgreement::agree(), where anything that this rank lacks is an IoError.
  void agree(const std::function<void()>& work);
  // Collective: votes, until all ranks are done or one has failed. `votes` are this rank's, after
  // at most so long.
  void wait_for_ranks(const std::function<SaveVotes(std::chrono::nanoseconds limit)>& votes);
  // Of this rank, in the save that runs.
  SaveVotes votes(std::chrono::nanoseconds limit);
  // Throws what went wrong in this rank's part of what runs now. What is not done goes on.
  void check_part();
  // Collective: all ranks are done with their parts, or one has failed. Goes on, or ends the save:
  // then it says how.
  std::optional<SaveOutcome> advance();
  // Collective: the same, once that is so.
  std::optional<SaveOutcome> wait_and_advance();
  void tell_what_was_written();
  std::string complete();
  void start_removal(std::vector<std::string> replaced);
  SaveOutcome end(const std::string& failure);

  EngineContext& ctx_;
  RankAgreement& ranks_;
  Model& model_;
  StepDriver& driver_;
  ParamAccess& access_;
  std::unique_ptr<tier::IoEngine> io_;        // made for the first save
  std::unique_ptr<tier::BufferPool> buffer_;  // of saves beside training: kept for the next
  std::unique_ptr<Save> save_;                // null: none runs
  std::deque<SaveOutcome> outcomes_;          // of those beside training, not taken yet
  // On rank 0: of saves that the last one replaced, or of itself where it has failed.
  std::future<void> removal_;
  // Of this rank, as the last save wrote, or as the first one begins; 0: not known.
  double bytes_per_s_ = 0;
};

}  // namespace tessera::engine
