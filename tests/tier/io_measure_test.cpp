#include "tessera/tier/io_measure.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/support/temporary_directory.h"

namespace tessera::tier {
namespace {

namespace fs = std::filesystem;

// Small and short, on an engine that is everywhere.
MeasureOptions quick() {
  MeasureOptions options;
  options.kind = IoKind::kThreads;
  options.budget_s = 0.01;
  options.max_file_bytes = std::size_t{8} << 20;
  return options;
}

class MeasureDirectory : public ::testing::Test {
 protected:
  std::string directory() const { return directory_.path().string(); }
  fs::path kept_file() const { return directory_.path() / kMeasuredFileName; }
  std::string kept_text() const {
    std::ifstream in(kept_file());
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void keep(const std::string& text) { std::ofstream(kept_file()) << text; }
  // With one value of a believable file put in place of another.
  void keep_with(const std::string& name, const std::string& value) {
    const std::string text = kept_text();
    const std::size_t at = text.find("\"" + name + "\": ");
    ASSERT_NE(at, std::string::npos) << name << " in " << text;
    const std::size_t begin = at + name.size() + 4;
    keep(text.substr(0, begin) + value + text.substr(text.find_first_of(",\n", begin)));
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(directory_.path())) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(MeasureDirectory, GivesRatesAndTheOptionsThatGaveThem) {
  const DiskRates rates = measure_directory(directory(), quick());
  EXPECT_GT(rates.read_bytes_per_s, 0);
  EXPECT_GT(rates.write_bytes_per_s, 0);
  EXPECT_GT(rates.mixed_read_bytes_per_s, 0);
  EXPECT_GT(rates.mixed_write_bytes_per_s, 0);
  EXPECT_EQ(rates.engine, "threads");
  EXPECT_EQ(rates.best.kind, IoKind::kThreads);
  EXPECT_NO_THROW(make_io_engine(rates.best, nullptr));
}

TEST_F(MeasureDirectory, LeavesOneSmallFileOfItsOwner) {
  measure_directory(directory(), quick());
  EXPECT_EQ(names(), std::vector<std::string>{kMeasuredFileName});
  struct stat info {};
  ASSERT_EQ(::stat(kept_file().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  EXPECT_LT(info.st_size, 4096);
}

TEST_F(MeasureDirectory, ASecondTimeOnlyReads) {
  EXPECT_FALSE(read_measured(directory(), quick()).has_value());
  const DiskRates first = measure_directory(directory(), quick());
  keep_with("read_bytes_per_s", "12345.5");  // so that what was kept can be told from measured
  const DiskRates second = measure_directory(directory(), quick());
  EXPECT_EQ(second.read_bytes_per_s, 12345.5);
  EXPECT_EQ(second.write_bytes_per_s, first.write_bytes_per_s);
  EXPECT_EQ(second.best.block_bytes, first.best.block_bytes);
  EXPECT_EQ(second.best.num_threads, first.best.num_threads);
  EXPECT_EQ(read_measured(directory(), quick())->read_bytes_per_s, 12345.5);

  MeasureOptions anew = quick();
  anew.force = true;
  EXPECT_NE(measure_directory(directory(), anew).read_bytes_per_s, 12345.5);
  EXPECT_NE(read_measured(directory(), quick())->read_bytes_per_s, 12345.5);
}

TEST_F(MeasureDirectory, KeepsEachKindOfFileAndEngineApart) {
  MeasureOptions buffered = quick();
  buffered.direct = DirectIo::kOff;
  EXPECT_FALSE(measure_directory(directory(), buffered).is_direct);
  keep_with("read_bytes_per_s", "777.5");
  MeasureOptions direct = quick();
  direct.direct = DirectIo::kOn;
  try {
    EXPECT_TRUE(measure_directory(directory(), direct).is_direct);
  } catch (const ConfigError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(read_measured(directory(), buffered)->read_bytes_per_s, 777.5);
  EXPECT_NE(read_measured(directory(), direct)->read_bytes_per_s, 777.5);
}

TEST_F(MeasureDirectory, WhatCannotBeBelievedIsMeasuredAgain) {
  measure_directory(directory(), quick());
  const std::string good = kept_text();
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"version", "2"},
      {"version", "\"1\""},
      {"device", "1"},
      {"device", "-1"},
      {"engine", "\"abacus\""},
      {"direct", "null"},
      {"block_bytes", "0"},
      {"block_bytes", "5000"},
      {"block_bytes", "1152921504606846976"},
      {"queue_depth", "0"},
      {"queue_depth", "1.5"},
      {"threads", "100000"},
      {"threads", "-3"},
      {"read_bytes_per_s", "-1.0"},
      {"write_bytes_per_s", "1e300"},
      {"mixed_read_bytes_per_s", "\"fast\""},
      {"mixed_write_bytes_per_s", "0"},
  };
  for (const auto& [name, value] : wrong) {
    SCOPED_TRACE(name + " = " + value);
    keep(good);
    ASSERT_TRUE(read_measured(directory(), quick()).has_value());
    keep_with(name, value);
    EXPECT_FALSE(read_measured(directory(), quick()).has_value());
  }
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"),
        std::string("{\"version\":1,\"entries\":{}}"),
        std::string("{\"version\":1,\"entries\":[7]}"), good.substr(0, good.size() / 2),
        std::string(60000, '['), std::string(1 << 20, ' ') + good}) {
    SCOPED_TRACE(text.substr(0, 40));
    keep(text);
    EXPECT_FALSE(read_measured(directory(), quick()).has_value());
  }
  EXPECT_GT(measure_directory(directory(), quick()).read_bytes_per_s, 0);
  EXPECT_TRUE(read_measured(directory(), quick()).has_value());
}

TEST_F(MeasureDirectory, ALinkInPlaceOfItsFileIsNotFollowed) {
  measure_directory(directory(), quick());
  const testing::TemporaryDirectory elsewhere;
  const fs::path target = elsewhere.path() / "other";
  fs::rename(kept_file(), target);
  fs::create_symlink(target, kept_file());
  const auto before = fs::last_write_time(target);
  EXPECT_FALSE(read_measured(directory(), quick()).has_value());
  measure_directory(directory(), quick());
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(kept_file())));
  EXPECT_EQ(fs::last_write_time(target), before);
}

TEST_F(MeasureDirectory, AResultThatCannotBeKeptIsStillAResult) {
  fs::create_directory(kept_file());
  fs::create_directory(kept_file() / "full");  // so that nothing can take its place
  std::vector<std::string> notices;
  MeasureOptions options = quick();
  options.notice = [&notices](const std::string& text) { notices.push_back(text); };
  EXPECT_GT(measure_directory(directory(), options).read_bytes_per_s, 0);
  ASSERT_EQ(notices.size(), 1U);
  EXPECT_NE(notices[0].find("could not be kept"), std::string::npos);
  EXPECT_EQ(names().size(), 1U);
}

std::string failure_of(const std::string& directory) {
  try {
    measure_directory(directory, quick());
  } catch (const IoError& error) {
    return error.what();
  }
  return "no failure";
}

TEST_F(MeasureDirectory, SaysWhyADirectoryCannotBeUsed) {
  const std::string none = directory() + "/none";
  EXPECT_EQ(failure_of(none), "the directory " + none +
                                  " cannot be used: No such file or directory (2); create it, or "
                                  "name another");
  keep("");
  EXPECT_NE(failure_of(kept_file().string()).find(" is no directory; "), std::string::npos);
  // Nobody writes there, not even root.
  EXPECT_NE(failure_of("/proc").find("the directory /proc cannot be written to: "),
            std::string::npos);
}

TEST_F(MeasureDirectory, AssumesTheRatesOfADiskWithoutRoomForAMeasurementAndSaysSo) {
  MeasureOptions options = quick();
  options.max_file_bytes = 4096;
  const DiskRates rates = measure_directory(directory(), options);
  EXPECT_GT(rates.read_bytes_per_s, 0);
  EXPECT_GT(rates.mixed_write_bytes_per_s, 0);
  EXPECT_NE(rates.assumed.find("500 MB/s are assumed"), std::string::npos) << rates.assumed;
  EXPECT_TRUE(names().empty()) << "what was not measured must not be kept";
}

TEST_F(MeasureDirectory, RefusesTooSmallAFileWhereRatesAreTheResult) {
  MeasureOptions options = quick();
  options.max_file_bytes = 4096;
  options.needs_rates = true;
  EXPECT_THROW(measure_directory(directory(), options), IoError);
  EXPECT_TRUE(names().empty());
}

TEST(PartOfADisk, IsWhatAllProcessesTogetherQueue) {
  IoOptions best;
  best.block_bytes = 1 << 20;
  best.num_threads = 4;
  best.queue_depth = 32;
  const auto part = [&](int num_processes) {
    const IoOptions found = part_of(best, num_processes);
    EXPECT_EQ(found.block_bytes, best.block_bytes);
    EXPECT_EQ(found.kind, best.kind);
    return std::pair(found.num_threads, found.queue_depth);
  };
  EXPECT_EQ(part(1), std::pair(4, 32));
  EXPECT_EQ(part(2), std::pair(2, 32));
  EXPECT_EQ(part(3), std::pair(1, 43));
  EXPECT_EQ(part(8), std::pair(1, 16));
  EXPECT_EQ(part(1000), std::pair(1, 1));
}

}  // namespace
}  // namespace tessera::tier
