// Tokens of a file, memory-mapped; internal to models.
//
// Invariant: a token that leaves read() is in the vocabulary, whatever happens to the file.
//
// Threads: read() from any thread; the mapping is only read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/data.h"

namespace tessera::models {

enum class FileTokenKind : std::uint8_t {
  kBytes,  // each byte is a token
  kWords,  // 16 bits, little-endian
};

// Checks the whole file against the vocabulary, unless no value of its kind can be beyond it.
std::unique_ptr<TokenSource> open_file_tokens(const DataOptions& options, const std::string& path,
                                              FileTokenKind kind);

}  // namespace tessera::models
