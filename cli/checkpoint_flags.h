// Flags of `tessera train` about checkpoints: what was typed, and what it asks for.
//
// Threads: main thread only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace tessera::cli {

inline constexpr std::int64_t kDefaultKeep = 2;

// As they were typed; empty: not given.
struct CheckpointFlags {
  std::string root;
  std::string save_every;
  std::string keep;
  bool resume = false;
  bool partial = false;
  bool save_async = false;
  std::string save_memory;
};

struct CheckpointPlan {
  std::string root;             // a directory of saves
  std::int64_t save_every = 0;  // steps; 0: at the end of the run only
  int keep = kDefaultKeep;
  bool resume = false;
  bool partial = false;
  bool is_async = false;                     // of saves that are not the last
  std::optional<std::int64_t> memory_bytes;  // for them, of each rank
};

// In a group of their own.
void add_checkpoint_flags(CLI::App& app, CheckpointFlags& flags);

// Null: no checkpoints are asked for. ConfigError for flags that contradict each other, and for a
// directory that cannot be made or written to. Writes nothing.
std::optional<CheckpointPlan> checked_checkpoint_plan(const CheckpointFlags& flags);

}  // namespace tessera::cli
