// Coordinator's methods, and what it tells about itself.

#include <utility>

#include "tessera/coordinator/coordinator_impl.h"

namespace tessera::coordinator {

UnitReport Coordinator::Impl::report(UnitId id) const {
  UnitReport report;
  report.info = &units_[id];
  for (const OpenUse& open : open_) {
    report.is_open = report.is_open || open.use.unit == id;
  }
  if (gatherer_) {
    report.forward = gatherer_->counts(id, Phase::kForward);
    report.backward = gatherer_->counts(id, Phase::kBackward);
    report.inference = gatherer_->counts(id, Phase::kInference);
  }
  return report;
}

void Coordinator::settle_units() { impl_->units().settle(); }
void Coordinator::set_tier(const TierOptions& tier) { impl_->set_tier(tier); }

bool Coordinator::Impl::persists(int param) const {
  return units_.is_sealed() && persists_[static_cast<std::size_t>(param)];
}

void Coordinator::Impl::forget_device_copies() {
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    parts_.params[id].forget_device_copy();
  }
  if (loader_ != nullptr) {
    loader_->forget_device_copies();
  }
}

CoordinatorStats Coordinator::Impl::take_stats() {
  CoordinatorStats stats;
  stats.num_uses = std::exchange(num_uses_, 0);
  stats.num_meetings = std::exchange(num_meetings_, 0);
  stats.full_bytes_peak = std::exchange(own_bytes_peak_, own_bytes_);
  if (!gatherer_) {
    return stats;
  }
  GatherCounts* const phases[kNumPhases] = {&stats.forward, &stats.backward, &stats.inference};
  GatherCounts all;
  for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
    *phases[phase] = gatherer_->take_counts(static_cast<Phase>(phase));
    all += *phases[phase];
  }
  stats.prefetch_hits = all.hits;
  stats.prefetch_misses = all.misses;
  stats.prefetch_drops = all.drops;
  stats.num_gathers = all.demand_calls + all.prefetch_calls;
  stats.gathered_bytes = all.demand_bytes + all.prefetch_bytes;
  stats.exposed_wait_s = all.demand_wait_s + all.prefetch_wait_s;
  stats.full_bytes_peak += gatherer_->take_peak();
  stats.brought_bytes = loader_ != nullptr ? loader_->take_stats(Tier::kHost).loaded_bytes : 0;
  const std::uint64_t overflows = gatherer_->num_overflows();
  stats.arena_overflows = overflows - std::exchange(overflows_taken_, overflows);
  const std::uint64_t misplaced = gatherer_->num_misplaced();
  stats.arena_misplaced = misplaced - std::exchange(misplaced_taken_, misplaced);
  return stats;
}

Coordinator::Coordinator(const CoordinatorParts& parts, const CoordinatorOptions& options)
    : impl_(std::make_unique<Impl>(parts, options)) {}
Coordinator::~Coordinator() = default;

UnitId Coordinator::add_unit(std::string name, const std::vector<int>& params, UnitTraits traits) {
  return impl_->units().add(std::move(name), params, std::move(traits));
}
void Coordinator::add_external(UnitId unit, int param) { impl_->units().add_param(unit, param); }
void Coordinator::set_leaves(const LeafRule& rule) { impl_->units().mark_leaves(rule, true); }
void Coordinator::clear_leaves(const LeafRule& rule) { impl_->units().mark_leaves(rule, false); }
std::vector<std::string> Coordinator::leaves() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_units(); ++i) {
    const UnitInfo& each = unit(static_cast<UnitId>(i));
    if (each.is_leaf) {
      names.push_back(each.name);
    }
  }
  return names;
}
void Coordinator::set_dynamic_gradients(DynamicGradients gradients) {
  impl_->set_dynamic_gradients(std::move(gradients));
}
void Coordinator::seal() { impl_->seal(); }
std::size_t Coordinator::num_units() const { return impl_->units().num_units(); }
const UnitInfo& Coordinator::unit(UnitId unit) const { return impl_->units()[unit]; }
UnitReport Coordinator::report(UnitId unit) const { return impl_->report(unit); }
bool Coordinator::persists(int param) const { return impl_->persists(param); }
bool Coordinator::is_inside_open_leaf(UnitId unit) const {
  return impl_->is_inside_open_leaf(impl_->units()[unit]);
}
void Coordinator::begin_use(UnitId unit, Phase phase) { impl_->begin_use(unit, phase); }
void Coordinator::end_use(UnitId unit, Phase phase) { impl_->end_use(unit, phase); }
void Coordinator::begin_hold(const std::vector<int>& params, const std::string& what) {
  impl_->begin_hold(params, what);
}
void Coordinator::end_hold(const std::vector<int>& params, const std::string& what, bool changed) {
  impl_->end_hold(params, what, changed);
}
bool Coordinator::begin_resident() { return impl_->begin_resident(); }
void Coordinator::end_resident() { impl_->end_resident(); }
bool Coordinator::is_resident() const { return impl_->is_resident(); }
void Coordinator::end_step() { impl_->end_step(); }
void Coordinator::forget_device_copies() { impl_->forget_device_copies(); }
void Coordinator::start_ahead() { impl_->start_ahead(); }
void Coordinator::release_all() { impl_->abandon(); }
bool Coordinator::meets() { return impl_->meets(); }
void Coordinator::meet(MeetingPoint point, std::string_view what) { impl_->meet(point, what); }
MeetingPoint Coordinator::follow() { return impl_->follow(); }
TraceMode Coordinator::trace_mode() const { return impl_->trace_mode(); }
CoordinatorStats Coordinator::take_stats() { return impl_->take_stats(); }
std::int64_t Coordinator::full_bytes() const { return impl_->full_bytes(); }
std::int64_t Coordinator::unused_bytes() const { return impl_->unused_bytes(); }
std::size_t Coordinator::num_calls_in_flight() const { return impl_->num_calls_in_flight(); }
std::size_t Coordinator::arena_bytes() const { return impl_->arena_bytes(); }

}  // namespace tessera::coordinator
