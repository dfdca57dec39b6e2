#include "tessera/core/spans.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/link_target.h"
#include "tessera/core/printable.h"

namespace tessera {
namespace {

// Above every thread id: Linux gives out at most 2^22 of them.
constexpr TrackId kFirstTrack = TrackId{1} << 30;

TrackId this_thread() {
  static thread_local const TrackId id = ::gettid();
  return id;
}

// Names come from models: whatever bytes they hold, the trace stays valid JSON.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// The format counts in microseconds; the thousandths keep our nanoseconds exact.
std::string microseconds(std::int64_t ns) {
  const bool negative = ns < 0;
  const auto magnitude =
      negative ? std::uint64_t{0} - static_cast<std::uint64_t>(ns) : static_cast<std::uint64_t>(ns);
  const std::string thousandths = std::to_string(magnitude % 1000);
  return detail::concat(negative ? "-" : "", magnitude / 1000, ".",
                        std::string(3 - thousandths.size(), '0'), thousandths);
}

std::string metadata(const char* what, int rank, TrackId track, std::string_view name) {
  return detail::concat(R"({"ph":"M","name":")", what, R"(","pid":)", rank, R"(,"tid":)", track,
                        R"(,"args":{"name":)", json_string(name), "}}");
}

}  // namespace

Spans::Spans(const Clock& clock, std::size_t num_spans)
    : clock_(clock),
      num_slots_(num_spans),
      slots_(num_spans == 0 ? nullptr : std::make_unique<Slot[]>(num_spans)),
      is_watched_(num_spans != 0) {}

LabelId Spans::intern(std::string_view label) {
  if (label.empty()) {
    return 0;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = label_ids_.find(label);
  if (found != label_ids_.end()) {
    return found->second;
  }
  const auto id = static_cast<LabelId>(labels_.size());
  labels_.emplace_back(label);
  label_ids_.emplace(label, id);
  return id;
}

std::string Spans::label(LabelId id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return labels_.at(id);
}

void Spans::name_this_thread(std::string name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  thread_names_[this_thread()] = std::move(name);
}

TrackId Spans::add_track(std::string_view name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(track_names_.begin(), track_names_.end(), name);
  const auto index = found - track_names_.begin();
  if (found == track_names_.end()) {
    track_names_.emplace_back(name);
  }
  return kFirstTrack + index;
}

void Spans::set_hook(const SpanHook* hook) {
  hook_.store(hook, std::memory_order_release);
  is_watched_.store(enabled() || hook != nullptr, std::memory_order_relaxed);
}

void Spans::record(const char* name, std::int64_t start_ns, std::int64_t end_ns,
                   const SpanArgs& args) {
  if (enabled()) {
    record_on(this_thread(), name, start_ns, end_ns, args);
  }
}

// Why no fence is needed: fields are stored with release and loaded with acquire. A reader that
// sees a field of a later writer therefore also sees that writer's odd stamp, or a later one.
void Spans::record_on(TrackId track, const char* name, std::int64_t start_ns, std::int64_t end_ns,
                      const SpanArgs& args) {
  if (!enabled()) {
    return;
  }
  const std::uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[ticket % num_slots_];
  const std::uint64_t done = 2 * (ticket + 1);
  std::uint64_t seen = slot.stamp.load(std::memory_order_relaxed);
  if (seen % 2 != 0 || seen > done ||
      !slot.stamp.compare_exchange_strong(seen, done - 1, std::memory_order_acq_rel,
                                          std::memory_order_relaxed)) {
    return;
  }
  slot.name.store(name, std::memory_order_release);
  slot.start_ns.store(start_ns, std::memory_order_release);
  slot.end_ns.store(end_ns, std::memory_order_release);
  slot.track.store(track, std::memory_order_release);
  slot.bytes.store(args.bytes, std::memory_order_release);
  slot.sequence.store(args.sequence, std::memory_order_release);
  slot.labels.store((static_cast<std::uint64_t>(args.unit) << 32) | args.parameter,
                    std::memory_order_release);
  slot.stamp.store(done, std::memory_order_release);
}

std::vector<Span> Spans::snapshot() const {
  std::vector<std::pair<std::uint64_t, Span>> found;
  for (std::size_t i = 0; i < num_slots_; ++i) {
    const Slot& slot = slots_[i];
    const std::uint64_t before = slot.stamp.load(std::memory_order_acquire);
    if (before == 0 || before % 2 != 0) {
      continue;
    }
    Span span;
    span.name = slot.name.load(std::memory_order_acquire);
    span.start_ns = slot.start_ns.load(std::memory_order_acquire);
    span.end_ns = slot.end_ns.load(std::memory_order_acquire);
    span.track = slot.track.load(std::memory_order_acquire);
    span.args.bytes = slot.bytes.load(std::memory_order_acquire);
    span.args.sequence = slot.sequence.load(std::memory_order_acquire);
    const std::uint64_t labels = slot.labels.load(std::memory_order_acquire);
    span.args.unit = static_cast<LabelId>(labels >> 32);
    span.args.parameter = static_cast<LabelId>(labels);
    if (slot.stamp.load(std::memory_order_relaxed) == before) {
      found.emplace_back(before, span);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Span> spans;
  spans.reserve(found.size());
  for (const auto& [stamp, span] : found) {
    spans.push_back(span);
  }
  return spans;
}

std::string Spans::chrome_trace(int rank) const {
  // Counted before the snapshot: what is recorded meanwhile is neither shown nor called lost.
  const std::uint64_t recorded = num_recorded();
  const std::vector<Span> spans = snapshot();
  const std::uint64_t lost = recorded > spans.size() ? recorded - spans.size() : 0;

  const std::lock_guard<std::mutex> lock(mutex_);
  std::string process = detail::concat("rank ", rank);
  if (lost != 0) {
    process += detail::concat(" (", lost, " older spans lost)");
  }
  std::string text = R"({"displayTimeUnit":"ns","otherData":{"spans_lost":)" +
                     std::to_string(lost) + "},\n\"traceEvents\":[\n" +
                     metadata("process_name", rank, 0, process);
  for (const auto& [thread, name] : thread_names_) {
    text += ",\n" + metadata("thread_name", rank, thread, name);
  }
  for (std::size_t i = 0; i < track_names_.size(); ++i) {
    text += ",\n" +
            metadata("thread_name", rank, kFirstTrack + static_cast<TrackId>(i), track_names_[i]);
  }
  for (const Span& span : spans) {
    std::string args;
    const auto add = [&args](std::string_view key, const std::string& value) {
      args.append(args.empty() ? "\"" : ",\"").append(key).append("\":").append(value);
    };
    if (span.args.unit != 0) {
      add("unit", json_string(labels_.at(span.args.unit)));
    }
    if (span.args.parameter != 0) {
      add("parameter", json_string(labels_.at(span.args.parameter)));
    }
    if (span.args.bytes >= 0) {
      add("bytes", std::to_string(span.args.bytes));
    }
    if (span.args.sequence >= 0) {
      add("sequence", std::to_string(span.args.sequence));
    }
    text += detail::concat(",\n{\"ph\":\"X\",\"name\":", json_string(span.name), ",\"pid\":", rank,
                           ",\"tid\":", span.track, ",\"ts\":", microseconds(span.start_ns),
                           ",\"dur\":", microseconds(span.end_ns - span.start_ns), ",\"args\":{",
                           args, "}}");
  }
  return text + "\n]}\n";
}

void Spans::write_chrome_trace(const std::string& named, int rank) const {
  const std::string path = link_target(named);
  const std::string text = chrome_trace(rank);
  const std::string beside = detail::concat(path, ".", ::getpid(), ".tmp");
  const auto fail = [&](const char* what) {
    const int error = errno;
    std::remove(beside.c_str());
    throw IoError(detail::concat("trace ", in_quotes(path), ": ", what, ": ",
                                 std::strerror(error != 0 ? error : EIO)));
  };
  errno = 0;
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  if (!file) {
    fail("cannot be created");
  }
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file) {
    fail("cannot be written");
  }
  if (std::rename(beside.c_str(), path.c_str()) != 0) {
    fail("cannot be renamed into place");
  }
}

}  // namespace tessera
