#include "tessera/coordinator/consensus.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/coordinator/gatherer.h"
#include "tessera/coordinator/prefetcher.h"
#include "tessera/coordinator/unit_table.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {
namespace {

constexpr std::size_t kBits = 63;  // of a word; the sign stays clear

// kind: 8 bits; phase or point: 8 bits; unit or detail: 32 bits. Of kJoin all but the kind is 0.
std::int64_t encode(const Intent& intent) {
  const bool is_point = intent.kind == Intent::Kind::kPoint;
  const auto kind = static_cast<std::int64_t>(intent.kind);
  const auto more = is_point ? static_cast<std::int64_t>(intent.point)
                             : static_cast<std::int64_t>(intent.use.phase);
  const std::int64_t what = is_point ? std::int64_t{intent.detail} : std::int64_t{intent.use.unit};
  return kind | more << 8 | what << 16;
}

Intent decode(std::int64_t word) {
  Intent intent;
  intent.kind = static_cast<Intent::Kind>(word & 0xff);
  const auto more = static_cast<std::uint8_t>(word >> 8 & 0xff);
  if (intent.kind == Intent::Kind::kPoint) {
    intent.point = static_cast<ConsensusPoint>(more);
    intent.detail = static_cast<std::uint32_t>(word >> 16);
  } else {
    intent.use = {static_cast<UnitId>(word >> 16), static_cast<Phase>(more)};
  }
  return intent;
}

std::vector<int> dynamic_ids(const shard::ParamTable& params) {
  std::vector<int> ids;
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].dynamic()) {
      ids.push_back(id);
    }
  }
  return ids;
}

}  // namespace

Consensus::Consensus(const Parts& parts)
    : parts_(parts),
      dynamic_params_(dynamic_ids(parts.params)),
      num_words_(1 + (dynamic_params_.size() + kBits - 1) / kBits),
      host_(num_words_ * static_cast<std::size_t>(parts.all_ranks.size())),
      words_(parts.device.allocate(Tier::kDevice, host_.size() * sizeof(std::int64_t),
                                   Role::kStaging)) {}

std::uint64_t Consensus::take_num_rounds() { return std::exchange(num_rounds_, 0); }

Consensus::Round Consensus::exchange(const Intent& own) {
  std::fill(host_.begin(), host_.end(), 0);
  const std::size_t first = num_words_ * static_cast<std::size_t>(parts_.all_ranks.rank());
  host_[first] = encode(own);
  if (parts_.gradients.pending) {
    for (const int id : parts_.gradients.pending()) {
      const auto found = std::lower_bound(dynamic_params_.begin(), dynamic_params_.end(), id);
      const auto flag = static_cast<std::size_t>(found - dynamic_params_.begin());
      host_[first + 1 + flag / kBits] |= std::int64_t{1} << flag % kBits;
    }
  }
  device::Stream& stream = parts_.device.stream(device::StreamKind::kGather);
  auto* words = reinterpret_cast<std::int64_t*>(words_.data());
  parts_.device
      .start_copy(words + first, host_.data() + first, num_words_ * sizeof(std::int64_t), stream)
      .wait();
  comm::CallOptions options;
  options.label.unit = "consensus round";
  options.stream = &stream;
  const comm::Gather gather{words + first, words, static_cast<std::int64_t>(num_words_),
                            DType::kInt64};
  parts_.all_ranks.start_all_gather({&gather, 1}, options).wait();
  parts_.device.start_copy(host_.data(), words, host_.size() * sizeof(std::int64_t), stream).wait();
  ++num_rounds_;

  Round round;
  const auto num_ranks = static_cast<std::size_t>(parts_.all_ranks.size());
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    round.intents.push_back(decode(host_[rank * num_words_]));
  }
  for (std::size_t flag = 0; flag < dynamic_params_.size(); ++flag) {
    bool is_set = false;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      is_set = is_set || (host_[rank * num_words_ + 1 + flag / kBits] >> flag % kBits & 1) != 0;
    }
    if (is_set) {
      round.with_gradient.push_back(dynamic_params_[flag]);
    }
  }
  return round;
}

