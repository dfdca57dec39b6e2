// Files that watch a run: what is in them, and that losing them is a warning and not an error.
#include "cli/observers.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/device_peak.h"
#include "cli/output_file.h"
#include "tessera/core/error.h"
#include "testing/manual_clock.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

std::string some_bytes(std::size_t count, char first, int rise) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) {
    bytes += static_cast<char>(first + rise * static_cast<int>(i));
  }
  return bytes;
}

// A disk that is full after so many bytes: what a file may grow to, by the kernel.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    set(bytes);
  }
  ~FileSizeLimit() {
    set(before_.rlim_cur);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

  void lift() { set(before_.rlim_cur); }

 private:
  void set(rlim_t bytes) {
    const rlimit limit{bytes, before_.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }

  rlimit before_{};
  void (*handler_)(int);
};

class Warnings {
 public:
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& text) { texts.push_back(text); };
  }
  std::vector<std::string> texts;
};

TEST(RecordFile, HoldsWholeRecordsOnlyAndGoesOnWhenThereIsRoomAgain) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() / "file";
  Warnings warnings;
  RecordFile file({"--metrics", path, 0, warnings.sink()});
  ASSERT_TRUE(file.append("first\n"));
  {
    FileSizeLimit full(10);
    EXPECT_FALSE(file.append("second\n"));  // four bytes of it fit
    EXPECT_EQ(read_whole(path), "first\n");
    EXPECT_FALSE(file.append("third\n"));
    full.lift();
    EXPECT_TRUE(file.append("fourth\n"));
  }
  EXPECT_EQ(read_whole(path), "first\nfourth\n");
  ASSERT_EQ(warnings.texts.size(), 1U);
  for (const std::string& part :
       {std::string("--metrics"), path, std::string("training goes on")}) {
    EXPECT_HAS(warnings.texts[0], part);
  }
}

TEST(RecordFile, AReaderThatIsGoneIsAWarningAndNoSignal) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  Warnings warnings;
  RecordFile file({"--metrics", path, 0, warnings.sink()});
  EXPECT_TRUE(file.append("first\n"));
  ::close(reader);
  EXPECT_FALSE(file.append("second\n"));  // SIGPIPE would end this program
  EXPECT_EQ(warnings.texts.size(), 1U);
}

// A run that goes on behind step 2, from a checkpoint that is older than its last lines.
TEST(MetricsFile, KeepsTheStepsBeforeThoseOfARunThatGoesOn) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() / "run.jsonl";
  const std::string before = "{\"step\": 1}\nno step\n{\"step\": 2, \"loss\": null}\n";
  StepMetrics third;
  third.step = 3;
  const std::string expected = before + metrics_json(third) + "\n";
  for (const std::string tail : {"", "{\"step\": 3}\n{\"step\": 4}\n", "{\"step\": 2", "{\"st"}) {
    SCOPED_TRACE(tail);
    std::ofstream(path, std::ios::binary) << before << tail;
    MetricsFile file(path, 2, {});
    EXPECT_EQ(read_whole(path), before);
    EXPECT_TRUE(file.append(third));
    EXPECT_EQ(read_whole(path), expected);
  }
  MetricsFile begun(path, 0, {});
  EXPECT_EQ(read_whole(path), "");
  std::filesystem::remove(path);
  MetricsFile created(path, 2, {});
  EXPECT_EQ(read_whole(path), "");
}

// What did not fit is cut off behind what was kept.
TEST(RecordFile, AFullDiskCostsNothingOfTheEarlierPart) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.path() / "file";
  std::ofstream(path, std::ios::binary) << "first\nsecond\n";
  RecordFile file({"--metrics", path, 6, {}});
  {
    const FileSizeLimit full(10);
    EXPECT_FALSE(file.append("third\n"));
  }
  EXPECT_EQ(read_whole(path), "first\n");
}

TEST(RecordFile, OneThatCannotBeOpenedIsAnError) {
  const testing::TemporaryDirectory directory;
  EXPECT_THROW(MetricsFile((directory.path() / "no" / "file").string(), 0, {}), IoError);
  std::ofstream(directory.path() / "file") << "x";
  EXPECT_THROW(TensorBoardFile((directory.path() / "file").string(), 0, {}), IoError);
  EXPECT_THROW(check_output_directory("--tensorboard", (directory.path() / "file" / "in").string()),
               ConfigError);
  EXPECT_NO_THROW(
      check_output_directory("--tensorboard", (directory.path() / "new" / "one").string()));
  EXPECT_FALSE(std::filesystem::exists(directory.path() / "new"));
}

