// Where `tessera train --resume` goes on, and whether that is the run which was saved.
//
// Every save says as text what determines the run's numbers beside what the engine keeps: the
// model's shape ("model.*", models/gpt_description.h) and the data ("data.*"). A run that goes on
// must have the same; then the batch of every further step is the one that it would have been.
// Where the data lie may change: compared are the tokens of the next batch, not paths. A save of
// another program (`tessera import`, one's own with Engine::save()) does not say what it was
// trained with, and is taken.
//
// Threads: main thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/checkpoint_flags.h"
#include "tessera/checkpoint/save_directory.h"

namespace tessera::cli {

using RunIdentity = std::map<std::string, std::string>;

struct DataIdentity {
  std::vector<std::string> sources;  // as flags named them
  std::int64_t batch = 0;            // sequences per step, of all ranks
  std::uint64_t seed = 0;
  bool in_epochs = false;
  std::uint64_t next_batch = 0;  // XXH3 of the tokens of the first step that is not done
};
RunIdentity describe(const DataIdentity& data);

struct ResumePoint {
  std::string path;       // of the save
  std::int64_t step = 0;  // the last one that is done
  int num_ranks = 1;      // that wrote it
  RunIdentity identity;
};

// The newest save of the plan's root; null: there is none. ConfigError if there is one and nobody
// asked to resume: a run that begins would take its place. CorruptError, IoError.
std::optional<ResumePoint> find_resume_point(const CheckpointPlan& plan);

// Of rank 0, behind everything that may be refused: as long as the lock is there, nobody else saves
// into the plan's root. `point`: what was found there. ConfigError if another run uses the root, or
// has saved into it since then. Makes the root.
std::shared_ptr<const checkpoint::DirectoryLock> lock_root(const CheckpointPlan& plan,
                                                           const std::optional<ResumePoint>& point);

// ConfigError with every difference, both values and the flag. `now`: of this run, with the batch
// behind the point's step.
void check_same_run(const ResumePoint& point, const RunIdentity& now);

}  // namespace tessera::cli
