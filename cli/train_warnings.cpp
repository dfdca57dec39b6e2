#include "cli/train_warnings.h"

#include <algorithm>
#include <iostream>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "cli/low_precision.h"
#include "cli/train_plan.h"

namespace tessera::cli {
namespace {

class OneLineHandler final : public c10::WarningHandler {
 public:
  explicit OneLineHandler(std::string prefix) : prefix_(std::move(prefix)) {}

  void process(const c10::Warning& warning) override {
    const std::string text = first_sentence(warning.msg());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (said_.insert(text).second) {
      std::cerr << prefix_ + "warning of torch: " + text + "\n" << std::flush;
    }
  }

 private:
  const std::string prefix_;
  std::mutex mutex_;
  std::set<std::string> said_;
};

}  // namespace

std::string first_sentence(const std::string& text) {
  // How c10::Error begins the place, and the frames, of where it was thrown.
  std::string line = text.substr(0, text.find("Exception raised from"));
  std::replace(line.begin(), line.end(), '\n', ' ');
  const std::size_t end = line.find_last_not_of(' ');
  return line.substr(0, end == std::string::npos ? 0 : end + 1);
}

TorchWarnings::TorchWarnings(const std::string& prefix)
    : handler_(std::make_unique<OneLineHandler>(prefix)),
      before_(c10::WarningUtils::get_warning_handler()) {
  c10::WarningUtils::set_warning_handler(handler_.get());
}

TorchWarnings::~TorchWarnings() { c10::WarningUtils::set_warning_handler(before_); }

void print_warnings(const TrainPlan& plan) {
  std::vector<std::string> warnings = plan.notes;
  const std::string slow =
      plan.cuda_device < 0 ? slow_precision_text(read_low_precision_units(), plan.model.dtype) : "";
  if (!slow.empty()) {
    warnings.push_back(slow);
  }
  for (const std::string& warning : warnings) {
    std::cerr << "tessera: warning: " + warning + "\n" << std::flush;
  }
}

}  // namespace tessera::cli
