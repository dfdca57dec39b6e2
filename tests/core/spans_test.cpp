#include "tessera/core/spans.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "testing/manual_clock.h"

namespace tessera {
namespace {

using nlohmann::json;

json read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

TEST(Spans, AScopeRecordsTheTimeBetweenItsEnds) {
  ManualClock clock;
  Spans spans(clock, 8);
  const LabelId unit = spans.intern("h.0");
  EXPECT_EQ(spans.intern("h.0"), unit);
  EXPECT_NE(spans.intern("h.1"), unit);
  EXPECT_EQ(spans.intern(""), 0U);
  clock.advance_ns(100);
  {
    SpanArgs args;
    args.bytes = 4096;
    args.sequence = 7;
    args.unit = unit;
    const SpanScope scope(spans, "gather", args);
    clock.advance_ns(50);
  }
  const auto all = spans.snapshot();
  ASSERT_EQ(all.size(), 1U);
  EXPECT_STREQ(all[0].name, "gather");
  EXPECT_EQ(all[0].start_ns, 100);
  EXPECT_EQ(all[0].end_ns, 150);
  EXPECT_EQ(all[0].args.bytes, 4096);
  EXPECT_EQ(all[0].args.sequence, 7);
  EXPECT_EQ(all[0].args.unit, unit);
  EXPECT_EQ(all[0].args.parameter, 0U);
  EXPECT_EQ(all[0].track, ::gettid());
}

TEST(Spans, TheRingKeepsTheLatestAndCountsWhatIsLost) {
  ManualClock clock;
  Spans spans(clock, 4);
  for (int i = 0; i < 10; ++i) {
    spans.record("x", i, i + 1);
  }
  const auto all = spans.snapshot();
  ASSERT_EQ(all.size(), 4U);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(all[static_cast<std::size_t>(i)].start_ns, 6 + i);
  }
  EXPECT_EQ(spans.num_recorded(), 10U);
}

// A clock that would tell if it were asked.
class ForbiddenClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    ADD_FAILURE() << "the clock was read although tracing is off";
    return 0;
  }
};

// What a tool outside would hear, as words.
std::vector<std::string> heard;  // NOLINT: the hook is a plain function, as a tool's is

constexpr SpanHook kHearing{
    [](const Spans& spans, const char* name, const SpanArgs& args) {
      heard.push_back(std::string("begin ") + name + " " + spans.label(args.unit));
    },
    [] { heard.emplace_back("end"); },
};

TEST(Spans, AHookHearsOfScopesAsTheyNest) {
  ManualClock clock;
  Spans spans(clock, 4);
  heard.clear();
  { const SpanScope before(spans, "before the hook"); }
  spans.set_hook(&kHearing);
  {
    const SpanScope outer(spans, "step");
    const SpanScope inner(spans, "forward", {.unit = spans.intern("h.0")});
  }
  spans.set_hook(nullptr);
  { const SpanScope after(spans, "after the hook"); }
  EXPECT_EQ(heard, (std::vector<std::string>{"begin step ", "begin forward h.0", "end", "end"}));
  EXPECT_EQ(spans.num_recorded(), 4U);
}

TEST(Spans, WhenOffNothingIsReadOrKeptAndAHookHearsOfScopesAllTheSame) {
  const ForbiddenClock clock;
  Spans spans(clock, 0);
  EXPECT_FALSE(spans.enabled());
  { const SpanScope scope(spans, "gather"); }
  spans.record("x", 0, 1);
  EXPECT_TRUE(spans.snapshot().empty());
  heard.clear();
  spans.set_hook(&kHearing);
  EXPECT_TRUE(spans.is_watched());
  { const SpanScope scope(spans, "gather"); }
  EXPECT_EQ(heard, (std::vector<std::string>{"begin gather ", "end"}));
  EXPECT_EQ(spans.num_recorded(), 0U);
  spans.set_hook(nullptr);
  EXPECT_FALSE(spans.is_watched());
}

TEST(Spans, AScopeEndsWithTheHookThatItBeganWith) {
  ManualClock clock;
  Spans spans(clock, 4);
  heard.clear();
  {
    const SpanScope unheard(spans, "began before");
    spans.set_hook(&kHearing);
  }
  EXPECT_TRUE(heard.empty()) << "an end without a begin would close somebody else's range";
  {
    const SpanScope begun(spans, "step");
    spans.set_hook(nullptr);
  }
  EXPECT_EQ(heard, (std::vector<std::string>{"begin step ", "end"}));
}