// The vectors of RFC 3720, B.4, and the usual check value.
TEST(TensorBoard, ChecksumsAreThoseThatArePublished) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c(some_bytes(32, 0, 1)), 0x46dd794eU);
  EXPECT_EQ(crc32c(some_bytes(32, 31, -1)), 0x113fdb5cU);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

// A reader of event files that shares nothing with the writer: bit by bit where that has a table.
class EventReader {
 public:
  struct Event {
    double wall_time = 0;
    std::int64_t step = 0;
    std::string version;
    std::uint64_t status = 0;  // of the session
    std::map<std::string, float> scalars;
  };

  static std::vector<Event> read(std::string_view file) {
    std::vector<Event> events;
    while (!file.empty()) {
      EventReader frame(file);
      const auto length = frame.fixed<std::uint64_t>();
      EXPECT_EQ(frame.fixed<std::uint32_t>(), masked(file.substr(0, 8)));
      if (::testing::Test::HasFailure() || length > file.size() - 16) {
        ADD_FAILURE() << "a record of " << length << " bytes in " << file.size();
        return events;
      }
      const std::string_view bytes = file.substr(12, length);
      EventReader behind(file.substr(12 + length));
      EXPECT_EQ(behind.fixed<std::uint32_t>(), masked(bytes));
      events.push_back(EventReader(bytes).event());
      file.remove_prefix(16 + length);
    }
    return events;
  }

 private:
  explicit EventReader(std::string_view bytes) : bytes_(bytes) {}

  static std::uint32_t masked(std::string_view bytes) {
    std::uint32_t crc = 0xffffffffU;
    for (const char c : bytes) {
      for (int bit = 0; bit < 8; ++bit) {
        const std::uint32_t in = (static_cast<unsigned char>(c) >> bit) & 1U;
        crc = ((crc ^ in) & 1U) != 0 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
      }
    }
    crc = ~crc;
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
  }

  template <typename Value>
  Value fixed() {
    Value value{};
    EXPECT_LE(sizeof(value), bytes_.size());
    std::copy_n(bytes_.begin(), std::min(sizeof(value), bytes_.size()),
                reinterpret_cast<char*>(&value));
    bytes_.remove_prefix(std::min(sizeof(value), bytes_.size()));
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = fixed<std::uint8_t>();
      value |= std::uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) {
        break;
      }
    }
    return value;
  }
  std::string_view delimited() {
    const std::size_t length = varint();
    const std::string_view value = bytes_.substr(0, length);
    EXPECT_EQ(value.size(), length);
    bytes_.remove_prefix(value.size());
    return value;
  }

  Event event() {
    Event event;
    while (!bytes_.empty()) {
      switch (varint()) {
        case (1 << 3) | 1:
          event.wall_time = fixed<double>();
          break;
        case (2 << 3) | 0:
          event.step = static_cast<std::int64_t>(varint());
          break;
        case (3 << 3) | 2:
          event.version = delimited();
          break;
        case (5 << 3) | 2:
          EventReader(delimited()).summary(event);
          break;
        case (7 << 3) | 2:
          EventReader(delimited()).session(event);
          break;
        default:
          ADD_FAILURE() << "a field that an event does not have";
          return event;
      }
    }
    return event;
  }
  void session(Event& event) {
    ASSERT_EQ(varint(), (1U << 3) | 0U);
    event.status = varint();
    ASSERT_TRUE(bytes_.empty());
  }
  void summary(Event& event) {
    while (!bytes_.empty()) {
      ASSERT_EQ(varint(), (1U << 3) | 2U);
      EventReader value(delimited());
      ASSERT_EQ(value.varint(), (1U << 3) | 2U);
      const std::string tag(value.delimited());
      ASSERT_EQ(value.varint(), (2U << 3) | 5U);
      event.scalars[tag] = value.fixed<float>();
      ASSERT_TRUE(value.bytes_.empty());
    }
  }

  std::string_view bytes_;
};

