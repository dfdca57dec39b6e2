// Internal to grad: which parameters got a gradient in a step, on any rank.
//
// Torch updates what has a gradient and leaves the rest as it is, states and all; and so must every
// rank, with its shard, if any rank has used a parameter. Each rank says at the end of each
// backward what it has used so far, one bit per parameter. That travels between hosts: the update
// can be started without waiting for the device.
//
// What fixes the order: one call per backward, behind its last bucket, in a group of all ranks that
// train the model, whichever shards and copies of it they hold. In a group of one there is none.
//
// Threads: as Reducer.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::grad {

class UsedParams {
 public:
  UsedParams(comm::Group& group, int num_params);
  ~UsedParams() { clear(); }
  UsedParams(const UsedParams&) = delete;
  UsedParams& operator=(const UsedParams&) = delete;

  // By this rank, or by some rank as all know.
  void mark(int param) { used_[static_cast<std::size_t>(param)] = true; }
  void finish_backward();
  // Waits for what the other ranks have said; throws what went wrong.
  bool is_used(int param);
  void clear() noexcept;
  // Not all other ranks have said what was asked.
  bool is_under_way() const;

 private:
  void collect();

  comm::Group& group_;
  std::vector<bool> used_;  // by id
  std::vector<comm::HostGather> said_;
};

}  // namespace tessera::grad
