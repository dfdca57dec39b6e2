#include "tessera/tier/uring_engine.h"

namespace tessera::tier {

std::unique_ptr<IoEngine> try_make_uring_engine(const IoOptions&, std::string& reason) {
  reason = "Tessera was built without liburing (apt-get install liburing-dev, or set LIBURING_DIR)";
  return nullptr;
}

}  // namespace tessera::tier
