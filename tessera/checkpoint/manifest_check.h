// What holds for every manifest, whoever reads or writes it; internal to checkpoint.
//
// Threads: stateless.
#pragma once

#include <stdexcept>
#include <string_view>

#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

// One line without the path: for a reader the text is damaged, for a writer it is a defect.
class ManifestProblem : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The two ends of a manifest's text.
inline constexpr std::string_view kManifestFormat = "tessera checkpoint";
inline constexpr std::string_view kManifestEndBegin = "  \"xxh3\": \"";
inline constexpr std::string_view kManifestEndEnd = "\"\n}\n";

inline constexpr int kMaxRanks = 1 << 20;

// Throws ManifestProblem.
void check_manifest(const Manifest& manifest);

}  // namespace tessera::checkpoint
