#include "tests/coordinator/coordinator_world.h"

#include <algorithm>

#include "tessera/core/option_table.h"
#include "tessera/device/arena_map.h"

namespace tessera::coordinator {

std::string name_of(DeviceChoice choice) {
  switch (choice) {
    case DeviceChoice::kCpu:
      return "Cpu";
    case DeviceChoice::kLazy:
      return "Lazy";
    case DeviceChoice::kRandom:
      return "Random";
  }
  return "Unknown";
}

std::unique_ptr<device::Device> make_device(DeviceChoice choice, int rank) {
  if (choice == DeviceChoice::kCpu) {
    return device::make_cpu_device({});
  }
  device::MockDeviceOptions options;
  options.mode =
      choice == DeviceChoice::kLazy ? device::LateMode::kLazy : device::LateMode::kRandom;
  options.seed = static_cast<std::uint64_t>(rank) + 5;
  return device::make_mock_device(options);
}

CoordinatorOptions make_options(std::int64_t bucket, std::int64_t limit, std::int64_t reuse,
                                std::int64_t persist) {
  CoordinatorOptions options;
  options.budgets.bucket_bytes = bucket;
  options.budgets.merge_below_bytes = 0;
  options.budgets.live_limit_bytes = limit;
  options.budgets.reuse_distance_bytes = reuse;
  options.persist_param_bytes = persist;
  options.persist_model_bytes = kUnlimitedBytes;
  return options;
}

Model equal_layers(int num_layers, std::int64_t numel) {
  Model model;
  for (int i = 0; i < num_layers; ++i) {
    model.numels.push_back(numel);
    model.units.push_back({i});
  }
  return model;
}

Model mixed_model() {
  Model model;
  model.numels = {300, 3, 200, 7, 0, 150, 33, 260, 1, 90};
  model.units = {{0}, {1, 2, 3}, {}, {4, 5, 6}, {7, 8}, {0, 9}};
  return model;
}

RankWorld::RankWorld(comm::Group& group, const Model& model, const CoordinatorOptions& options,
                     DeviceChoice choice, const Clock* clock)
    : group_(group),
      model_(model),
      options_(options),
      device_(make_device(choice, group.rank())),
      data_(model.numels.size(), nullptr),
      params_(group.rank(), group.size(), *device_),
      spans_(clock_, 64),
      log_lines_(std::make_shared<std::vector<std::string>>()) {
  for (std::size_t i = 0; i < model_.numels.size(); ++i) {
    shard::ParamSpec spec;
    spec.name = detail::concat("p", i);
    spec.numel = model_.numels[i];
    spec.placement.parameter = model_.stored.has(static_cast<int>(i)) ? Tier::kNvme : Tier::kDevice;
    params_.add(spec, std::make_unique<PlainTensor>(&data_[i]));
  }
  LogOptions log;
  log.sink = [lines = log_lines_](std::string_view line) { lines->emplace_back(line); };
  LogContext context;
  context.rank = group.rank();
  context.world = group.size();
  const CoordinatorParts parts{
      group, *device_, params_, clock != nullptr ? *clock : clock_, spans_, Logger(log, context)};
  coordinator_ = std::make_unique<Coordinator>(parts, options);
  for (std::size_t i = 0; i < model_.units.size(); ++i) {
    UnitTraits traits;
    traits.dynamic = i < model_.is_dynamic.size() && model_.is_dynamic[i];
    if (traits.dynamic) {
      for (const int id : model_.units[i]) {
        params_[id].set_dynamic(true);
      }
    }
    coordinator_->add_unit(detail::concat("u", i), model_.units[i], traits);
  }
  if (!model_.stored.ids.empty()) {
    stored_ = std::make_unique<StoredSide>(model_.stored, params_, *device_);
    coordinator_->set_tier(tier_options());
  }
  update();
}

RankWorld::~RankWorld() {
  if (stored_) {
    stored_->release_all();
  }
  device_->stream(device::StreamKind::kWrite).synchronize();
}

// Room for everything, so that only the limit counts.
TierOptions RankWorld::tier_options() const {
  TierOptions tier;
  tier.loader = &stored_->loader();
  tier.live_limit_bytes = options_.budgets.live_limit_bytes;
  for (int id = 0; id < params_.num_params(); ++id) {
    tier.arena_bytes += 2 * device::round_to_arena(params_[id].layout().full_bytes());
  }
  return tier;
}

float RankWorld::value(int param, std::int64_t element, int version) {
  return static_cast<float>(param * 1000 + element) + static_cast<float>(version) * 0.25F;
}

void RankWorld::update() {
  ++version_;
  for (int id = 0; id < params_.num_params(); ++id) {
    shard::Param& param = params_[id];
    std::vector<float>& source =
        sources_.emplace_back(static_cast<std::size_t>(param.layout().shard_numel()), 0.0F);
    const shard::ElementRange range = param.range();
    for (std::int64_t i = 0; i < range.numel; ++i) {
      source[static_cast<std::size_t>(i)] = value(id, range.begin + i, version_);
    }
    if (param.is_on_nvme()) {
      stored_->start_update(param, source);
      continue;
    }
    param.set_updated(device_->start_copy(param.shard(), source.data(),
                                          param.layout().shard_bytes(),
                                          device_->stream(device::StreamKind::kWrite)));
  }
}

void RankWorld::begin(UnitId unit, Phase phase) { coordinator_->begin_use(unit, phase); }

void RankWorld::expect_right_values(UnitId unit) const {
  for (const int id : model_.units[static_cast<std::size_t>(unit)]) {
    const float* data = data_[static_cast<std::size_t>(id)];
    const shard::Param& param = params_[id];
    ASSERT_EQ(param.state(), shard::ParamState::kAvailable) << param.name();
    for (std::int64_t i = 0; i < param.layout().padded_numel(); ++i) {
      ASSERT_EQ(data[i], i < param.layout().numel() ? value(id, i, version_) : 0.0F)
          << param.name() << " element " << i << " rank " << group_.rank();
    }
  }
}

void RankWorld::end(UnitId unit, Phase phase) {
  expect_right_values(unit);
  coordinator_->end_use(unit, phase);
}

void RankWorld::run_step() {
  for (const Use& use : uses_of_step(model_.units.size())) {
    begin(use.unit, use.phase);
    end(use.unit, use.phase);
  }
}

void RankWorld::end_step_and_update() {
  coordinator_->end_step();
  for (int id = 0; id < params_.num_params(); ++id) {
    EXPECT_EQ(params_[id].state(), shard::ParamState::kReleased) << params_[id].name();
    EXPECT_EQ(data_[static_cast<std::size_t>(id)], nullptr) << params_[id].name();
  }
  EXPECT_EQ(coordinator_->full_bytes(), 0);
  update();
  coordinator_->start_ahead();
}

std::int64_t RankWorld::full_bytes_of(UnitId unit) const {
  std::int64_t bytes = 0;
  for (const int id : model_.units[static_cast<std::size_t>(unit)]) {
    bytes += static_cast<std::int64_t>(params_[id].layout().full_bytes());
  }
  return bytes;
}

std::int64_t RankWorld::largest_unit_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < model_.units.size(); ++i) {
    bytes = std::max(bytes, full_bytes_of(static_cast<UnitId>(i)));
  }
  return bytes;
}

