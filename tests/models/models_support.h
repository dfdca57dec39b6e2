// What tests of this folder share.
#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/core/error.h"

namespace tessera::models {

struct Batch {
  at::Tensor ids;
  at::Tensor targets;
};

inline std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

}  // namespace tessera::models
