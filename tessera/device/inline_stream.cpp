#include "tessera/device/inline_stream.h"

#include <algorithm>
#include <iterator>

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

void InlineStream::begin_span(const char* name, const SpanArgs& args) {
  if (spans_ == nullptr) {
    return;
  }
  const std::lock_guard lock(begun_mutex_);
  begun_.push_back({name, args, spans_->now_ns(), std::this_thread::get_id()});
}

void InlineStream::end_span() {
  if (spans_ == nullptr) {
    return;
  }
  const std::lock_guard lock(begun_mutex_);
  const auto own = std::find_if(begun_.rbegin(), begun_.rend(), [](const Begun& each) {
    return each.thread == std::this_thread::get_id();
  });
  if (own != begun_.rend()) {
    spans_->record(own->name, own->start_ns, spans_->now_ns(), own->args);
    begun_.erase(std::next(own).base());
  }
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
