// How the parameters that are made inside shall live: over which ranks, of which type, where.
//
//   tessera::BuildScope scope({.dtype = DType::kBFloat16});
//   tessera::Engine engine(runtime);
//   auto block = engine.unit("block", std::make_shared<BlockImpl>());   // made and sharded as bf16
//
// Scopes nest. The outermost decides group and tier, for every engine that is made inside; the
// innermost that names a type decides the type: torch's default type follows it, so that modules
// are made in it, and engine.unit() converts floating parameters of any other. Leaving a scope,
// also by an exception, restores what was before.
//
// Threads: a scope belongs to the thread that made it; each thread has its own nesting. Torch's
// default type is one for the process: where scopes of several threads are open, it is that of the
// scope opened last.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/core/dtype.h"

namespace tessera {

struct BuildOptions {
  // Null: the runtime's. Must outlive the engines made inside. A group of one is used as given.
  comm::Group* group = nullptr;
  std::optional<DType> dtype = {};  // fp32, bf16 or fp16
  // Of parameter shards: "device", or "host" where device memory is host memory. Empty: device.
  std::string tier = {};
};

class BuildScope {
 public:
  // Throws ConfigError, and changes nothing, for a type or tier that is not there.
  explicit BuildScope(const BuildOptions& options);
  ~BuildScope();
  BuildScope(const BuildScope&) = delete;
  BuildScope& operator=(const BuildScope&) = delete;

  // What holds on this thread now. Without a scope: nothing is set.
  static BuildOptions current();
  // An inner scope of this thread names a group or tier that does not count.
  static bool has_overruled();

 private:
  const BuildOptions options_;
  const BuildScope* outer_;
  std::uint64_t dtype_number_ = 0;  // in the process-wide list of types; 0: not in it
};

}  // namespace tessera
