// Token sequences to train on. A sequence depends on (seed, its number) alone, where the number is
// step * batch + index in the batch; so every number of ranks trains on the same data, and any rank
// can make any sequence.
//
//   demo            a small corpus that is generated: sentences of a toy grammar (demo_corpus.h),
//   in
//                   28 symbols; a model learns it visibly within tens of steps
//   random          uniform tokens, exactly as bench/peers.py makes them (for seed 0)
//   text:FILE       bytes of a text file as tokens; also a plain path that ends in .txt
//   tokens:FILE     a memory-mapped file of little-endian 16-bit tokens; also a path that ends in
//                   .bin
//
// Text and token files: sequences begin at positions drawn by counter-based random numbers.
//
// Errors are ConfigErrors in one line, before anything is trained: a file that is missing, empty,
// shorter than one sequence or of odd size; a token beyond the vocabulary (with its value and
// position: the whole file is checked once, and the mapping is checked again as it is read, since
// the file may have been changed).
//
// Threads: read() from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera::models {

struct DataOptions {
  std::string source = "demo";
  std::int64_t vocabulary = 0;
  std::int64_t sequence = 0;
  std::int64_t batch = 0;  // sequences per step, of all ranks
  std::uint64_t seed = 0;
};

class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::string name() const = 0;
  // sequence + 1 tokens: inputs are all but the last, targets all but the first.
  // REQUIRES: 0 <= index < batch, tokens.size() == sequence + 1.
  virtual void read(std::int64_t step, std::int64_t index, std::span<std::int64_t> tokens) = 0;
};

std::unique_ptr<TokenSource> open_data(const DataOptions& options);

}  // namespace tessera::models
