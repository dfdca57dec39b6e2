#include "tessera/device/span_track.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::device {

SpanTrack::~SpanTrack() {
  for (const Mark& mark : marks_) {
    times_.give_back(mark.event);
  }
}

void SpanTrack::begin(void* event, const char* name, const SpanArgs& args) {
  marks_.push_back({event, name, args});
  ++num_open_;
}

void SpanTrack::end(void* event) {
  TESSERA_INVARIANT(num_open_ > 0, "a span ends on a stream where none was begun");
  marks_.push_back({event, nullptr, {}});
  --num_open_;
}

void SpanTrack::resolve(std::size_t most_marks) {
  for (; most_marks > 0 && !marks_.empty(); --most_marks) {
    const Mark mark = marks_.front();
    const std::optional<std::int64_t> time_ns = times_.time_ns(mark.event);
    if (!time_ns) {
      return;
    }
    marks_.pop_front();
    times_.give_back(mark.event);
    last_ns_ = std::max(last_ns_, *time_ns);
    if (mark.name != nullptr) {
      begun_.push_back({mark.name, mark.args, last_ns_});
    } else {
      const Begun& begun = begun_.back();
      spans_.record_on(track_, begun.name, begun.start_ns, last_ns_, begun.args);
      begun_.pop_back();
    }
  }
}

}  // namespace tessera::device
