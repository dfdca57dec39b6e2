// What the commands print and do when all is well.
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/option_table.h"
#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

class Commands : public ProgramTest {};

TEST(Help, IsThereOnEveryLevelWithExamples) {
  for (const std::string command : {"", "inspect", "doctor", "bench-comm", "bench-io", "plot",
                                    "checkpoint", "options", "config", "version"}) {
    SCOPED_TRACE(command);
    const ProcessResult result =
        run_tessera_forked(command.empty() ? Arguments{"--help"} : Arguments{command, "--help"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_HAS(result.out, "Examples:\n  tessera ");
    EXPECT_HAS(result.out, command.empty() ? "" : "Usage: tessera " + command);
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

TEST(Options, MarkdownIsTheCommittedFileInAscii) {
  const ProcessResult result = run_tessera_forked({"options", "--markdown"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, read_whole(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/options.md"))
      << "run: tessera options --markdown > docs/options.md";
  for (const char c : result.out) {
    ASSERT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << static_cast<int>(c);
  }
}

TEST(Options, AreListedWithinAHundredColumnsAndAdmitWhatNothingReads) {
  const ProcessResult result = run_tessera_forked({"options"});
  EXPECT_EQ(result.exit_code, 0);
  std::istringstream lines(result.out);
  std::string joined_lines;  // an option per line
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 100U) << line;
    joined_lines += line.starts_with("    ") ? line.substr(3) : "\n" + line;
  }
  for (const Option& option : option_table()) {
    const auto at = joined_lines.find("\n" + std::string(option.name) + " = ");
    ASSERT_NE(at, std::string::npos) << option.name;
    const std::string entry = joined_lines.substr(at, joined_lines.find('\n', at + 1) - at);
    EXPECT_HAS(entry, std::string(option.text));
    EXPECT_EQ(contains(entry, "[checked, not used yet]"), option.read_by.empty()) << entry;
  }
}

TEST_F(Commands, ConfigPrintsWhatAFileGives) {
  write("run.json", R"({"comm": {"timeout_s": 30}, "seed": 7})");
  const ProcessResult own =
      run_well({"config", "run.json", "--set", "seed=8", "--set", "precision=bf16"});
  for (const char* part : {"comm.timeout_s = 30", "seed = 8", "precision = bf16"}) {
    EXPECT_HAS(own.out, part);
  }
  write("ds.json", R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}})");
  const ProcessResult theirs = run_well({"config", "ds.json"});
  for (const char* part : {"note: ", "reduce_bucket_size", "grad.bucket_bytes = "}) {
    EXPECT_HAS(theirs.out, part);
  }
}

const std::vector<std::string>& doctor_rows() {
  static const std::vector<std::string> rows{
      "torch",    "compiler",  "CUDA",       "NCCL",          "Gloo",
      "io_uring", "directory", "O_DIRECT",   "locked memory", "host memory",
      "cores",    "CPU bf16",  "huge pages", "NUMA",          "open files"};
  return rows;
}

TEST_F(Commands, DoctorShowsEveryRowOnOneScreenAndLeavesNothing) {
  const ProcessResult result = run_well({"doctor"});
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
  EXPECT_HAS(result.out, "2 ranks exchanged data over loopback");
  EXPECT_TRUE(files().empty());
}

TEST_F(Commands, DoctorsJsonHasTheSameRows) {
  const Json document = Json::parse(run_well({"doctor", "--json", "--dir", "."}).out);
  EXPECT_EQ(document.at("can_train"), true);
  std::vector<std::string> names;
  for (const Json& probe : document.at("probes")) {
    names.push_back(probe.at("name"));
    const std::string state = probe.at("state");
    EXPECT_TRUE(state == "ok" || state == "limited" || state == "missing") << state;
    // What is not well says what it costs, and what is well costs nothing.
    EXPECT_EQ(state == "ok", probe.at("cost").get<std::string>().empty()) << probe;
  }
  EXPECT_EQ(names, doctor_rows());
}

TEST_F(Commands, BenchCommPrintsATableAndWritesTheSameNumbers) {
  for (const int num_ranks : {1, 2, 3}) {
    const ProcessResult result =
        run_well({"bench-comm", "--ranks", std::to_string(num_ranks), "--backend", "gloo",
                  "--sizes", "64,4KiB", "--rounds", "2", "--json", "rates.json"});
    EXPECT_LACKS(result.err, "error");
    // Rank 0 speaks for all.
    EXPECT_EQ(result.out.find("collective"), result.out.rfind("collective")) << result.out;
    for (const char* collective :
         {"barrier", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"}) {
      EXPECT_HAS(result.out, collective);
    }
    const Json document = Json::parse(read("rates.json"));
    ASSERT_EQ(document.at("backends").size(), 1U);
    const Json& measured = document.at("backends").at(0);
    EXPECT_EQ(measured.at("num_ranks"), num_ranks);
    // A world of one needs no network, whatever was asked for.
    EXPECT_EQ(measured.at("backend"), num_ranks == 1 ? "solo" : "gloo");
    EXPECT_EQ(measured.at("rows").size(), 11U);
    EXPECT_EQ(files(), std::set<std::string>{"rates.json"});
  }
}

std::string backends_of(const Json& document) {
  std::string names;
  for (const Json& measured : document.at("backends")) {
    names += measured.at("backend").get<std::string>() + " ";
  }
  return names;
}

// Where ranks cannot share memory the table says why, and has the others.
TEST_F(Commands, BenchCommMeasuresAllBackendsThatTheRanksCanHave) {
  const std::string arguments = " bench-comm --ranks 2 --sizes 4KiB --rounds 2 --json rates.json";
  const ProcessResult all = run_process({"/bin/sh", "-c", TESSERA_BINARY + arguments}, here());
  EXPECT_EQ(all.exit_code, 0) << all.err;
  const Json document = Json::parse(read("rates.json"));
  std::string without;
  for (const Json& gap : document.at("not_measured")) {
    without += gap.at("backend").get<std::string>() + " ";
    EXPECT_HAS(all.out, "no " + gap.at("backend").get<std::string>() + ": " +
                            gap.at("reason").get<std::string>() + "\n");
  }
  const std::string measured = backends_of(document);
  EXPECT_HAS(measured, "gloo ");
  EXPECT_HAS(measured + without, "nccl ");
  EXPECT_HAS(measured + without, "shm ");
  if (contains(measured, "shm ")) {
    EXPECT_EQ(document.at("backends").at(0).at("rows").size(), 7U);
    EXPECT_HAS(all.out, "memcpy");
  }

  const ProcessResult limited = run_process(
      {"/bin/sh", "-c", std::string("ulimit -v 1000000000; exec ") + TESSERA_BINARY + arguments},
      here());
  EXPECT_EQ(limited.exit_code, 0) << limited.err;
  EXPECT_HAS(limited.out, "no shm: ");
  EXPECT_HAS(limited.out, "ulimit -v");
  if (limited.out.find(" ipc") == std::string::npos) {  // its copies are the GPU's
    EXPECT_LACKS(limited.out, "memcpy");
  }
  EXPECT_LACKS(backends_of(Json::parse(read("rates.json"))), "shm");
}

TEST_F(Commands, CtrlCGives130AndLeavesNoFile) {
  Process process({TESSERA_BINARY, "bench-comm", "--ranks", "2", "--backend", "gloo", "--sizes",
                   "4KiB", "--rounds", "1000000", "--json", "rates.json"},
                  here());
  ASSERT_TRUE(process.wait_for_output("collective"));
  // As a terminal does: to the whole foreground group.
  ::kill(-process.pid(), SIGINT);
  const ProcessResult result = process.wait();
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_TRUE(files().empty());
}

TEST_F(Commands, LaunchGivesEachRankItsVariablesAndTheProgramItsOwnArguments) {
  const ProcessResult result =
      run_well({"launch", "--ranks", "2", "sh", "-c",
                "echo rank $TESSERA_RANK of $TESSERA_WORLD_SIZE: $0 $1", "--ranks", "7"});
  EXPECT_HAS(result.out, "rank 0 of 2: --ranks 7");
  EXPECT_HAS(result.out, "rank 1 of 2: --ranks 7");
}

}  // namespace
}  // namespace tessera::testing
