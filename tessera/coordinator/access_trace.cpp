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

}  // namespace tessera::coordinator
