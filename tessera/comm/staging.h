// Scratch of a group's calls: packed small pieces, what an all-to-all receives before it is added.
//
// Buffers are kept and used again, because fresh pages cost more than the copy that fills them: a
// step's calls repeat, so after the first step nothing is allocated. At most kMaxKept idle buffers
// are kept. Every byte is charged to the ledger from allocation to release, idle or not.
//
// Threads: take() from any thread; a buffer may be dropped on any thread.
#pragma once

#include <cstddef>
#include <memory>

#include "tessera/comm/backend.h"
#include "tessera/core/ledger.h"

namespace tessera::comm {

class Staging {
 public:
  static constexpr std::size_t kMaxKept = 8;

  // `ledger` may be null. Stream-ordered backends allocate per call: their allocator knows streams.
  Staging(Backend& backend, Ledger* ledger);

  // At least `bytes`; goes back when the last owner drops it, also after this object is gone.
  std::shared_ptr<std::byte> take(std::size_t bytes, device::Stream* stream);

 private:
  struct Shelf;
  Backend& backend_;
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace tessera::comm
