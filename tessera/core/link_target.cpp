#include "tessera/core/link_target.h"

#include <filesystem>
#include <system_error>

namespace tessera {

std::string link_target(const std::string& path) {
  constexpr int kMostLinks = 40;
  std::filesystem::path target = path;
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code error;
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error) {
      break;
    }
    target = target.parent_path() / next;  // an absolute one replaces all of it
  }
  return target.string();
}

}  // namespace tessera
