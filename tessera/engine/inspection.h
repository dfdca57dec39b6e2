// A snapshot of an engine: its units, and for each parameter what it is, how it is cut and where
// its bytes are now. For debugging and for tools.
//
//   std::cout << tessera::to_text(tessera::inspect(engine));
//
// It may be taken at any time, inside a unit's forward, too; it changes nothing and talks to no
// other rank. What happens between two snapshots is in the log at level trace, one line per gather,
// wait and release.
//
// A snapshot holds copies: it outlives its engine.
//
// Threads: taken where the engine may be used; plain data afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/coordinator/gather_stats.h"
#include "tessera/core/placement.h"
#include "tessera/shard/layout.h"
#include "tessera/shard/param.h"

namespace tessera {

class Engine;

struct ParamReport {
  int id = 0;
  std::string name;
  bool trainable = true;
  bool dynamic = false;  // some ranks may skip every unit that uses it
  int num_units = 0;     // that use it; more than one: tied, or external to some
  bool persists = false;
  std::vector<std::int64_t> sizes;
  // How it is cut, and where its shard is.
  std::string group;
  int rank = 0;
  shard::Layout layout;
  Placement placement;
  // Now.
  shard::ParamState state = shard::ParamState::kReleased;
  std::uint64_t version = 0;  // updates so far
  int num_users = 0;          // units and scopes that use it right now
};

struct UnitReport {
  std::string name;
  std::string type;           // of its module
  std::vector<int> own;       // ids of parameters
  std::vector<int> external;  // of other units
  bool dynamic = false;
  bool is_leaf = false;
  std::string inside_leaf;  // name of the leaf that it is gathered with; empty: none
  bool is_open = false;     // in use right now
  // Since the start.
  coordinator::GatherCounts forward;
  coordinator::GatherCounts backward;
  coordinator::GatherCounts inference;
};

struct Inspection {
  std::vector<UnitReport> units;    // in the order in which they were made
  std::vector<ParamReport> params;  // by id
};

Inspection inspect(const Engine& engine);

// One line per unit and parameter.
std::string to_text(const Inspection& inspection);
// One document with the fields above by name; parameters of units by name.
std::string to_json(const Inspection& inspection);

}  // namespace tessera
