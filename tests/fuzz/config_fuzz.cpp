// Whatever bytes a config file holds: it is read, or it is a ConfigError of exactly one printable
// line. Anything else ends the fuzzer.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/core/config.h"
#include "tessera/core/error.h"

namespace {

void require(bool holds, const char* what, std::string_view text) {
  if (!holds) {
    std::fprintf(stderr, "config_fuzz: %s: %.*s\n", what, static_cast<int>(text.size()),
                 text.data());
    std::abort();
  }
}

void require_one_line(std::string_view text) {
  require(!text.empty(), "an empty message", text);
  for (const char c : text) {
    require(c >= ' ' && c <= '~', "a message that is not one line of ASCII", text);
  }
}

// Every way in which the bytes can enter; each throws ConfigError or nothing.
void use(std::string_view bytes) {
  const auto config = tessera::Config::from_json(bytes, "fuzz.json");
  for (const std::string& notice : config.notices()) {
    require_one_line(notice);
  }
  const std::string described = config.describe();
  config.check();
  // What was accepted once is accepted under another precision, and says the same about itself.
  auto other = config;
  other.apply_flag("precision=fp16");
  require(config.describe() == described, "describe() is not stable", described);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    use(bytes);
  } catch (const tessera::ConfigError& e) {
    require_one_line(e.what());
  }
  try {
    tessera::Config().apply_flag(bytes);
  } catch (const tessera::ConfigError& e) {
    require_one_line(e.what());
  }
  return 0;
}
