// A parameter's tensor where a test has no use for one.
#pragma once

#include "tessera/shard/param.h"

namespace tessera::support {

class NoTensor final : public shard::FullTensor {
 public:
  void attach(void* /*data*/) override {}
  void detach() override {}
};

}  // namespace tessera::support
