#include "tessera/comm/tag.h"

#include "tessera/core/error.h"

namespace tessera::comm {

std::string_view to_string(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kBarrier:
      return "barrier";
    case Op::kSplit:
      return "split";
  }
  return "unknown";
}

std::string describe(const CallTag& tag) {
  if (tag.op == Op::kBarrier || tag.op == Op::kSplit) {
    return detail::concat(to_string(tag.op), " #", tag.sequence);
  }
  return detail::concat(to_string(tag.op), " #", tag.sequence, " (", tag.num_tensors,
                        tag.num_tensors == 1 ? " tensor, " : " tensors, ", tag.total_bytes,
                        " bytes, ", to_string(tag.dtype),
                        tag.op == Op::kBroadcast ? detail::concat(", from rank ", tag.root) : "",
                        ")");
}

std::string describe(const CallTag& tag, std::string_view unit, std::string_view parameter) {
  std::string text = describe(tag);
  if (!unit.empty()) {
    text += detail::concat(" for unit '", unit, "'");
  }
  if (!parameter.empty()) {
    text += detail::concat(unit.empty() ? " for" : ",", " parameter '", parameter, "'");
  }
  return text;
}

std::optional<std::string> find_mismatch(std::span<const CallTag> tags, int rank,
                                         std::span<const int> world_ranks) {
  const CallTag& mine = tags[static_cast<std::size_t>(rank)];
  for (std::size_t other = 0; other < tags.size(); ++other) {
    const CallTag& theirs = tags[other];
    if (theirs == mine) {
      continue;
    }
    CallTag same_label = theirs;
    same_label.label_hash = mine.label_hash;
    const bool label_only = same_label == mine;
    return detail::concat("rank ", world_ranks[other], " called ", describe(theirs),
                          label_only ? " for another unit or parameter" : "", " where rank ",
                          world_ranks[static_cast<std::size_t>(rank)], " called ", describe(mine),
                          "; all ranks must call the same collectives in the same order");
  }
  return std::nullopt;
}

std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed) {
  const auto* cursor = static_cast<const unsigned char*>(data);
  std::uint64_t hash = seed ^ 0xcbf29ce484222325ULL;
  for (std::size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ cursor[i]) * 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace tessera::comm
