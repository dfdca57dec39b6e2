// Token sequences to train on. A sequence depends on (seed, its number) alone, where the number is
// step * batch + index in the batch; so every number of ranks trains on the same data, and any rank
// can make any sequence.
//
//   demo            a small corpus that is generated: sentences of a toy grammar (demo_corpus.h),
//   in
//                   28 symbols; a model learns it visibly within tens of steps
//   random          uniform tokens, exactly as bench/peers.py makes them (for seed 0)
//   text:PATH       bytes of a text file as tokens
//   tokens:PATH     a memory-mapped file of little-endian 16-bit tokens; refused if it looks like
//   one
//                   of 32-bit tokens (every second one is zero)
//   tokens16:PATH   the same without that check
//   tokens32:PATH   little-endian 32-bit tokens
//
// The prefix decides; without one, a path that ends in .txt is text and one that ends in .bin
// holds 16-bit tokens. A PATH that is a directory stands for the regular files in it, in byte order
// of their names, without hidden ones and without subdirectories. Several sources are files one
// after the other in the given order; no sequence crosses from one file into the next.
//
// Order of sequences from files:
//   kDrawn   each begins at a position drawn by counter-based random numbers, among all positions
//            of all files; they overlap, and a run has no epochs
//   kEpochs  each file is cut into consecutive sequences (the last target of one is the first input
//            of the next), and an epoch takes each once, in an order drawn by (seed, epoch). Left
//            out are the end of each file that fills no sequence and, in every epoch, the last
//            sequences of its order that fill no batch: others in every epoch
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
#include <vector>

namespace tessera::models {

enum class DataOrder : std::uint8_t { kDrawn, kEpochs };

struct DataOptions {
  std::vector<std::string> sources = {"demo"};
  std::int64_t vocabulary = 0;
  std::int64_t sequence = 0;
  std::int64_t batch = 0;  // sequences per step, of all ranks
  std::uint64_t seed = 0;
  DataOrder order = DataOrder::kDrawn;
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

// What the tokens of a source stand for.
enum class TokenMeaning : std::uint8_t { kNumber, kByte, kDemoSymbol };
// Opens nothing. ConfigError for what is no source.
TokenMeaning token_meaning(const std::string& source);

// Sequences of one epoch, those included that fill no batch; 0: the source has no end (demo,
// random). Opens files and looks at their sizes, not at their tokens.
std::int64_t count_sequences(const DataOptions& options);

}  // namespace tessera::models
