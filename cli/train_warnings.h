// Warnings of torch, as one line each.
//
// Torch puts whole exceptions into some warnings, with a stack trace of thirty lines: when oneDNN
// has no bf16 product for a CPU, for example. Here a text is cut where the trace begins, and
// the same text is said once.
//
// Threads: the handler acts for the thread that made it; autograd runs backward on the CPU in that
// thread as well. Warnings of other threads are printed as torch does.
#pragma once

#include <memory>
#include <string>

namespace c10 {
class WarningHandler;
}

namespace tessera::cli {

struct TrainPlan;

// What torch's text says, in one line and without its trace.
std::string first_sentence(const std::string& text);

class TorchWarnings {
 public:
  // `prefix` stands before each line on stderr.
  explicit TorchWarnings(const std::string& prefix);
  ~TorchWarnings();
  TorchWarnings(const TorchWarnings&) = delete;
  TorchWarnings& operator=(const TorchWarnings&) = delete;

 private:
  const std::unique_ptr<c10::WarningHandler> handler_;
  c10::WarningHandler* const before_;
};

// On stderr, before a run that may be long: what the plan notes, and a precision that is slow here.
void print_warnings(const TrainPlan& plan);

}  // namespace tessera::cli
