#include "tessera/checkpoint/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

// The header is the library. NOLINTNEXTLINE(readability-identifier-naming)
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/core/error.h"
#include "tessera/optim/content_hash.cuh"

namespace tessera::checkpoint {
namespace {

static_assert(kContentWordBytes == optim::kHashWordBytes);

static_assert(std::endian::native == std::endian::little, "words are hashed as they are in files");

std::uint64_t load_word(const std::byte* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, kContentWordBytes);
  return word;
}

// Compiled once for each instruction set: a product of 64 bits is one instruction for eight words
// in x86-64-v4, and three for one word before.
[[gnu::always_inline]] inline std::uint64_t sum_of_terms(const std::byte* from,
                                                         std::size_t num_words,
                                                         std::uint64_t first) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < num_words; ++i) {
    sum += optim::hash_term(load_word(from + i * kContentWordBytes), first + i);
  }
  return sum;
}

using SumOfTerms = std::uint64_t (*)(const std::byte* from, std::size_t num_words,
                                     std::uint64_t first);

std::uint64_t sum_baseline(const std::byte* from, std::size_t num_words, std::uint64_t first) {
  return sum_of_terms(from, num_words, first);
}
#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v4"))) std::uint64_t sum_v4(const std::byte* from,
                                                               std::size_t num_words,
                                                               std::uint64_t first) {
  return sum_of_terms(from, num_words, first);
}
#endif

SumOfTerms best_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) {
    return sum_v4;
  }
#endif
  return sum_baseline;
}

}  // namespace

struct Xxh3::State {
  XXH3_state_t xxh3;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }

Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) {
    XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
  }
}

std::uint64_t Xxh3::value() const { return XXH3_64bits_digest(&state_->xxh3); }

std::uint64_t xxh3(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_text(std::uint64_t value) {
  std::string text(16, '0');
  for (std::size_t i = text.size(); i-- > 0; value >>= 4) {
    text[i] = "0123456789abcdef"[value & 0xfU];
  }
  return text;
}

ContentHash::ContentHash(std::uint64_t begin) : next_word_(begin / kContentWordBytes) {
  TESSERA_INVARIANT(begin % kContentWordBytes == 0, "a content hash begins at byte ", begin,
                    ", inside a word of ", kContentWordBytes, " bytes");
}

void ContentHash::add(std::span<const std::byte> bytes) {
  while (partial_bytes_ > 0 && !bytes.empty()) {
    partial_ |= std::to_integer<std::uint64_t>(bytes.front()) << (8 * partial_bytes_);
    bytes = bytes.subspan(1);
    if (++partial_bytes_ == kContentWordBytes) {
      sum_ += optim::hash_term(partial_, next_word_++);
      partial_ = 0;
      partial_bytes_ = 0;
    }
  }
  static const SumOfTerms sum = best_sum();
  const std::size_t num_words = bytes.size() / kContentWordBytes;
  sum_ += sum(bytes.data(), num_words, next_word_);
  next_word_ += num_words;
  for (const std::byte byte : bytes.subspan(num_words * kContentWordBytes)) {
    partial_ |= std::to_integer<std::uint64_t>(byte) << (8 * partial_bytes_++);
  }
}

std::uint64_t ContentHash::value() const {
  return partial_bytes_ == 0 ? sum_ : sum_ + optim::hash_term(partial_, next_word_);
}

}  // namespace tessera::checkpoint
