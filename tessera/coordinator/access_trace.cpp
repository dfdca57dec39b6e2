#include "tessera/coordinator/access_trace.h"

namespace tessera::coordinator {

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kInference:
      return "inference";
  }
  return "?";
}

std::string_view to_string(TraceMode mode) {
  switch (mode) {
    case TraceMode::kRecord:
      return "record";
    case TraceMode::kComplete:
      return "complete";
    case TraceMode::kInvalid:
      return "invalid";
  }
  return "?";
}

bool AccessTrace::advance(const Use& use) {
  switch (mode_) {
    case TraceMode::kRecord:
      uses_.push_back(use);
      ++position_;
      return true;
    case TraceMode::kComplete:
      if (position_ < uses_.size() && uses_[position_] == use) {
        ++position_;
        return true;
      }
      mode_ = TraceMode::kInvalid;
      return false;
    case TraceMode::kInvalid:
      return false;
  }
  return false;
}

void AccessTrace::end_step() {
  if (mode_ == TraceMode::kInvalid) {
    mode_ = TraceMode::kRecord;
    uses_.clear();
  } else if (!uses_.empty()) {
    mode_ = TraceMode::kComplete;
  }
  position_ = 0;
}

}  // namespace tessera::coordinator
