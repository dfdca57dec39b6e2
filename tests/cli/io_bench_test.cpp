#include "cli/io_bench.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/fio.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

using tier::IoMix;

bool has_item(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

// A program that stands for fio: it answers --version, and runs `body` for everything else.
std::string fake_fio(const testing::TemporaryDirectory& directory, const std::string& body) {
  const std::filesystem::path path = directory.path() / "fio";
  std::ofstream(path) << "#!/bin/sh\nif [ \"$1\" = --version ]; then echo fio-9.9; exit 0; fi\n"
                      << body << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path.string();
}

IoBenchOptions quick(const testing::TemporaryDirectory& directory) {
  IoBenchOptions options;
  options.directory = directory.path().string();
  options.kind = tier::IoKind::kThreads;
  options.seconds = 0.003;
  options.file_bytes = std::uint64_t{16} << 20;
  options.num_rounds = 3;
  options.measure_seconds = 0.01;
  return options;
}

std::vector<IoBenchRow> measure_disk(const IoBenchOptions& options, const std::optional<Fio>& fio,
                                     IoBenchRun* run = nullptr) {
  return measure_io(
      options, fio, [](const std::string&) {},
      [run](const IoBenchRun& begun) {
        if (run != nullptr) {
          *run = begun;
        }
      },
      [](const IoBenchRow&) {});
}

TEST(ParseFio, AddsTheRatesOfAllJobs) {
  const tier::IoRates rates = parse_fio(
      "note: something\n{\"jobs\": [{\"read\": {\"bw_bytes\": 100}, \"write\": {\"bw_bytes\": 7}},"
      "{\"read\": {\"bw_bytes\": 50}, \"write\": {\"bw_bytes\": 0}}]}");
  EXPECT_EQ(rates.read_bytes_per_s, 150);
  EXPECT_EQ(rates.write_bytes_per_s, 7);
}

TEST(ParseFio, RefusesWhatFioDoesNotPrint) {
  for (const char* const text :
       {"", "no json", "{", "[]", "{}", "{\"jobs\": []}", "{\"jobs\": 5}", "{\"jobs\": [5]}",
        "{\"jobs\": [{\"read\": {\"bw_bytes\": 1}}]}",
        "{\"jobs\": [{\"read\": {\"bw_bytes\": \"1\"}, \"write\": {\"bw_bytes\": 1}}]}",
        "{\"jobs\": [{\"read\": {\"bw_bytes\": -1}, \"write\": {\"bw_bytes\": 1}}]}"}) {
    SCOPED_TRACE(text);
    EXPECT_THROW(parse_fio(text), IoError);
  }
}

TEST(FioArguments, AreThoseOfTheEngine) {
  const auto file = tier::open_io_file("/dev/null", 0, tier::DirectIo::kOff);
  FioJob job;
  job.file = file.get();
  job.file_bytes = 64 << 20;
  job.options = {tier::IoKind::kUring, 1 << 20, 16, 1};
  job.mix = IoMix::kMixed;
  job.seconds = 0.5;
  const auto ring = fio_arguments(job, "some/file");
  for (const char* const argument :
       {"--filename=some/file", "--size=67108864", "--numjobs=1", "--ioengine=io_uring",
        "--iodepth=16", "--bs=1048576", "--direct=0", "--rw=rw", "--rwmixread=50",
        "--runtime=500ms"}) {
    EXPECT_TRUE(has_item(ring, argument)) << argument;
  }
  job.options = {tier::IoKind::kThreads, 1 << 20, 1, 8};
  job.mix = IoMix::kWrite;
  const auto threads = fio_arguments(job, "some/file");
  for (const char* const argument : {"--size=8388608", "--offset_increment=8388608", "--numjobs=8",
                                     "--ioengine=psync", "--iodepth=1", "--rw=write"}) {
    EXPECT_TRUE(has_item(threads, argument)) << argument;
  }
}

TEST(Fio, GetsTheFileOpenAndItsFailureIsTold) {
  const testing::TemporaryDirectory directory;
  const std::string path = (directory.path() / "data").string();
  std::ofstream(path) << "what is in the file";
  const auto file = tier::open_io_file(path, 0, tier::DirectIo::kOff);
  std::filesystem::remove(path);
  EXPECT_FALSE(Fio::find((directory.path() / "fio").string()).has_value()) << "there is none yet";
  const auto fio = Fio::find(fake_fio(directory, "cat /proc/self/fd/9 >&2; exit 3"));
  ASSERT_TRUE(fio.has_value());
  EXPECT_EQ(fio->version(), "fio-9.9");
  try {
    fio->run({file.get(), 1 << 20, {tier::IoKind::kThreads, 4096, 1, 1}, IoMix::kRead, 1});
    FAIL() << "expected IoError";
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "fio-9.9 failed: \"what is in the file\"");
  }
}

