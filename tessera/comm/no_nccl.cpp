// Builds without CUDA: says so.
#include "tessera/comm/nccl_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm {

bool nccl_built() { return false; }

std::string nccl_description() { return "not in this build (no CUDA)"; }

// Takes what the other build takes.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store>, int, int, int,
                                           const std::string&, const GlooOptions&) {
  throw ConfigError(
      "comm.backend=nccl, but this build has no CUDA; build with a CUDA toolkit and a CUDA torch "
      "(make build finds them), or use comm.backend=gloo");
}

}  // namespace tessera::comm