std::vector<Use> RankWorld::uses_of_step(std::size_t num_units) {
  std::vector<Use> uses;
  for (std::size_t i = 0; i < num_units; ++i) {
    uses.push_back({static_cast<UnitId>(i), Phase::kForward});
  }
  for (std::size_t i = num_units; i-- > 0;) {
    uses.push_back({static_cast<UnitId>(i), Phase::kBackward});
  }
  return uses;
}

PrefetchPlan RankWorld::expected_plan(const std::vector<Use>& uses) const {
  std::vector<std::int64_t> bytes;
  for (int id = 0; id < params_.num_params(); ++id) {
    const auto full = static_cast<std::int64_t>(params_[id].layout().full_bytes());
    bytes.push_back(params_[id].shard_is_full() ? 0 : full);
  }
  std::vector<std::vector<int>> units = model_.units;
  std::int64_t largest = 0;
  for (std::vector<int>& ids : units) {
    std::sort(ids.begin(), ids.end());
    std::erase_if(ids, [this](int id) { return params_[id].shard_is_full(); });
    std::int64_t sum = 0;
    for (const int id : ids) {
      sum += bytes[static_cast<std::size_t>(id)];
    }
    largest = std::max(largest, sum);
  }
  const std::vector<bool> persists =
      choose_persistent(bytes, options_.persist_param_bytes, options_.persist_model_bytes,
                        room_to_persist(options_.budgets.live_limit_bytes, largest));
  std::vector<PlanParam> params;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto rounded =
        static_cast<std::int64_t>(device::round_to_arena(static_cast<std::size_t>(bytes[i])));
    params.push_back({stored_ ? rounded : bytes[i],
                      persists[i] && !params_[static_cast<int>(i)].shard_is_full()});
  }
  PlanInput input{uses, units, params, options_.budgets};
  if (!stored_) {
    return make_plan(input);
  }
  input.arena_bytes = static_cast<std::int64_t>(coordinator_->arena_bytes());
  return make_placed_plan(input);
}

PlanSums sums_of(const PrefetchPlan& plan, const shard::ParamTable& params) {
  PlanSums sums;
  const auto add = [&](const GatherList& list) {
    sums.num_gathers += list.empty() ? 0 : 1;
    for (const int id : list) {
      sums.gathered_bytes += params[id].layout().full_bytes();
    }
  };
  std::vector<PlannedUse> all = plan.uses;
  all.push_back(plan.ahead);
  for (const PlannedUse& use : all) {
    add(use.demand);
    sums.num_demanded += use.demand.size();
    for (const GatherList& list : use.prefetch) {
      add(list);
      sums.num_prefetched += list.size();
    }
  }
  return sums;
}

}  // namespace tessera::coordinator