TEST(IoBench, MeasuresEveryLoadAndLeavesOnlyWhatWasMeasured) {
  const testing::TemporaryDirectory directory;
  IoBenchRun run;
  const auto rows = measure_disk(quick(directory), std::nullopt, &run);
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_GT(rows[0].ours.read_bytes_per_s, 0);
  EXPECT_EQ(rows[0].ours.write_bytes_per_s, 0);
  EXPECT_EQ(rows[1].ours.read_bytes_per_s, 0);
  EXPECT_GT(rows[1].ours.write_bytes_per_s, 0);
  EXPECT_GT(rows[2].ours.read_bytes_per_s, 0);
  EXPECT_GT(rows[2].ours.write_bytes_per_s, 0);
  EXPECT_FALSE(rows[0].ratio().has_value());
  EXPECT_EQ(run.engine, "threads");
  EXPECT_EQ(run.file_bytes, std::uint64_t{16} << 20);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    names.push_back(entry.path().filename().string());
  }
  EXPECT_EQ(names, std::vector<std::string>{tier::kMeasuredFileName});
}

TEST(IoBench, ComparesWithTheMedianOfFiosRounds) {
  const testing::TemporaryDirectory directory;
  const testing::TemporaryDirectory programs;
  // Three rounds of each load: 1000, 2000, 3000 bytes per second, and again from the start.
  const std::string count = (programs.path() / "count").string();
  const auto fio = Fio::find(
      fake_fio(programs, "n=$(cat " + count +
                             " 2>/dev/null || echo 0); n=$(( n % 3 + 1 )); echo $n >" + count +
                             "; echo '{\"jobs\": [{\"read\": {\"bw_bytes\": '${n}000'}, \"write\": "
                             "{\"bw_bytes\": 0}}]}'"));
  const auto rows = measure_disk(quick(directory), fio);
  for (const IoBenchRow& row : rows) {
    EXPECT_EQ(row.fio->read_bytes_per_s, 2000);
    ASSERT_TRUE(row.ratio().has_value());
    EXPECT_EQ(*row.ratio(), (row.ours.read_bytes_per_s + row.ours.write_bytes_per_s) / 2000);
  }
}

TEST(IoBench, AFioThatFailsTakesOurRatesNotWithIt) {
  const testing::TemporaryDirectory directory;
  const testing::TemporaryDirectory programs;
  const auto fio = Fio::find(fake_fio(programs, "echo engine io_uring not loadable >&2; exit 1"));
  std::vector<std::string> notices;
  const auto rows = measure_io(
      quick(directory), fio, [&](const std::string& text) { notices.push_back(text); },
      [](const IoBenchRun&) {}, [](const IoBenchRow&) {});
  ASSERT_EQ(rows.size(), 3U);
  for (const IoBenchRow& row : rows) {
    EXPECT_GT(row.ours.read_bytes_per_s + row.ours.write_bytes_per_s, 0);
    EXPECT_FALSE(row.fio.has_value());
  }
  ASSERT_EQ(notices.size(), 1U);
  EXPECT_HAS(notices[0], "our rates stand alone: fio-9.9 failed: \"engine io_uring");
}

TEST(IoBench, RefusesAFileThatFillsTheDiskAndADirectoryThatIsNone) {
  const testing::TemporaryDirectory directory;
  IoBenchOptions options = quick(directory);
  options.file_bytes = std::uint64_t{1} << 60;
  EXPECT_THROW(measure_disk(options, std::nullopt), ConfigError);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  options.directory += "/none";
  EXPECT_THROW(measure_disk(options, std::nullopt), ConfigError);
}

TEST(IoBenchReport, SaysWhatWasMeasuredAndTheRatio) {
  IoBenchRun run{"some/dir", "uring",   {tier::IoKind::kUring, 1 << 20, 16, 1}, true, 1 << 30,
                 5,          "fio-3.33"};
  const IoBenchRow row{IoMix::kMixed, {1.5e9, 1.5e9}, tier::IoRates{2e9, 2e9}};
  EXPECT_HAS(io_bench_head(run),
             "uring on some/dir: requests of 1.00 MiB, 16 in flight, "
             "direct, a file of 1.00 GiB; medians of 5 rounds\n");
  EXPECT_LACKS(io_bench_head(run), "not installed");
  EXPECT_EQ(io_bench_line(row), "mixed       3.000 GB/s    4.000 GB/s      0.75\n");
  const std::string json = io_bench_json(run, std::vector<IoBenchRow>{row});
  EXPECT_HAS(json, "\"ratio\": 0.75");
  run.fio_version.clear();
  EXPECT_HAS(io_bench_head(run), "fio is not installed");
  EXPECT_HAS(io_bench_json(run, {}), "\"fio_version\": null");
  EXPECT_EQ(io_bench_line({IoMix::kRead, {1e9, 0}, std::nullopt}),
            "read        1.000 GB/s             -         -\n");
}

}  // namespace
}  // namespace tessera::cli
