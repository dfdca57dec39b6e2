#include "cli/out_of_memory.h"

#include <array>
#include <charconv>
#include <utility>

#include "tessera/core/ledger.h"

namespace tessera::cli {

std::size_t asked_bytes(std::string_view torch_message) {
  constexpr std::string_view kBefore = "Tried to allocate ";
  const std::size_t at = torch_message.find(kBefore);
  if (at == std::string_view::npos) {
    return 0;
  }
  const std::string_view rest = torch_message.substr(at + kBefore.size());
  double number = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc()) {
    return 0;
  }
  const std::string_view unit = rest.substr(static_cast<std::size_t>(end - rest.data()));
  constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {
      {{" GiB", 0x1p30}, {" MiB", 0x1p20}, {" KiB", 0x1p10}, {" bytes", 1.0}}};
  for (const auto& [name, bytes] : kUnits) {
    if (unit.starts_with(name)) {
      return static_cast<std::size_t>(number * bytes);
    }
  }
  return 0;
}

bool is_host_allocation_failure(std::string_view torch_message) {
  return torch_message.find("can't allocate memory") != std::string_view::npos ||
         torch_message.find("not enough memory") != std::string_view::npos;
}

std::size_t host_asked_bytes(std::string_view torch_message) {
  constexpr std::string_view kBefore = "tried to allocate ";
  const std::size_t at = torch_message.find(kBefore);
  std::size_t bytes = 0;
  if (at != std::string_view::npos) {
    const std::string_view rest = torch_message.substr(at + kBefore.size());
    std::from_chars(rest.data(), rest.data() + rest.size(), bytes);
  }
  return bytes;
}

std::string out_of_memory_text(std::string_view torch_message, const Ledger& ledger,
                               const device::MemoryInfo& memory) {
  return std::string(torch_message.substr(0, torch_message.find('\n'))) + "\n" +
         memory_report(ledger, Tier::kDevice, asked_bytes(torch_message), memory.free_bytes,
                       memory.total_bytes);
}

}  // namespace tessera::cli
