// As a program does whose rank fails: it tells the others before it goes.
#pragma once

#include <exception>

#include "tessera/comm/status_store.h"
#include "tessera/core/error.h"

namespace tessera::comm {

// Runs `body`; what it throws is posted in the status store, unless it came from another rank, and
// thrown.
template <typename Body>
void run_told(StatusStore& status, int rank, const Body& body) {
  try {
    body();
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    status.post_failure(rank, error);
    throw;
  }
}

}  // namespace tessera::comm
