// The only unit here that sees a torch header, and that is a list of version macros.
#include <link.h>

#include <filesystem>
#include <string>

#include <torch/version.h>

#include "cli/probe.h"

namespace tessera::cli {
namespace {

// The folder of the libtorch that this process has really loaded: a wrong one on
// LD_LIBRARY_PATH shows here.
std::string loaded_torch_folder() {
  std::string folder;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        const std::filesystem::path file(info->dlpi_name);
        if (file.filename().string().rfind("libtorch_cpu", 0) != 0) {
          return 0;
        }
        *static_cast<std::string*>(out) = file.parent_path().lexically_normal().string();
        return 1;
      },
      &folder);
  return folder;
}

}  // namespace

ProbeResult probe_torch() {
  ProbeResult result{"torch", ProbeState::kOk, TORCH_VERSION, "", true};
  const std::string folder = loaded_torch_folder();
  if (folder.empty()) {
    result.found += ", linked into the program";
  } else {
    result.found += " in " + folder;
  }
  return result;
}

}  // namespace tessera::cli
