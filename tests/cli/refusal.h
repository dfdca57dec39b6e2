// Wrong input: exactly one line on stderr, exit code 2, nothing on stdout, nothing written.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {

class Refusal : public ::testing::Test {
 protected:
  // Runs in a directory that nothing may be written to.
  void expect_refusal(const std::vector<std::string>& arguments, const std::string& part,
                      const std::map<std::string, std::string>& environment = {}) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    ProcessOptions options;
    options.directory = directory_.path();
    options.environment = environment;
    const std::set<std::string> before = listing();
    const ProcessResult result = run_tessera_forked(arguments, options);
    EXPECT_FALSE(result.timed_out);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    ASSERT_EQ(result.err_lines().size(), 1U) << result.err;
    EXPECT_EQ(result.err.rfind("tessera: error: ", 0), 0U) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_EQ(listing(), before);
  }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(directory_.path() / name, std::ios::binary) << text;
  }

 private:
  std::set<std::string> listing() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
      names.insert(entry.path().string());
    }
    return names;
  }

  TemporaryDirectory directory_;
};

}  // namespace tessera::testing
