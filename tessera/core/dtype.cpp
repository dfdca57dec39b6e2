#include "tessera/core/dtype.h"

#include <array>

namespace tessera {

std::string_view to_string(DType dtype) {
  constexpr std::array<std::string_view, 7> kNames = {"fp32",  "bf16",  "fp16", "fp64",
                                                      "int64", "int32", "uint8"};
  return kNames[static_cast<std::size_t>(dtype)];
}

}  // namespace tessera
