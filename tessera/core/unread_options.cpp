#include "tessera/core/unread_options.h"

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace tessera {

std::string unread_warning(const Config& config) {
  std::string names;
  bool is_loco = false;
  for (const std::string& name : config.unread()) {
    names += (names.empty() ? "" : ", ") + name;
    is_loco |= name.starts_with("quant.error_");
  }
  if (names.empty()) {
    return {};
  }
  return detail::concat(
      "set, but not built yet, and without effect: ", names,
      is_loco ? "; the rounding error of quantised gradients (LoCo) is not carried over. Remove "
                "these options; quant.gradient_bits = 8 (--quantize-gradients=8) is what rounds "
                "less"
              : "; remove these options");
}

}  // namespace tessera
