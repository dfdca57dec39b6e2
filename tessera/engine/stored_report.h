// Internal to engine: what storing frozen weights as blocks does to a model: how many parameters,
// what bytes, and what encoding has changed in their values. Said once, in the first lines of a
// run.
//
// Threads: set() for different parameters from any thread; the rest as Engine.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/shard/param.h"
#include "tessera/shard/stored_format.h"
#include "tessera/shard/stored_shard.h"

namespace tessera::engine {

class StoredReport {
 public:
  void add_param() { changes_.emplace_back(); }
  // Of the shard that this rank has encoded last; of bytes that came encoded, nothing.
  void set(int id, const shard::EncodingChange& change) {
    changes_[static_cast<std::size_t>(id)] = change;
  }
  // Empty: nothing is stored as blocks, and `rule` asks for nothing. Where anything is, a
  // collective of `group`, which holds all shards.
  std::string text(comm::Group& group, const shard::ParamTable& params,
                   const shard::StoredRule& rule) const;

 private:
  std::vector<shard::EncodingChange> changes_;  // by parameter id
};

}  // namespace tessera::engine
