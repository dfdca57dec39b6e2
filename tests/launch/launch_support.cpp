#include "tests/launch/launch_support.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

std::string next_mark() {
  static std::atomic<int> number{0};
  return std::to_string(getpid()) + "." + std::to_string(++number);
}

}  // namespace

std::string beside_this_program(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

MarkedRun::MarkedRun(const std::string& program, const std::vector<std::string>& arguments,
                     std::map<std::string, std::string> environment)
    : mark_(next_mark()) {
  std::vector<std::string> command{beside_this_program(program)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  ProcessOptions options;
  options.environment = std::move(environment);
  options.environment["LAUNCH_TEST_MARK"] = mark_;
  // Its default is a note on standard error, which has a test of its own.
  options.environment.try_emplace("OMP_NUM_THREADS", "1");
  process_ = std::make_unique<Process>(command, options);
}

void MarkedRun::wait_until_ready(int num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    ASSERT_TRUE(process_->wait_for_output("rank " + std::to_string(rank) + " ready\n"))
        << "rank " << rank << " did not get ready";
  }
}

ProcessResult MarkedRun::finish() {
  ProcessResult result = process_->wait();
  EXPECT_FALSE(result.timed_out) << "still running, or a survivor holds its output; it said:\n"
                                 << result.out << result.err;
  EXPECT_EQ(survivors(), std::vector<int>());
  return result;
}

std::vector<int> pids_with_mark(const std::string& mark) {
  const std::string wanted = "LAUNCH_TEST_MARK=" + mark + '\0';
  std::vector<int> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      continue;
    }
    std::ifstream file(entry.path() / "environ", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find(wanted) != std::string::npos) pids.push_back(std::stoi(name));
  }
  return pids;
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

}  // namespace tessera::testing
