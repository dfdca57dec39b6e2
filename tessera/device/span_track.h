// Marks in a stream, whose times become known later, as spans on a track.
//
// A mark is an event that was recorded in the stream. The stream reaches its marks in the order in
// which they were set, so they are resolved in that order, and spans nest as their marks do. Two
// clocks never agree to the last digit: a time before that of the mark ahead is held there, since a
// trace with spans that overlap by a microsecond is drawn wrongly.
//
// Threads: one at a time. Knows nothing of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/spans.h"

namespace tessera::device {

// The events behind marks. Each is given back exactly once.
class MarkTimes {
 public:
  virtual ~MarkTimes() = default;
  // In nanoseconds of the spans' clock; nothing while the stream has not reached it. May throw
  // DeviceError.
  virtual std::optional<std::int64_t> time_ns(void* event) = 0;
  virtual void give_back(void* event) noexcept = 0;
};

class SpanTrack {
 public:
  // Both outlive this object.
  SpanTrack(Spans& spans, std::string_view name, MarkTimes& times)
      : spans_(spans), track_(spans.add_track(name)), times_(times) {}
  // What is not resolved is not recorded.
  ~SpanTrack();
  SpanTrack(const SpanTrack&) = delete;
  SpanTrack& operator=(const SpanTrack&) = delete;

  void begin(void* event, const char* name, const SpanArgs& args);
  // REQUIRES: num_open() > 0.
  void end(void* event);
  // Begun and not ended.
  std::size_t num_open() const { return num_open_; }

  // Records the spans of at most `most_marks` marks, the oldest first, up to the first that the
  // stream has not reached. Never waits.
  void resolve(std::size_t most_marks = std::numeric_limits<std::size_t>::max());

 private:
  struct Mark {
    void* event = nullptr;
    const char* name = nullptr;  // null: an end
    SpanArgs args;
  };
  struct Begun {
    const char* name = nullptr;
    SpanArgs args;
    std::int64_t start_ns = 0;
  };

  Spans& spans_;
  const TrackId track_;
  MarkTimes& times_;
  std::deque<Mark> marks_;    // not resolved, in the order of the stream
  std::vector<Begun> begun_;  // resolved, whose end is not
  std::size_t num_open_ = 0;
  std::int64_t last_ns_ = std::numeric_limits<std::int64_t>::min();
};

}  // namespace tessera::device
