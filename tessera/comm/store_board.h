// The Board between processes: entries lie in the rendezvous store, under these keys:
//
//   board/<group>/<rank>    BoardEntry::serialize(), the newest
//   board/failure/<rank>    the root cause of a world rank's end; the first post stays
//   board/num_failures      counts posts, so that looking for failures costs one question
//   board/claim/<rank>      counts who wants to post for that rank; the first may
//
// The board has a connection of its own, so that a Store that blocks in get() does not hold it up.
// A post is not answered: another rank may still read the entry before it for a moment.
// It never throws. After a failed call it is unreachable for good: a connection in the middle of a
// broken exchange cannot be trusted again.
//
// Threads: every method may be called from any thread.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/board.h"
#include "tessera/comm/launcher.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

std::shared_ptr<Board> make_store_board(std::unique_ptr<Store> store, int world_size);

// For LaunchOptions::serve_store: a server on loopback and the launcher's board in it. Draws the
// run's secret, and uses the key prefix that find_rendezvous() finds with it.
LaunchStore serve_launch_store(int world_size, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
