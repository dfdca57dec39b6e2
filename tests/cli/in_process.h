// Runs the program's main function in this process, for commands that start no ranks, and keeps
// what it says.
#pragma once

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/program.h"

namespace tessera::cli {

struct InProcessResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// Standard streams write elsewhere as long as it lives.
class CapturedStream {
 public:
  explicit CapturedStream(std::ostream& stream) : stream_(stream), before_(stream.rdbuf()) {
    stream_.rdbuf(text_.rdbuf());
  }
  ~CapturedStream() { stream_.rdbuf(before_); }
  CapturedStream(const CapturedStream&) = delete;
  CapturedStream& operator=(const CapturedStream&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostream& stream_;
  std::streambuf* const before_;
  std::ostringstream text_;
};

inline InProcessResult run_in_process(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "tessera");
  std::vector<char*> argv;
  for (std::string& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  const CapturedStream out(std::cout);
  const CapturedStream err(std::cerr);
  InProcessResult result;
  result.exit_code = run_program(static_cast<int>(arguments.size()), argv.data());
  result.out = out.text();
  result.err = err.text();
  return result;
}

}  // namespace tessera::cli
