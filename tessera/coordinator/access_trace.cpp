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

}  // namespace tessera::coordinator
