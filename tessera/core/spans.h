// What ran when: a fixed ring of time spans per rank, for a Chrome/Perfetto trace on request.
//
// Recording formats nothing and allocates nothing: names are string literals, units and parameters
// are ids that were interned beforehand, arguments are integers. The ring keeps the latest spans;
// what was overwritten is counted and said in the trace. With capacity 0 tracing is off, and a
// SpanScope costs one branch.
//
// A span lies on the track of the thread that recorded it, or on a track of its own: work that runs
// on no thread of ours, such as a GPU's streams, has times on the same clock.
//
// A tool that watches the program from outside (NVTX, see device/nvtx.h) hears of every SpanScope
// through a hook, also while the ring is off.
//
// Invariants:
//  (1) A slot is readable only when its stamp is even and not zero: stamp = 2 * (ticket + 1).
//  (2) Only the thread that made the stamp odd writes the slot, and a slot only ever moves on to a
//      later ticket. A writer that finds its slot taken by another writer, or by a later ticket,
//      drops its span instead of waiting.
//
// Threads: record(), SpanScope and intern() from any thread, also while a snapshot is taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/clock.h"

namespace tessera {

// 0 is the empty label.
using LabelId = std::uint32_t;
// A thread's id, or what add_track() gave.
using TrackId = std::int64_t;

struct SpanArgs {
  std::int64_t bytes = -1;     // below zero: not shown
  std::int64_t sequence = -1;  // below zero: not shown
  LabelId unit = 0;
  LabelId parameter = 0;
};

struct Span {
  const char* name = nullptr;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  TrackId track = 0;
  SpanArgs args;
};

class Spans;

// What hears of scopes as they begin and end, on their own thread and properly nested. Must not
// throw.
struct SpanHook {
  void (*begin)(const Spans& spans, const char* name, const SpanArgs& args) = nullptr;
  void (*end)() = nullptr;
};

class Spans {
 public:
  // `clock` outlives this object.
  Spans(const Clock& clock, std::size_t num_spans);

  bool enabled() const { return num_slots_ != 0; }
  std::int64_t now_ns() const { return clock_.now_ns(); }

  // The id of a unit's or parameter's name. Allocates: call it when the model is built.
  LabelId intern(std::string_view label);
  std::string label(LabelId id) const;
  // How the calling thread is called in the trace.
  void name_this_thread(std::string name);
  // A track that is no thread's; the same name gives the same track.
  TrackId add_track(std::string_view name);

  // Null takes it away. Scopes that have begun end with the hook that they began with, so `hook`
  // must outlive them all: a static.
  void set_hook(const SpanHook* hook);
  const SpanHook* hook() const { return hook_.load(std::memory_order_acquire); }
  // Does anybody want to hear of scopes: the ring, or the hook?
  bool is_watched() const { return is_watched_.load(std::memory_order_relaxed); }

  // `name` must live as long as this object: a literal.
  void record(const char* name, std::int64_t start_ns, std::int64_t end_ns,
              const SpanArgs& args = {});
  void record_on(TrackId track, const char* name, std::int64_t start_ns, std::int64_t end_ns,
                 const SpanArgs& args = {});

  // The spans in the ring, oldest first.
  std::vector<Span> snapshot() const;
  std::uint64_t num_recorded() const { return next_.load(std::memory_order_relaxed); }

  // Written beside `path` and renamed, so that a reader sees a whole trace or none. Opens in
  // ui.perfetto.dev and chrome://tracing; the process is the rank. IoError if it cannot be written.
  void write_chrome_trace(const std::string& path, int rank) const;

 private:
  // Fields are atomic because a reader may look at a slot that is being overwritten; the stamp
  // tells it afterwards whether what it saw belongs together.
  struct Slot {
    std::atomic<std::uint64_t> stamp{0};
    std::atomic<const char*> name{nullptr};
    std::atomic<std::int64_t> start_ns{0};
    std::atomic<std::int64_t> end_ns{0};
    std::atomic<TrackId> track{0};
    std::atomic<std::int64_t> bytes{0};
    std::atomic<std::int64_t> sequence{0};
    std::atomic<std::uint64_t> labels{0};
  };

  std::string chrome_trace(int rank) const;

  const Clock& clock_;
  const std::size_t num_slots_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<const SpanHook*> hook_{nullptr};
  std::atomic<bool> is_watched_;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::vector<std::string> labels_{std::string()};
  std::map<std::string, LabelId, std::less<>> label_ids_;
  std::map<TrackId, std::string> thread_names_;
  std::vector<std::string> track_names_;  // by TrackId, from kFirstTrack on
};

// Records the time between its construction and its end.
class SpanScope {
 public:
  SpanScope(Spans& spans, const char* name, const SpanArgs& args = {})
      : spans_(spans.is_watched() ? &spans : nullptr) {
    if (spans_ != nullptr) {
      name_ = name;
      args_ = args;
      hook_ = spans.hook();
      if (hook_ != nullptr) {
        hook_->begin(spans, name, args);
      }
      start_ns_ = spans.enabled() ? spans.now_ns() : 0;
    }
  }
  ~SpanScope() {
    if (spans_ != nullptr) {
      if (spans_->enabled()) {
        spans_->record(name_, start_ns_, spans_->now_ns(), args_);
      }
      if (hook_ != nullptr) {
        hook_->end();
      }
    }
  }
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  Spans* const spans_;
  const SpanHook* hook_ = nullptr;
  const char* name_ = nullptr;
  SpanArgs args_;
  std::int64_t start_ns_ = 0;
};

}  // namespace tessera
