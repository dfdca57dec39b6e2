// The real program, driven as a user drives it, in a directory of the test's own.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "tests/support/contains.h"
#include "tests/support/process.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {

using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

inline Arguments joined(Arguments first, const Arguments& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

inline ProcessResult run_tessera(const Arguments& arguments, const ProcessOptions& options = {}) {
  return run_process(joined({TESSERA_BINARY}, arguments), options);
}

// The same without starting the binary, for input that is refused before anything is done: a fork
// of this process runs the program's main function.
inline ProcessResult run_tessera_forked(const Arguments& given, ProcessOptions options = {}) {
  Arguments arguments = joined({TESSERA_BINARY}, given);
  options.body = [&arguments] {
    std::vector<char*> argv;
    for (std::string& argument : arguments) {
      argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    return cli::run_program(static_cast<int>(arguments.size()), argv.data());
  };
  return run_process(arguments, options);
}

class ProgramTest : public ::testing::Test {
 protected:
  ProcessOptions here() const {
    ProcessOptions options;
    options.directory = directory_.path();
    return options;
  }
  ProcessResult run(const Arguments& arguments, const Arguments& more = {}) const {
    ProcessResult result = run_tessera(joined(arguments, more), here());
    EXPECT_FALSE(result.timed_out);
    return result;
  }
  // A run that must end well.
  ProcessResult run_well(const Arguments& arguments, const Arguments& more = {}) const {
    ProcessResult result = run(arguments, more);
    EXPECT_EQ(result.exit_code, 0) << result.err << result.out;
    return result;
  }
  ProcessResult shell(const std::string& command) const {
    return run_process({"/bin/bash", "-c", command}, here());
  }

  // Wrong input: one line on stderr, exit code 2, nothing on stdout, nothing written.
  void expect_refusal(const Arguments& arguments, const std::string& part,
                      const std::map<std::string, std::string>& environment = {}) const {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    ProcessOptions options = here();
    options.environment = environment;
    const std::set<std::string> before = files();
    const ProcessResult result = run_tessera_forked(arguments, options);
    EXPECT_FALSE(result.timed_out);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    ASSERT_EQ(result.err_lines().size(), 1U) << result.err;
    EXPECT_EQ(result.err.rfind("tessera: error: ", 0), 0U) << result.err;
    EXPECT_HAS(result.err, part);
    EXPECT_EQ(files(), before);
  }

  std::filesystem::path path(const std::string& name) const { return directory_.path() / name; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  std::string read(const std::string& name) const { return read_whole(path(name)); }
  // The lines of a file of metrics.
  std::vector<Json> lines(const std::string& name) const {
    std::ifstream in(path(name));
    std::vector<Json> parsed;
    for (std::string line; std::getline(in, line);) {
      parsed.push_back(Json::parse(line));
    }
    return parsed;
  }
  // By path inside the directory.
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
      names.insert(std::filesystem::relative(entry.path(), directory_.path()).string());
    }
    return names;
  }

  const TemporaryDirectory directory_;
};

// What a launcher such as torchrun gives a rank.
inline const std::map<std::string, std::string> kRankOfTwo = {{"RANK", "0"},
                                                              {"WORLD_SIZE", "2"},
                                                              {"LOCAL_RANK", "0"},
                                                              {"LOCAL_WORLD_SIZE", "2"},
                                                              {"MASTER_ADDR", "127.0.0.1"},
                                                              {"MASTER_PORT", "29500"}};

}  // namespace tessera::testing
