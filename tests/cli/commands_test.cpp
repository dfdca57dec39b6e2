// What the commands print and do when all is well.
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

std::string read_file(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

ProcessOptions in_directory(const TemporaryDirectory& directory) {
  ProcessOptions options;
  options.directory = directory.path();
  return options;
}

TEST(Help, IsThereOnEveryLevelWithExamples) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{},
                                             {"inspect"},
                                             {"doctor"},
                                             {"bench-comm"},
                                             {"bench-io"},
                                             {"plot"},
                                             {"options"},
                                             {"config"},
                                             {"version"}}) {
    SCOPED_TRACE(::testing::PrintToString(command));
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--help");
    const ProcessResult result = run_tessera(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_HAS(result.out, "Examples:\n  tessera ");
    if (!command.empty()) {
      EXPECT_HAS(result.out, "Usage: tessera " + command.front());
    }
  }
}

TEST(Version, IsTheSameAsCommandAndFlag) {
  const ProcessResult command = run_tessera({"version"});
  EXPECT_EQ(command.exit_code, 0);
  EXPECT_EQ(command.out.rfind("tessera ", 0), 0U);
  EXPECT_EQ(run_tessera({"--version"}).out, command.out);
}

TEST(Output, ThatCannotBeWrittenIsAFailure) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "there is no /dev/full";
  }
  const ProcessResult result =
      run_process({"/bin/sh", "-c", std::string(TESSERA_BINARY) + " options > /dev/full"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
}

TEST(Options, MarkdownIsTheCommittedFile) {
  const ProcessResult result = run_tessera({"options", "--markdown"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, read_file(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/options.md"))
      << "run: tessera options --markdown > docs/options.md";
}

TEST(Options, AreListedWithDefaults) {
  const ProcessResult result = run_tessera({"options"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_HAS(result.out, "comm.timeout_s");
  EXPECT_HAS(result.out, "600");
}

TEST(ConfigCommand, PrintsWhatAFileGives) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "run.json") << R"({"comm": {"timeout_s": 30}, "seed": 7})";
  const ProcessResult result =
      run_tessera({"config", "run.json", "--set", "seed=8", "--set", "precision=bf16"},
                  in_directory(directory));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "comm.timeout_s = 30");
  EXPECT_HAS(result.out, "seed = 8");
  EXPECT_HAS(result.out, "precision = bf16");
}

TEST(ConfigCommand, PrintsConversionsOfDeepSpeedsKeys) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "ds.json")
      << R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}})";
  const ProcessResult result = run_tessera({"config", "ds.json"}, in_directory(directory));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "note: ");
  EXPECT_HAS(result.out, "reduce_bucket_size");
  EXPECT_HAS(result.out, "grad.bucket_bytes = ");
}

const std::vector<std::string>& doctor_rows() {
  static const std::vector<std::string> rows{
      "torch",    "compiler",  "CUDA",       "NCCL",          "Gloo",
      "io_uring", "directory", "O_DIRECT",   "locked memory", "host memory",
      "cores",    "CPU bf16",  "huge pages", "NUMA",          "open files"};
  return rows;
}

TEST(Doctor, ShowsEveryRowOnOneScreenAndLeavesNothing) {
  const TemporaryDirectory directory;
  const ProcessResult result = run_tessera({"doctor"}, in_directory(directory));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
  std::istringstream lines(result.out);
  std::size_t num_lines = 0;
  for (std::string line; std::getline(lines, line); ++num_lines) {
    EXPECT_LE(line.size(), 80U) << line;
  }
  EXPECT_LE(num_lines, 40U) << result.out;
  for (const std::string& row : doctor_rows()) {
    EXPECT_HAS(result.out, " " + row + " ");
  }
  EXPECT_HAS(result.out, "Training can run");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Doctor, TriesGlooForReal) {
  const ProcessResult result = run_tessera({"doctor"});
  EXPECT_HAS(result.out, "2 ranks exchanged data over loopback");
}

TEST(Doctor, JsonHasTheSameRows) {
  const TemporaryDirectory directory;
  const ProcessResult result =
      run_tessera({"doctor", "--json", "--dir", directory.path().string()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto document = nlohmann::json::parse(result.out);
  EXPECT_EQ(document.at("can_train"), true);
  std::vector<std::string> names;
  for (const auto& probe : document.at("probes")) {
    names.push_back(probe.at("name"));
    const std::string state = probe.at("state");
    EXPECT_TRUE(state == "ok" || state == "limited" || state == "missing") << state;
    // What is not well says what it costs, and what is well costs nothing.
    EXPECT_EQ(state == "ok", probe.at("cost").get<std::string>().empty()) << probe;
  }
  EXPECT_EQ(names, doctor_rows());
}

// A world of one needs no network, whatever was asked for.
struct BenchCase {
  const char* backend;
  int num_ranks;
  const char* shown_backend;
};

class BenchComm : public ::testing::TestWithParam<BenchCase> {};

TEST_P(BenchComm, PrintsATableAndWritesTheSameNumbers) {
  const BenchCase& bench = GetParam();
  const TemporaryDirectory directory;
  const ProcessResult result =
      run_tessera({"bench-comm", "--ranks", std::to_string(bench.num_ranks), "--backend",
                   bench.backend, "--sizes", "64,4KiB", "--rounds", "2", "--json", "rates.json"},
                  in_directory(directory));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_LACKS(result.err, "error");
  // Rank 0 speaks for all.
  EXPECT_EQ(result.out.find("collective"), result.out.rfind("collective")) << result.out;
  for (const char* collective :
       {"barrier", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"}) {
    EXPECT_HAS(result.out, collective);
  }
  const auto document = nlohmann::json::parse(read_file(directory.path() / "rates.json"));
  EXPECT_EQ(document.at("num_ranks"), bench.num_ranks);
  EXPECT_EQ(document.at("backend"), bench.shown_backend);
  EXPECT_EQ(document.at("rows").size(), 11U);
  // Nothing beside it.
  std::size_t num_files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    ++num_files;
  }
  EXPECT_EQ(num_files, 1U);
}

INSTANTIATE_TEST_SUITE_P(Backends, BenchComm,
                         ::testing::Values(BenchCase{"gloo", 1, "solo"},
                                           BenchCase{"gloo", 2, "gloo"},
                                           BenchCase{"gloo", 3, "gloo"}),
                         [](const auto& info) {
                           return std::string(info.param.backend) +
                                  std::to_string(info.param.num_ranks);
                         });

TEST(BenchCommInterrupted, CtrlCGives130AndLeavesNoFile) {
  const TemporaryDirectory directory;
  Process process({TESSERA_BINARY, "bench-comm", "--ranks", "2", "--backend", "gloo", "--sizes",
                   "4KiB", "--rounds", "1000000", "--json", "rates.json"},
                  in_directory(directory));
  ASSERT_TRUE(process.wait_for_output("collective"));
  // As a terminal does: to the whole foreground group.
  ::kill(-process.pid(), SIGINT);
  const ProcessResult result = process.wait();
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Launch, GivesEachRankItsVariablesAndTheProgramItsOwnArguments) {
  const ProcessResult result =
      run_tessera({"launch", "--ranks", "2", "sh", "-c",
                   "echo rank $TESSERA_RANK of $TESSERA_WORLD_SIZE: $0 $1", "--ranks", "7"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "rank 0 of 2: --ranks 7");
  EXPECT_HAS(result.out, "rank 1 of 2: --ranks 7");
}

}  // namespace
}  // namespace tessera::testing
