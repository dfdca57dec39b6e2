// Checksums of checkpoints.
//
//   Xxh3         XXH3 of 64 bits over a run of bytes: one fragment of a file, as it lies there
//   ContentHash  of a tensor's bytes by their place in the whole tensor: parts that ranks hash
//                separately add up to the same number, whoever had which part. It compares what
//                ranks hold after a load with what ranks held at the save, on any number of ranks.
//
// docs/formats.md defines both. They find damage, not anybody who means it.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera::checkpoint {

class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;

  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;  // of all bytes so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::uint64_t xxh3(std::span<const std::byte> bytes);

// As manifests and messages have it: 16 digits, 0-9 and a-f.
std::string checksum_text(std::uint64_t value);

inline constexpr std::size_t kContentWordBytes = 8;

// The sum of optim/content_hash.cuh's terms, which also the kernels add up.
class ContentHash {
 public:
  // `begin`: where the first byte lies in the tensor. REQUIRES: a multiple of 8.
  explicit ContentHash(std::uint64_t begin = 0);

  // The next bytes, in pieces of any size.
  void add(std::span<const std::byte> bytes);
  // The last word is filled with zeros: only what ends the tensor may end inside a word.
  std::uint64_t value() const;

 private:
  std::uint64_t next_word_;
  std::uint64_t sum_ = 0;
  std::uint64_t partial_ = 0;
  std::size_t partial_bytes_ = 0;
};

}  // namespace tessera::checkpoint
