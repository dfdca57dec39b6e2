// A few bytes that say what one rank believes the n-th collective of a group to be, and the words
// for it.
//
// Ranks exchange tags with every collective and compare them before they trust its result, so two
// ranks that call different things get an error that names both calls instead of wrong numbers.
// Names are too long for a tag: it carries their hash, and the words themselves travel only when
// tags differ, because only then does a rank need to know what another one calls its tensors.
//
// Threads: plain data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/core/error.h"

namespace tessera::comm {

enum class Op : std::uint8_t {
  kAllGather,
  kGatherTo,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier,
};
std::string_view to_string(Op op);  // a literal: its data() ends with a zero

// The purpose of a collective, for messages: unit and parameter. Empty fields are left out. The
// names are copied by the call.
struct Label {
  std::string_view unit;
  std::string_view parameter;
};

struct CallTag {
  std::uint64_t sequence = 0;      // the n-th call of this group on this rank, from 1
  std::uint64_t shape_hash = 0;    // element counts of all tensors, dtypes, reduction, who receives
  std::uint64_t label_hash = 0;    // unit, parameter and the names of the tensors
  std::uint64_t content_hash = 0;  // CallOptions::content_hash
  std::uint64_t total_bytes = 0;
  std::uint32_t num_tensors = 0;
  Op op = Op::kBarrier;
  DType dtype = DType::kUInt8;
  std::uint16_t root = 0;

  bool operator==(const CallTag&) const = default;
};
static_assert(sizeof(CallTag) == 48, "a tag travels as plain bytes: no padding in it");

// The words of one call: its label, and what its tensors are called, in order.
//
// They take at most kMaxBytes, so that all ranks can send them in messages of one size: of a name
// that is too long the end is kept, where names differ, and names that find no room are left out.
class CallWords {
 public:
  static constexpr std::size_t kMaxBytes = 4092;

  CallWords() = default;
  explicit CallWords(const Label& label);
  // Makes the words from bytes() of another rank.
  static CallWords from_bytes(std::string bytes);

  void add_tensor(std::string_view name) { add(name); }

  std::string_view unit() const;
  std::string_view parameter() const;
  std::vector<std::string_view> tensors() const;

  // Of all words in full, also of what is left out.
  std::uint64_t hash() const { return hash_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void add(std::string_view name);
  std::vector<std::string_view> fields() const;

  std::string bytes_;  // each word ends with a zero
  std::uint64_t hash_ = 0;
  bool full_ = false;
};

// Words in a message of one size.
struct WordsSlot {
  std::uint32_t num_bytes = 0;
  std::array<char, CallWords::kMaxBytes> bytes{};
};
static_assert(sizeof(WordsSlot) == sizeof(std::uint32_t) + CallWords::kMaxBytes);

// "all_gather #17 (3 tensors, 12288 bytes, fp32)"
std::string describe(const CallTag& tag);
// The same with " for unit 'h.3', parameter 'attn.weight'" behind it.
std::string describe(const CallTag& tag, std::string_view unit, std::string_view parameter);

// What the ranks of a group see when they compare their tags: nothing if they agree, else a
// sentence, the same on every rank. It takes the call that most ranks made (the lowest rank's, if
// none is the most frequent) as the one that was meant, and names the first rank that differs, both
// calls with their words, and the first tensor that is not the same. `words` is one entry per rank,
// or empty if they could not be had. `world_ranks` gives the names of the ranks.
std::optional<std::string> find_mismatch(std::span<const CallTag> tags,
                                         std::span<const CallWords> words,
                                         std::span<const int> world_ranks);
// An error with that sentence, which is complete: callers that rethrow it add no prefix.
class MismatchError : public CommError {
 public:
  using CommError::CommError;
};
bool tags_agree(std::span<const CallTag> tags);

// "rank 3", "ranks 0, 2", and of many the first eight: " and 4 more".
std::string list_ranks(const std::vector<int>& ranks);

// FNV-1a over bytes; the same on every machine.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed);

}  // namespace tessera::comm