TEST(TensorBoard, AFileHasTheVersionAndThenEveryStepWithItsScalars) {
  const testing::TemporaryDirectory directory;
  Warnings warnings;
  TensorBoardFile file((directory.path() / "new" / "runs").string(), 0, warnings.sink());
  StepMetrics metrics;
  metrics.step = 300;  // two bytes as a varint
  metrics.loss = 2.5;
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.lr = 1e-3;
  metrics.tokens_per_s = 1e6;
  metrics.held[static_cast<std::size_t>(Tier::kNvme)].now = std::int64_t{1} << 40;
  ASSERT_TRUE(file.append(metrics));
  metrics.step = 301;
  metrics.mfu = 0.5;
  ASSERT_TRUE(file.append(metrics));
  EXPECT_HAS(std::filesystem::path(file.path()).filename().string(), "tfevents");
  const std::vector<EventReader::Event> events = EventReader::read(read_whole(file.path()));
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.7e9);
  EXPECT_EQ(events[1].step, 300);
  EXPECT_EQ(events[2].step, 301);
  const auto& scalars = events[1].scalars;
  EXPECT_EQ(scalars.at("train/loss"), 2.5F);
  EXPECT_EQ(scalars.at("train/grad_norm"), std::numeric_limits<float>::infinity());
  EXPECT_EQ(scalars.at("train/lr"), 1e-3F);
  EXPECT_EQ(scalars.at("speed/tokens_per_s"), 1e6F);
  EXPECT_EQ(scalars.at("memory/nvme_bytes"), 0x1p40F);
  EXPECT_EQ(scalars.count("speed/mfu"), 0U);
  EXPECT_EQ(events[2].scalars.at("speed/mfu"), 0.5F);
  EXPECT_TRUE(warnings.texts.empty());
}

TEST(TensorBoard, ARunThatGoesOnTakesThePlaceOfTheStepsBehindItsBegin) {
  const testing::TemporaryDirectory directory;
  TensorBoardFile file(directory.path().string(), 300, {});
  StepMetrics metrics;
  metrics.step = 301;
  ASSERT_TRUE(file.append(metrics));
  const std::vector<EventReader::Event> events = EventReader::read(read_whole(file.path()));
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_EQ(events[1].step, 301);
  EXPECT_EQ(events[1].status, 1U);
  EXPECT_EQ(events[2].step, 301);
}

TEST(TensorBoard, AFileThatWasFullAtFirstIsOneThatReadersTake) {
  const testing::TemporaryDirectory directory;
  Warnings warnings;
  FileSizeLimit full(8);
  TensorBoardFile file(directory.path().string(), 0, warnings.sink());
  EXPECT_FALSE(file.append(StepMetrics{}));
  full.lift();
  EXPECT_TRUE(file.append(StepMetrics{}));
  EXPECT_EQ(warnings.texts.size(), 1U);
  const std::vector<EventReader::Event> events = EventReader::read(read_whole(file.path()));
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_EQ(events[1].step, 1);
}

TEST(Observers, AWarningHasALineOfItsOwn) {
  const testing::TemporaryDirectory directory;
  const ManualClock clock;
  std::string screen;
  ObserverOptions options;
  options.progress.num_steps = 100;
  options.progress.terminal = true;
  options.progress.print = [&screen](std::string_view text) { screen += text; };
  options.metrics = directory.path() / "run.jsonl";
  options.warn = [&screen](const std::string& /*text*/) { screen += "WARNING\n"; };
  Observers observers(options, clock);
  StepMetrics metrics;
  observers.show(metrics);
  EXPECT_NE(screen.back(), '\n') << screen;
  const FileSizeLimit full(1);
  for (metrics.step = 2; metrics.step < 4; ++metrics.step) {
    observers.show(metrics);
  }
  EXPECT_HAS(screen, "\nWARNING\n");
  EXPECT_EQ(screen.find("WARNING"), screen.rfind("WARNING")) << screen;
}

TEST(DevicePeak, KnowsGpusByTheWordsOfTheirNames) {
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA H200)", DType::kBFloat16), 989.4e12);
  EXPECT_EQ(gpu_peak_flops("cuda:1 (NVIDIA H100 80GB HBM3)", DType::kFloat16), 989.4e12);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA H100 PCIe)", DType::kBFloat16), 756e12);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA A100-SXM4-80GB)", DType::kFloat32), 19.5e12);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA L40S)", DType::kBFloat16), 362e12);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA L4)", DType::kBFloat16), 121e12);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (Tesla V100-SXM2-16GB)", DType::kFloat16), 125e12);
}

TEST(DevicePeak, InventsNoNumber) {
  EXPECT_EQ(gpu_peak_flops("cpu", DType::kFloat32), std::nullopt);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA H20)", DType::kBFloat16), std::nullopt);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (NVIDIA GB200)", DType::kBFloat16), std::nullopt);
  EXPECT_EQ(gpu_peak_flops("cuda:0 (Tesla V100-SXM2-16GB)", DType::kBFloat16), std::nullopt);
  FlopRate rate;
  rate.flops_per_token = 100;
  EXPECT_TRUE(std::isnan(rate.mfu(10)));
  rate.peak_flops = 4000;
  EXPECT_EQ(rate.mfu(10), 0.25);
  StepMetrics metrics;
  EXPECT_TRUE(nlohmann::json::parse(metrics_json(metrics)).at("mfu").is_null());
}

}  // namespace
}  // namespace tessera::cli
