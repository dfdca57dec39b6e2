// engine_seeds FIRST[:LAST]: draws a case from each of these seeds and judges it. Prints what it
// finds wrong; the exit code is 1 then, and 2 for arguments that it does not understand.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>

#include "tests/property/random_case.h"

namespace {

bool parse(std::string_view text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view text = argc == 2 ? argv[1] : "";
  const std::size_t colon = text.find(':');
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  if (!parse(text.substr(0, colon), first) ||
      !parse(colon == std::string_view::npos ? text : text.substr(colon + 1), last) ||
      last < first) {
    std::fprintf(stderr, "usage: engine_seeds FIRST[:LAST], both included\n");
    return 2;
  }
  std::uint64_t num_wrong = 0;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const std::string found = tessera::testing::judge(tessera::testing::draw_case(seed));
    if (!found.empty()) {
      ++num_wrong;
      std::printf("%s\n", found.c_str());
      std::fflush(stdout);
    }
  }
  std::printf("seeds %llu to %llu: %llu wrong\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(last), static_cast<unsigned long long>(num_wrong));
  return num_wrong > 0 ? 1 : 0;
}
