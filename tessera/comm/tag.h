// A few bytes that say what one rank believes the n-th collective of a group to be.
//
// Ranks exchange tags with every collective and compare them before they trust its result, so two
// ranks that call different things get an error that names both calls instead of wrong numbers.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/core/dtype.h"

namespace tessera::comm {

enum class Op : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kSplit,
};
std::string_view to_string(Op op);  // a literal: its data() ends with a zero

// What a collective is for, in the user's words. Empty fields are left out of messages. The names
// must outlive the call only; they are copied.
struct Label {
  std::string_view unit;
  std::string_view parameter;
};

struct CallTag {
  std::uint64_t sequence = 0;    // the n-th call of this group on this rank, from 1
  std::uint64_t shape_hash = 0;  // element counts of all tensors, dtypes, root, reduction
  std::uint64_t label_hash = 0;  // unit and parameter
  std::uint64_t total_bytes = 0;
  std::uint32_t num_tensors = 0;
  Op op = Op::kBarrier;
  DType dtype = DType::kUInt8;
  std::uint16_t root = 0;

  bool operator==(const CallTag&) const = default;
};
static_assert(sizeof(CallTag) == 40, "a tag travels as plain bytes: no padding in it");

// "all_gather #17 (3 tensors, 12288 bytes, fp32)"
std::string describe(const CallTag& tag);
// The same with " for unit 'h.3', parameter 'attn.weight'" behind it.
std::string describe(const CallTag& tag, std::string_view unit, std::string_view parameter);

// What rank `rank` sees when it compares the tags of all ranks: nothing if they agree, else the
// first rank that differs and both calls. `world_ranks` gives the names of the ranks.
std::optional<std::string> find_mismatch(std::span<const CallTag> tags, int rank,
                                         std::span<const int> world_ranks);

// FNV-1a over bytes; the same on every machine.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed);

}  // namespace tessera::comm