// Each span carries one number in four places; a torn one would not match itself.
TEST(Spans, ASnapshotUnderManyWritersHoldsOnlyWholeSpans) {
  ManualClock clock;
  Spans spans(clock, 16);
  constexpr int kWriters = 4;
  constexpr std::int64_t kEach = 20000;
  std::atomic<int> running{kWriters};
  std::vector<std::thread> writers;
  for (std::int64_t w = 0; w < kWriters; ++w) {
    writers.emplace_back([&spans, &running, w] {
      for (std::int64_t i = 0; i < kEach; ++i) {
        const std::int64_t value = w * kEach + i;
        SpanArgs args;
        args.bytes = value;
        args.sequence = value;
        spans.record("x", value, value, args);
      }
      --running;
    });
  }
  const auto expect_whole = [&spans] {
    const auto all = spans.snapshot();
    for (const Span& span : all) {
      EXPECT_EQ(span.start_ns, span.end_ns);
      EXPECT_EQ(span.start_ns, span.args.bytes);
      EXPECT_EQ(span.start_ns, span.args.sequence);
    }
    return all.size();
  };
  while (running.load() != 0) {
    expect_whole();
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  EXPECT_GT(expect_whole(), 0U);
  EXPECT_EQ(spans.num_recorded(), static_cast<std::uint64_t>(kWriters * kEach));
}

TEST(ChromeTrace, IsValidJsonWithRankThreadsNamesAndExactTimes) {
  ManualClock clock;
  Spans spans(clock, 4);
  spans.name_this_thread("step \"main\"");
  SpanArgs args;
  args.bytes = 64;
  args.unit = spans.intern("h.0");
  args.parameter = spans.intern("bad \xff\n name");
  for (int i = 0; i < 6; ++i) {
    spans.record("gather", 1234567 + i, 1236567 + i, args);
  }
  const std::string path = testing::TempDir() + "spans_test_trace.json";
  spans.write_chrome_trace(path, 3);
  const json trace = read_json(path);
  std::remove(path.c_str());

  EXPECT_EQ(trace["otherData"]["spans_lost"], 2);
  const json& events = trace["traceEvents"];
  ASSERT_EQ(events.size(), 6U);
  EXPECT_EQ(events[0]["name"], "process_name");
  EXPECT_EQ(events[0]["args"]["name"], "rank 3 (2 older spans lost)");
  EXPECT_EQ(events[1]["name"], "thread_name");
  EXPECT_EQ(events[1]["args"]["name"], "step \"main\"");
  const json& span = events[2];
  EXPECT_EQ(span["ph"], "X");
  EXPECT_EQ(span["name"], "gather");
  EXPECT_EQ(span["pid"], 3);
  EXPECT_EQ(span["tid"], events[1]["tid"]);
  EXPECT_DOUBLE_EQ(span["ts"].get<double>(), 1234.569);
  EXPECT_DOUBLE_EQ(span["dur"].get<double>(), 2.0);
  EXPECT_EQ(span["args"]["bytes"], 64);
  EXPECT_EQ(span["args"]["unit"], "h.0");
  EXPECT_EQ(span["args"].count("sequence"), 0U);
}

TEST(ChromeTrace, NamesTracksBesideThreads) {
  ManualClock clock;
  Spans spans(clock, 4);
  spans.name_this_thread("main");
  const TrackId compute = spans.add_track("gpu compute");
  const TrackId read = spans.add_track("gpu read");
  EXPECT_EQ(spans.add_track("gpu compute"), compute) << "made once";
  spans.record("launch", 0, 1000);
  spans.record_on(read, "H2D", 500, 1500);
  spans.record_on(compute, "forward", 700, 2700);
  const std::string path = testing::TempDir() + "spans_test_tracks.json";
  spans.write_chrome_trace(path, 0);
  const json trace = read_json(path);
  std::remove(path.c_str());

  std::map<std::string, json> named;     // track by its name
  std::map<std::string, json> lying_on;  // track by the name of the span on it
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") {
      named[event["args"]["name"]] = event["tid"];
    } else if (event["ph"] == "X") {
      lying_on[event["name"]] = event["tid"];
    }
  }
  ASSERT_EQ(named.size(), 3U);
  EXPECT_EQ(lying_on["launch"], named["main"]);
  EXPECT_EQ(lying_on["H2D"], named["gpu read"]);
  EXPECT_EQ(lying_on["forward"], named["gpu compute"]);
  EXPECT_NE(named["gpu read"], named["gpu compute"]);
  EXPECT_NE(named["gpu read"], named["main"]);
}

TEST(ChromeTrace, APathThatCannotBeWrittenIsAnIoErrorAndLeavesNothing) {
  ManualClock clock;
  const Spans spans(clock, 4);
  const std::string folder = testing::TempDir() + "spans_test_folder";
  EXPECT_THROW(spans.write_chrome_trace(folder + "/missing/trace.json", 0), IoError);
  // Writing beside works, renaming onto a folder does not: the file beside must go again.
  std::filesystem::create_directories(folder + "/target/inside");
  EXPECT_THROW(spans.write_chrome_trace(folder + "/target", 0), IoError);
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++entries;
  }
  EXPECT_EQ(entries, 1);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
