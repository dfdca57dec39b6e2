#include "tessera/device/inline_stream.h"

#include "tessera/core/error.h"

namespace tessera::device {

InlineStream::RunScope::RunScope(InlineStream& stream) : stream_(stream) {
  TESSERA_INVARIANT(stream.runner_.load(std::memory_order_relaxed) != std::this_thread::get_id(),
                    "work on the ", to_string(stream.kind_), " stream calls into the same stream");
  stream.mutex_.lock();
  stream.runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

InlineStream::RunScope::~RunScope() {
  stream_.runner_.store(std::thread::id(), std::memory_order_relaxed);
  stream_.mutex_.unlock();
}

Pending InlineStream::record() {
  const RunScope scope(*this);
  return outcome();
}

void InlineStream::wait(const Pending& pending) {
  try {
    pending.wait();
  } catch (...) {
    const RunScope scope(*this);
    if (!error_) {
      error_ = std::current_exception();
    }
  }
}

}  // namespace tessera::device