Intent Consensus::agree(const Intent& own) {
  for (;;) {
    // Ranks that had the room have started these already; here they all have.
    parts_.prefetcher.start_held_back();
    const Round round = exchange(own);
    const bool some_are_dynamic =
        std::any_of(round.intents.begin(), round.intents.end(),
                    [](const Intent& intent) { return intent.kind == Intent::Kind::kDynamic; });
    if (some_are_dynamic) {
      gather_announced(round);
      if (own.kind == Intent::Kind::kDynamic) {
        return own;
      }
      continue;
    }
    check_same(round);
    reduce_gradients(round);
    const auto agreed = std::find_if(round.intents.begin(), round.intents.end(),
                                     [](const auto& i) { return i.kind != Intent::Kind::kJoin; });
    return agreed == round.intents.end() ? Intent() : *agreed;
  }
}

void Consensus::gather_announced(const Round& round) {
  std::map<UnitId, std::vector<std::uint8_t>> wants;  // by unit: by rank
  for (std::size_t rank = 0; rank < round.intents.size(); ++rank) {
    const Intent& intent = round.intents[rank];
    if (intent.kind == Intent::Kind::kDynamic) {
      auto& of_unit = wants[intent.use.unit];
      of_unit.resize(round.intents.size());
      of_unit[rank] = 1;
    }
  }
  for (const auto& [id, all] : wants) {
    std::vector<std::uint8_t> ranks;
    for (const int rank : parts_.ranks_of_copy) {
      ranks.push_back(all[static_cast<std::size_t>(rank)]);
    }
    if (std::count(ranks.begin(), ranks.end(), 0) == static_cast<std::ptrdiff_t>(ranks.size())) {
      continue;  // another copy's ranks do
    }
    const UnitInfo& unit = parts_.units[id];
    parts_.gatherer.start_to(unit.ids, ranks, unit.name,
                             {id, parts_.prefetcher.phase(), Reason::kDemand});
  }
}

void Consensus::check_same(const Round& round) const {
  const Intent* first = nullptr;
  bool is_same = true;
  for (const Intent& intent : round.intents) {
    if (intent.kind == Intent::Kind::kJoin) {
      continue;
    }
    is_same = is_same && (first == nullptr || *first == intent);
    first = first == nullptr ? &intent : first;
  }
  if (is_same) {
    return;
  }
  std::string where;
  for (std::size_t rank = 0; rank < round.intents.size(); ++rank) {
    where += detail::concat(where.empty() ? "" : "; ", "rank ", rank, " is at ",
                            text_of(round.intents[rank]));
  }
  throw CommError(detail::concat("ranks do not use the same units: ", where,
                                 ". Declare units that only some ranks use in "
                                 "unit.dynamic_names"));
}

std::string Consensus::text_of(const Intent& intent) const {
  switch (intent.kind) {
    case Intent::Kind::kStatic:
    case Intent::Kind::kDynamic: {
      const UnitInfo& unit = parts_.units[intent.use.unit];
      const std::string text = parts_.units.text_of(intent.use);
      return unit.ids.empty()
                 ? text
                 : detail::concat(text, " (parameter '", parts_.params[unit.ids[0]].name(), "')");
    }
    case Intent::Kind::kPoint:
      switch (intent.point) {
        case ConsensusPoint::kWeights:
          return "its first backward";
        case ConsensusPoint::kBackwardEnd:
          return "the end of backward";
        case ConsensusPoint::kStep:
          return "step()";
        case ConsensusPoint::kHold:
          return "a call for whole parameters";
        case ConsensusPoint::kNone:
        case ConsensusPoint::kAllDone:
          break;
      }
      return "an unknown point";
    case Intent::Kind::kJoin:
      return "no unit, without data";
  }
  return "?";
}

void Consensus::reduce_gradients(const Round& round) const {
  if (round.with_gradient.empty()) {
    return;
  }
  TESSERA_INVARIANT(parts_.gradients.reduce != nullptr, "gradients of dynamic parameters, from '",
                    parts_.params[round.with_gradient.front()].name(),
                    "' on, and nobody to reduce them");
  parts_.gradients.reduce(round.with_gradient);
}

}  // namespace tessera::coordinator
