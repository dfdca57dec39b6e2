// Tokens of files, memory-mapped; internal to models.
//
// Invariant: a token that leaves read() is in the vocabulary, whatever happens to the file.
//
// Threads: read() from any thread; mappings are only read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/data.h"

namespace tessera::models {

// Tokens of files are little-endian.
enum class FileTokenKind : std::uint8_t {
  kBytes,         // each byte is a token
  kWords,         // 16 bits; refused if they look like 32-bit tokens
  kCertainWords,  // 16 bits, whatever they look like
  kDoubleWords,   // 32 bits
};

struct TokenFileName {
  std::string path;
  FileTokenKind kind = FileTokenKind::kBytes;
};

// Checks whole files against the vocabulary, unless no value of their kind can be beyond it.
// REQUIRES: at least one file.
std::unique_ptr<TokenSource> open_file_tokens(const DataOptions& options,
                                              const std::vector<TokenFileName>& files);

// Consecutive sequences of all files, as in DataOrder::kEpochs; reads no token.
std::int64_t count_file_sequences(const DataOptions& options,
                                  const std::vector<TokenFileName>& files);

}  // namespace tessera::models
