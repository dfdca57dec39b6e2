// Meetings: see meeting.h for the rules.

#include <algorithm>
#include <map>

#include "tessera/comm/tag.h"
#include "tessera/coordinator/coordinator_impl.h"
#include "tessera/core/error.h"

namespace tessera::coordinator {

using shard::Param;
using shard::ParamState;

bool Coordinator::Impl::meets() {
  seal();
  return meets_;
}

void Coordinator::Impl::meet(MeetingPoint point, std::string_view what) {
  if (!meets() || resident_) {
    return;
  }
  Intent intent;
  intent.kind = Intent::Kind::kPoint;
  intent.point = point;
  intent.detail = static_cast<std::uint32_t>(comm::hash_bytes(what.data(), what.size(), 0));
  agree(intent);
}

Intent Coordinator::Impl::agree(const Intent& own) {
  for (;;) {
    // Ranks that had the room have started these already; here they all have.
    start_prefetches(RoomCheck::kSkipped);
    std::vector<int> flags;
    if (gradients_.pending) {
      for (const int id : gradients_.pending()) {
        const auto place = std::lower_bound(dynamic_params_.begin(), dynamic_params_.end(), id);
        flags.push_back(static_cast<int>(place - dynamic_params_.begin()));
      }
    }
    const Meeting::Round round = meeting_->exchange(own, flags);
    ++num_meetings_;
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
    reduce_dynamic(round.flags);
    for (const Intent& intent : round.intents) {
      if (intent.kind != Intent::Kind::kFollow) {
        return intent;
      }
    }
    return {};
  }
}

void Coordinator::Impl::gather_announced(const Meeting::Round& round) {
  std::map<UnitId, std::vector<std::uint8_t>> wants;  // by unit: by rank
  for (std::size_t rank = 0; rank < round.intents.size(); ++rank) {
    const Intent& intent = round.intents[rank];
    if (intent.kind == Intent::Kind::kDynamic) {
      auto& of_unit = wants[intent.use.unit];
      of_unit.resize(round.intents.size());
      of_unit[rank] = 1;
    }
  }
  for (const auto& [id, ranks] : wants) {
    const UnitInfo& unit = units_[id];
    gatherer_->start_to(unit.ids, ranks, unit.name, {id, running_.phase, Reason::kDemand});
  }
}

void Coordinator::Impl::begin_dynamic(const UnitInfo& unit, const Use& use) {
  const bool is_there = std::all_of(unit.params.begin(), unit.params.end(), [](const Param* param) {
    return param->state() == ParamState::kAvailable;
  });
  if (is_there) {
    return;
  }
  Intent intent;
  intent.kind = Intent::Kind::kDynamic;
  intent.use = use;
  agree(intent);
  ++gatherer_->counts(use.unit, use.phase).missed_uses;
  gatherer_->finish(unit.params, unit.label, {use.unit, use.phase, Reason::kDemand});
}

void Coordinator::Impl::check_same(const Meeting::Round& round) const {
  const Intent* first = nullptr;
  bool is_same = true;
  for (const Intent& intent : round.intents) {
    if (intent.kind == Intent::Kind::kFollow) {
      continue;
    }
    is_same = is_same && (first == nullptr || *first == intent);
    first = first == nullptr ? &intent : first;
  }
  if (is_same) {
    return;
  }
  std::string places;
  for (std::size_t rank = 0; rank < round.intents.size(); ++rank) {
    places += detail::concat(places.empty() ? "" : "; ", "rank ", rank, " is at ",
                             text_of(round.intents[rank]));
  }
  throw CommError(detail::concat("ranks do not use the same units: ", places,
                                 ". Declare units that only some ranks use in "
                                 "unit.dynamic_names"));
}

std::string Coordinator::Impl::text_of(const Intent& intent) const {
  switch (intent.kind) {
    case Intent::Kind::kStatic:
    case Intent::Kind::kDynamic: {
      const UnitInfo& unit = units_[intent.use.unit];
      return unit.ids.empty() ? text_of(intent.use)
                              : detail::concat(text_of(intent.use), " (parameter '",
                                               parts_.params[unit.ids[0]].name(), "')");
    }
    case Intent::Kind::kPoint:
      switch (intent.point) {
        case MeetingPoint::kWeights:
          return "its first backward";
        case MeetingPoint::kBackwardEnd:
          return "the end of backward";
        case MeetingPoint::kStep:
          return "step()";
        case MeetingPoint::kHold:
          return "a call for whole parameters";
        case MeetingPoint::kNone:
        case MeetingPoint::kAllDone:
          break;
      }
      return "an unknown point";
    case Intent::Kind::kFollow:
      return "no unit, without data";
  }
  return "?";
}

void Coordinator::Impl::reduce_dynamic(const std::vector<bool>& flags) {
  std::vector<int> ids;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i]) {
      ids.push_back(dynamic_params_[i]);
    }
  }
  if (ids.empty()) {
    return;
  }
  TESSERA_INVARIANT(gradients_.reduce != nullptr, "gradients of dynamic parameters, from '",
                    parts_.params[ids.front()].name(), "' on, and nobody to reduce them");
  gradients_.reduce(ids);
}

void Coordinator::Impl::end_followed_use() {
  if (followed_) {
    const Use use = *followed_;
    followed_.reset();
    end_use(use.unit, use.phase);
  }
}

MeetingPoint Coordinator::Impl::follow() {
  seal();
  if (is_alone_) {
    return MeetingPoint::kAllDone;
  }
  TESSERA_CHECK(meets_, ConfigError,
                "this rank has no data, and the others do not ask for it: set "
                "unit.uneven_data=true on all ranks, so that they meet at every unit");
  for (;;) {
    end_followed_use();
    const Intent agreed = agree({});
    if (agreed.kind == Intent::Kind::kFollow) {
      return MeetingPoint::kAllDone;
    }
    if (agreed.kind == Intent::Kind::kPoint) {
      return agreed.point;
    }
    const UnitInfo& unit = units_[agreed.use.unit];
    begin_static(unit, agreed.use);
    open(unit, {agreed.use, OpenKind::kStatic, book_.position() - 1});
    followed_ = agreed.use;
  }
}

}  // namespace tessera::coordinator
