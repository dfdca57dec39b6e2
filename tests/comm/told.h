// As a program does whose rank fails: it tells the others before it goes.
#pragma once

#include <exception>

#include "tessera/comm/board.h"
#include "tessera/core/error.h"

namespace tessera::comm {

// Runs `body`; what it throws is put on the board, unless it came from another rank, and thrown.
template <typename Body>
void run_told(Board& board, int rank, const Body& body) {
  try {
    body();
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    board.post_failure(rank, error.what());
    throw;
  }
}

}  // namespace tessera::comm
