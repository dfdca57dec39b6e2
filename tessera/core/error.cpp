#include "tessera/core/error.h"

namespace tessera::detail {

void throw_invariant(const char* file, int line, const char* condition,
                     const std::string& message) {
  throw InternalError(concat("internal error at ", file, ":", line, ": ", condition,
                             message.empty() ? "" : ": ", message,
                             "; this is a defect of Tessera, please report it"));
}

}  // namespace tessera::detail
