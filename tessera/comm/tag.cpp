#include "tessera/comm/tag.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Longer names than any model has; so one of them never takes all the room.
constexpr std::size_t kMaxNameBytes = 240;
constexpr std::string_view kLeftOut = "...";

// More ranks than these are counted, not listed.
constexpr std::size_t kMaxRanksListed = 8;

// The rank whose call most ranks made, the lowest of them.
std::size_t most_frequent(std::span<const CallTag> tags) {
  std::size_t best = 0;
  std::ptrdiff_t most = 0;
  for (std::size_t rank = 0; rank < tags.size(); ++rank) {
    const auto count = std::count(tags.begin(), tags.end(), tags[rank]);
    if (count > most) {
      most = count;
      best = rank;
    }
  }
  return best;
}

// One side of a mismatch.
struct Side {
  const CallTag& tag;
  const CallWords& words;
  int world_rank;

  std::string call() const { return describe(tag, words.unit(), words.parameter()); }
};

// The first tensor of the two calls that is not the same, as far as names say it.
std::string first_difference(const Side& odd, const Side& meant) {
  const auto ours = odd.words.tensors();
  const auto theirs = meant.words.tensors();
  const auto name_at = [](const std::vector<std::string_view>& names, std::size_t i) {
    return i < names.size() ? detail::concat("'", names[i], "'") : std::string("none");
  };
  for (std::size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
    // A name may be missing because it found no room: that says nothing.
    if ((i >= ours.size() && i < odd.tag.num_tensors) ||
        (i >= theirs.size() && i < meant.tag.num_tensors)) {
      break;
    }
    if (i >= ours.size() || i >= theirs.size() || ours[i] != theirs[i]) {
      return detail::concat("; the first tensor that differs is number ", i + 1, ": ",
                            name_at(ours, i), " on rank ", odd.world_rank, ", ", name_at(theirs, i),
                            " on rank ", meant.world_rank);
    }
  }
  if (odd.call() == meant.call()) {
    return "; they have the same names, but are not about the same sizes or parameters";
  }
  return "";
}

}  // namespace

std::string_view to_string(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kGatherTo:
      return "gather_to";
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
  }
  return "unknown";
}

std::string describe(const CallTag& tag) {
  if (tag.op == Op::kBarrier) {
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

CallWords::CallWords(const Label& label) {
  bytes_.reserve(label.unit.size() + label.parameter.size() + 2);
  add(label.unit);
  add(label.parameter);
}

CallWords CallWords::from_bytes(std::string bytes) {
  CallWords words;
  words.bytes_ = std::move(bytes);
  return words;
}

void CallWords::add(std::string_view name) {
  hash_ = hash_bytes(name.data(), name.size(), hash_);
  // Once one name is left out all are: the n-th word must be the n-th tensor's.
  full_ = full_ || bytes_.size() + std::min(name.size(), kMaxNameBytes) + 1 > kMaxBytes;
  if (full_) {
    return;
  }
  if (name.size() > kMaxNameBytes) {
    bytes_ += kLeftOut;
    name.remove_prefix(name.size() - kMaxNameBytes + kLeftOut.size());
  }
  bytes_ += name;
  bytes_ += '\0';
}

std::vector<std::string_view> CallWords::fields() const {
  std::vector<std::string_view> fields;
  std::string_view rest = bytes_;
  for (std::size_t end = rest.find('\0'); end != rest.npos; end = rest.find('\0')) {
    fields.push_back(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  return fields;
}

std::string_view CallWords::unit() const {
  const auto all = fields();
  return all.empty() ? std::string_view() : all[0];
}

std::string_view CallWords::parameter() const {
  const auto all = fields();
  return all.size() < 2 ? std::string_view() : all[1];
}

std::vector<std::string_view> CallWords::tensors() const {
  const auto all = fields();
  return {all.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(2, all.size())),
          all.end()};
}

bool tags_agree(std::span<const CallTag> tags) {
  return std::all_of(tags.begin(), tags.end(),
                     [&](const CallTag& tag) { return tag == tags.front(); });
}

std::optional<std::string> find_mismatch(std::span<const CallTag> tags,
                                         std::span<const CallWords> words,
                                         std::span<const int> world_ranks) {
  if (tags_agree(tags)) {
    return std::nullopt;
  }
  const std::size_t reference = most_frequent(tags);
  std::vector<int> meant;
  std::vector<int> odd;
  std::size_t first_odd = tags.size();
  for (std::size_t rank = 0; rank < tags.size(); ++rank) {
    const bool same = tags[rank] == tags[reference];
    (same ? meant : odd).push_back(world_ranks[rank]);
    first_odd = same ? first_odd : std::min(first_odd, rank);
  }
  static const CallWords no_words;
  const auto side = [&](std::size_t rank) {
    return Side{tags[rank], words.empty() ? no_words : words[rank], world_ranks[rank]};
  };
  const Side one = side(first_odd);
  const Side other = side(reference);
  std::string text = detail::concat("rank ", one.world_rank, " called ", one.call(), " where ",
                                    list_ranks(meant), " called ", other.call());
  text +=
      words.empty() ? "; what they call it could not be exchanged" : first_difference(one, other);
  if (odd.size() > 1) {
    odd.erase(odd.begin());
    text +=
        detail::concat("; ", list_ranks(odd), odd.size() == 1 ? " differs" : " differ", ", too");
  }
  return text + "; all ranks must call the same collectives in the same order";
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMaxRanksListed); ++i) {
    text += detail::concat(i == 0 ? "" : ", ", ranks[i]);
  }
  if (ranks.size() > kMaxRanksListed) {
    text += detail::concat(" and ", ranks.size() - kMaxRanksListed, " more");
  }
  return text;
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
