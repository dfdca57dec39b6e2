// The groups of a gather in two phases. A parameter is cut over H hosts with L ranks each; shard
// l * H + h is that of the l-th rank of host h. A rank gathers with its peers of the other hosts
// first, which fills H consecutive slots of the full parameter, and then with the ranks of its own
// host, which fills it with L such blocks: nothing is copied to another place.
//
// Order: each group has one call per gather, in the order of gathers.
//
// Threads: plain data.
#pragma once

#include "tessera/comm/group.h"

namespace tessera::coordinator {

// Both null: one phase.
struct GatherPhases {
  comm::Group* across = nullptr;  // ranks of all hosts with this one's local rank, by host
  comm::Group* inside = nullptr;  // ranks of this host, by local rank
};

}  // namespace tessera::coordinator
