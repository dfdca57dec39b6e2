// Builds without CUDA: says so.
#include "tessera/comm/ipc_backend.h"

namespace tessera::comm {

bool ipc_built() { return false; }

// Takes what the other build takes.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
std::unique_ptr<Backend> make_ipc_backend(std::shared_ptr<Store>, int, int, int, const std::string&,
                                          const IpcOptions&, std::string& why_not) {
  why_not = "this build has no CUDA";
  return nullptr;
}

}  // namespace tessera::comm
