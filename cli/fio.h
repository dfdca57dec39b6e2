// fio as a yardstick: the same file, block size, depth, threads and mix as one of our engines.
//
// The file is handed over as an open descriptor, so that it needs no name and nothing is left of it
// however either program ends.
//
// Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/tier/io_load.h"

namespace tessera::cli {

struct FioJob {
  const tier::IoFile* file = nullptr;
  std::uint64_t file_bytes = 0;
  tier::IoOptions options;  // `kind` is not kAuto
  tier::IoMix mix = tier::IoMix::kRead;
  double seconds = 1;
};

class Fio {
 public:
  // Nothing if there is no such program.
  static std::optional<Fio> find(const std::string& program = "fio");

  const std::string& version() const { return version_; }
  // Throws IoError with what fio said if it fails.
  tier::IoRates run(const FioJob& job) const;

 private:
  Fio(std::string program, std::string version)
      : program_(std::move(program)), version_(std::move(version)) {}

  std::string program_;
  std::string version_;
};

// Its arguments, of which `path` names the file.
std::vector<std::string> fio_arguments(const FioJob& job, const std::string& path);
// Throws IoError if this is not what fio prints with --output-format=json.
tier::IoRates parse_fio(std::string_view output);

}  // namespace tessera::cli
