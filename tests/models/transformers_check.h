// Runs the program of the other side, transformers_check.py, for tests.
#pragma once

#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "models/gpt.h"
#include "tests/support/process.h"

namespace tessera::models {

// Its exit code; what it says is in the test's output.
inline int run_transformers(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {"/usr/bin/env", "python3",
                                      TESSERA_SOURCE_DIR "/tests/models/transformers_check.py"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const testing::ProcessResult result = testing::run_process(command);
  std::cout << result.out << result.err << std::flush;
  return result.exit_code;
}

inline bool has_transformers() { return run_transformers({"available"}) == 0; }
inline bool has_peft() { return run_transformers({"available", "peft"}) == 0; }

// Of every prefix of the sequences: [rows, length, vocabulary].
inline at::Tensor all_logits(Gpt& gpt, const at::Tensor& ids) {
  std::vector<at::Tensor> logits;
  for (std::int64_t length = 1; length <= ids.size(1); ++length) {
    logits.push_back(gpt.next_logits(ids.narrow(1, 0, length)));
  }
  return at::stack(logits, 1);
}

}  // namespace tessera::models
