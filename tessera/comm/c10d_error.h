// Internal to comm: what c10d has to say, without the C++ stack trace that it hangs behind it.
//
// Threads: stateless.
#pragma once

#include <string>

#include <c10/util/Exception.h>

namespace tessera::comm {

inline std::string c10d_text(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace tessera::comm
