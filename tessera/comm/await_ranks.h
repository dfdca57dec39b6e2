// Ranks that wait for each other at the store before they connect: the store can name a rank that
// does not join, a network cannot.
//
// Threads: stateless.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

// What every rank of a group of `size` said under `topic`, this rank's `own` among it. Collective;
// blocks. `topic` is used once in a group. CommError names the ranks that did not join within
// `timeout`; the failure of a rank ends it, too, if `status` is not null.
std::vector<std::string> exchange_at_store(Store& store, const std::string& group,
                                           const std::string& topic, int rank, int size,
                                           const std::string& own,
                                           std::chrono::milliseconds timeout, StatusStore* status);

}  // namespace tessera::comm
