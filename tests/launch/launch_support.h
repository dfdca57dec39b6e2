// What the process tests share: running the program under a mark, and looking for what it left.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace tessera::testing {

// The path of a program in the folder of this one.
std::string beside_this_program(const std::string& name);
// Process ids that carry this mark in their environment.
std::vector<int> pids_with_mark(const std::string& mark);

// One run of a rank program. Every process of the run carries a mark in its environment, so that
// survivors can be found wherever they hang in the process tree.
// With a store; rank_program_plain has none.
constexpr const char* kStoreProgram = "rank_program";

class MarkedRun {
 public:
  // `program` is the name of a program beside this one; environment is added to the run's.
  MarkedRun(const std::string& program, const std::vector<std::string>& arguments,
            std::map<std::string, std::string> environment = {});

  Process& process() { return *process_; }
  // Waits for "rank r ready" of all; a test failure if one does not.
  void wait_until_ready(int num_ranks);
  // Waits for the end of the program and of everybody who holds its output.
  ProcessResult finish();
  // Process ids that still carry the mark.
  std::vector<int> survivors() const { return pids_with_mark(mark_); }

 private:
  std::string mark_;
  std::unique_ptr<Process> process_;
};

// How often `part` is in `text`.
int count(const std::string& text, const std::string& part);

}  // namespace tessera::testing
