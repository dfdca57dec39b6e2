#include "tests/coordinator/coordinator_fixture.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"
#include "testing/memory_store.h"

namespace tessera::coordinator {

using shard::Param;

bool NvmeChoice::has(int id) const { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

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

NvmeSide::NvmeSide(const NvmeChoice& choice, shard::ParamTable& params, device::Device& device)
    : choice_(choice), params_(params), device_(device) {
  std::size_t bytes = 0;
  for (const int id : choice_.ids) {
    bytes += tier::whole_blocks(params[id].layout().shard_bytes());
  }
  if (choice_.is_held) {
    auto store = std::make_unique<HeldStore>(bytes);
    held_store_ = store.get();
    store_ = std::move(store);
  } else {
    store_ = std::make_unique<tier::MemoryStore>(device, Tier::kHost, Role::kShard, bytes);
  }
  shards_ = std::make_unique<shard::ShardStore>(*store_);
  for (const int id : choice_.ids) {
    shards_->add(params[id]);
  }
  loader_ =
      std::make_unique<ShardLoader>(params, *shards_, device, Tier::kHost, choice_.buffer_bytes);
  worker_ = std::thread([this] { carry_out(); });
}

NvmeSide::~NvmeSide() {
  release_all();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
  device_.stream(device::StreamKind::kWrite).synchronize();
}

void NvmeSide::start_update(Param& param, const std::vector<float>& values) {
  const std::size_t bytes = param.layout().shard_bytes();
  device::Memory& source = sources_.emplace_back(
      device_.allocate(Tier::kHost, tier::whole_blocks(bytes), Role::kStaging, tier::kBlockBytes));
  if (bytes > 0) {
    std::memset(source.data(), 0, source.bytes());
    std::memcpy(source.data(), values.data(), bytes);
  }
  auto done = std::make_shared<Completion>();
  param.set_updated(Pending(done));
  {
    const std::lock_guard lock(mutex_);
    updates_.push_back({&param, source.data(), std::move(done)});
  }
  changed_.notify_all();
}

void NvmeSide::hold_update(int id) {
  const std::lock_guard lock(mutex_);
  held_.insert(id);
}

void NvmeSide::fail_update(int id) {
  const std::lock_guard lock(mutex_);
  failing_.insert(id);
}

void NvmeSide::release_updates() {
  {
    const std::lock_guard lock(mutex_);
    held_.clear();
  }
  changed_.notify_all();
}

void NvmeSide::release_all() {
  release_updates();
  if (held_store_ != nullptr) {
    held_store_->release();
  }
}

void NvmeSide::carry_out() {
  for (;;) {
    Update next;
    bool fails = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] {
        return updates_.empty() ? is_closing_ : !held_.contains(updates_.front().param->id());
      });
      if (updates_.empty()) {
        return;
      }
      next = std::move(updates_.front());
      updates_.pop_front();
      fails = failing_.contains(next.param->id());
    }
    try {
      TESSERA_CHECK(!fails, IoError, "the update of parameter '", next.param->name(),
                    "' fails because a test says so");
      update(next);
      next.done->succeed();
    } catch (...) {
      next.done->fail(std::current_exception());
    }
  }
}

void NvmeSide::update(const Update& update) {
  const Param& param = *update.param;
  const shard::Layout& layout = param.layout();
  shards_->wait_written(param.id());
  for (std::int64_t begin = 0; choice_.passes_on && begin < layout.shard_numel();
       begin += shard::kShardStep) {
    const std::int64_t numel = std::min(shard::kShardStep, layout.shard_numel() - begin);
    const std::byte* values =
        update.values + static_cast<std::size_t>(begin) * bytes_of(layout.dtype());
    if (!params_.pass_on(param.id(), begin, numel, values)) {
      break;
    }
  }
  std::ignore = shards_->start_write(param, 0, layout.shard_numel(), update.values);
}

CoordinatorFixture::CoordinatorFixture(Group& group, const Model& model,
                                       const CoordinatorOptions& options, DeviceChoice choice,
                                       const Clock* clock, const GatherPhases& phases,
                                       Group* secondary, bool is_quantised)
    : RankFixture(group.rank(), group.size(), choice),
      group_(group),
      model_(model),
      options_(options),
      is_quantised_(is_quantised) {
  for (std::size_t i = 0; i < model_.numels.size(); ++i) {
    Param& param = add_param(model_.numels[i],
                             model_.nvme.has(static_cast<int>(i)) ? Tier::kNvme : Tier::kDevice);
    Placement placement = param.placement();
    placement.secondary = model_.secondary;
    param.set_placement(placement);
  }
  coordinator_ =
      std::make_unique<Coordinator>(CoordinatorParts{group,
                                                     device(),
                                                     params(),
                                                     clock != nullptr ? *clock : this->clock(),
                                                     spans(),
                                                     logger(),
                                                     phases,
                                                     nullptr,
                                                     {},
                                                     secondary,
                                                     is_quantised ? &codec_ : nullptr},
                                    options);
  for (std::size_t i = 0; i < model_.units.size(); ++i) {
    UnitTraits traits;
    traits.dynamic = i < model_.is_dynamic.size() && model_.is_dynamic[i];
    if (traits.dynamic) {
      for (const int id : model_.units[i]) {
        params()[id].set_dynamic(true);
      }
    }
    coordinator_->add_unit(detail::concat("u", i), model_.units[i], traits);
  }
  if (!model_.nvme.ids.empty()) {
    nvme_ = std::make_unique<NvmeSide>(model_.nvme, params(), device());
    coordinator_->set_tier(tier_options());
  }
  update();
}

CoordinatorFixture::~CoordinatorFixture() {
  if (nvme_) {
    nvme_->release_all();
  }
  device().stream(device::StreamKind::kWrite).synchronize();
}

// Room for everything, so that only the limit counts.
TierOptions CoordinatorFixture::tier_options() const {
  TierOptions tier;
  tier.loader = &nvme_->loader();
  tier.live_limit_bytes = options_.budgets.live_limit_bytes;
  for (int id = 0; id < params().num_params(); ++id) {
    tier.arena_bytes += 2 * device::round_to_arena(params()[id].layout().full_bytes());
  }
  return tier;
}

float CoordinatorFixture::value(int param, std::int64_t element, int version) {
  return static_cast<float>(param * 1000 + element) + static_cast<float>(version) * 0.25F;
}

void CoordinatorFixture::update() {
  ++version_;
  for (int id = 0; id < params().num_params(); ++id) {
    Param& param = params()[id];
    std::vector<float>& source =
        sources_.emplace_back(static_cast<std::size_t>(param.layout().shard_numel()), 0.0F);
    const shard::ElementRange range = param.range();
    for (std::int64_t i = 0; i < range.numel; ++i) {
      source[static_cast<std::size_t>(i)] = value(id, range.begin + i, version_);
    }
    if (param.is_on_nvme()) {
      nvme_->start_update(param, source);
      continue;
    }
    param.set_updated(device().start_copy(param.shard(), source.data(),
                                          param.layout().shard_bytes(),
                                          device().stream(device::StreamKind::kWrite)));
  }
}

void CoordinatorFixture::wait_for_updates() const {
  for (int id = 0; id < params().num_params(); ++id) {
    params()[id].updated().wait();
  }
}

void CoordinatorFixture::expect_right_values(UnitId unit) const {
  for (const int id : model_.units[static_cast<std::size_t>(unit)]) {
    const float* data = shown(id);
    const Param& param = params()[id];
    ASSERT_EQ(param.state(), shard::ParamState::kAvailable) << param.name();
    std::vector<float> expected = exact_values(id);
    const auto shard_numel = static_cast<std::ptrdiff_t>(param.layout().shard_numel());
    if (is_quantised_ && group_.size() > 1 && shard_numel > 0) {  // each shard by itself
      for (auto shard = expected.begin(); shard != expected.end(); shard += shard_numel) {
        const std::vector<float> decoded =
            comm::through_plain_codec(std::vector<float>(shard, shard + shard_numel));
        std::copy(decoded.begin(), decoded.end(), shard);
      }
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(data[i], expected[i]) << param.name() << " element " << i << " rank " << rank();
    }
  }
}

void CoordinatorFixture::expect_exact_values(int id) const {
  const std::vector<float> expected = exact_values(id);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(shown(id)[i], expected[i]) << "p" << id << " element " << i << " rank " << rank();
  }
}

std::vector<float> CoordinatorFixture::exact_values(int id) const {
  const shard::Layout& layout = params()[id].layout();
  std::vector<float> values(static_cast<std::size_t>(layout.padded_numel()));
  for (std::int64_t i = 0; i < layout.numel(); ++i) {
    values[static_cast<std::size_t>(i)] = value(id, i, version_);
  }
  return values;
}

void CoordinatorFixture::end(UnitId unit, Phase phase) {
  expect_right_values(unit);
  coordinator_->end_use(unit, phase);
}

void CoordinatorFixture::run(const std::vector<UnitId>& units, Phase phase) {
  for (const UnitId unit : units) {
    begin(unit, phase);
    end(unit, phase);
  }
}

void CoordinatorFixture::train(std::vector<UnitId> units) {
  run(units, Phase::kForward);
  std::reverse(units.begin(), units.end());
  run(units, Phase::kBackward);
}

void CoordinatorFixture::train_overlapping() {
  const auto last = static_cast<UnitId>(num_units() - 1);
  begin(0, Phase::kForward);
  for (UnitId unit = 1; unit <= last; ++unit) {
    run({unit}, Phase::kForward);
  }
  end(0, Phase::kForward);
  for (UnitId unit = last; unit > 0; --unit) {
    begin(unit, Phase::kBackward);
    run({unit}, Phase::kForward);
    if (unit < last) {
      end(unit + 1, Phase::kBackward);
    }
  }
  begin(0, Phase::kBackward);
  end(1, Phase::kBackward);
  end(0, Phase::kBackward);
}

void CoordinatorFixture::train_at_planned_cost() {
  const bool gathers = num_ranks() > 1 || nvme_;
  std::uint64_t sent_before = 0;
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(coordinator_->trace_mode(),
              gathers && step > 0 ? TraceMode::kComplete : TraceMode::kRecord);
    if (step == 2) {  // what was started ahead is counted where it was started
      std::ignore = take_stats();
      sent_before = group_.wire_bytes().payload;
    }
    if (step == 2 && nvme_) {
      nvme_->loader().wait_idle();
      std::ignore = nvme_->loader().take_stats(Tier::kNvme);
    }
    train();
    end_step_and_update();
  }
  const CoordinatorStats stats = take_stats();
  const PrefetchPlan plan = expected_plan(uses_of_step());
  const PlanSums sums = sums_of(plan, params());
  EXPECT_EQ(stats.num_uses, 2 * uses_of_step().size());
  EXPECT_EQ(stats.prefetch_drops, 0U);
  EXPECT_EQ(stats.arena_overflows, 0U);
  EXPECT_EQ(stats.num_gathers, gathers ? 2 * sums.num_gathers : 0U);
  EXPECT_EQ(stats.gathered_bytes, 2 * sums.gathered_bytes);
  EXPECT_EQ(stats.prefetch_misses, 2 * sums.num_demanded);
  EXPECT_EQ(stats.prefetch_hits, 2 * sums.num_prefetched);
  const auto ranks = static_cast<std::uint64_t>(num_ranks());
  EXPECT_EQ(group_.wire_bytes().payload - sent_before, stats.gathered_bytes / ranks * (ranks - 1));
  if (!gathers) {
    EXPECT_EQ(stats.full_bytes_peak, largest_unit_bytes());
    EXPECT_EQ(coordinator_->arena_bytes(), 0U);
  } else if (!nvme_) {
    EXPECT_EQ(stats.full_bytes_peak, plan.peak_bytes);
    EXPECT_LE(stats.full_bytes_peak,
              std::max(largest_unit_bytes(), options_.budgets.live_limit_bytes));
    EXPECT_EQ(stats.arena_misplaced, 0U) << "uses follow each other: every gather gets its offset";
  } else {
    nvme_->loader().wait_idle();
    const LoaderStats loads = nvme_->loader().take_stats(Tier::kNvme);
    EXPECT_EQ(loads.loaded_bytes, 2 * sums.nvme_bytes);
    EXPECT_LE(loads.from_update_bytes + loads.read_ahead_bytes, loads.loaded_bytes);
    EXPECT_TRUE(model_.nvme.passes_on || loads.from_update_bytes == 0);
  }
}

void CoordinatorFixture::end_step_and_update() {
  coordinator_->end_step();
  for (int id = 0; id < params().num_params(); ++id) {
    EXPECT_EQ(params()[id].state(), shard::ParamState::kReleased) << params()[id].name();
    EXPECT_EQ(shown(id), nullptr) << params()[id].name();
  }
  EXPECT_EQ(coordinator_->full_bytes(), 0);
  update();
  coordinator_->start_ahead();
}

std::vector<UnitId> CoordinatorFixture::all_units() const {
  std::vector<UnitId> units;
  for (std::size_t i = 0; i < num_units(); ++i) {
    units.push_back(static_cast<UnitId>(i));
  }
  return units;
}

std::int64_t CoordinatorFixture::largest_unit_bytes() const {
  std::int64_t largest = 0;
  for (const std::vector<int>& ids : model_.units) {
    std::int64_t bytes = 0;
    for (const int id : ids) {
      bytes += full_bytes_of(params()[id]);
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

std::vector<Use> CoordinatorFixture::uses_of_step() const {
  std::vector<Use> uses;
  for (const UnitId unit : all_units()) {
    uses.push_back({unit, Phase::kForward});
  }
  for (std::size_t i = num_units(); i-- > 0;) {
    uses.push_back({static_cast<UnitId>(i), Phase::kBackward});
  }
  return uses;
}

PrefetchPlan CoordinatorFixture::expected_plan(const std::vector<Use>& uses) const {
  std::vector<std::int64_t> bytes;
  for (int id = 0; id < params().num_params(); ++id) {
    bytes.push_back(params()[id].shard_is_full() ? 0 : full_bytes_of(params()[id]));
  }
  std::vector<std::vector<int>> units = model_.units;
  std::int64_t largest = 0;
  for (std::vector<int>& ids : units) {
    std::sort(ids.begin(), ids.end());
    std::erase_if(ids, [this](int id) { return params()[id].shard_is_full(); });
    std::int64_t sum = 0;
    for (const int id : ids) {
      sum += bytes[static_cast<std::size_t>(id)];
    }
    largest = std::max(largest, sum);
  }
  const std::vector<bool> persists =
      choose_persistent(bytes, options_.persist_param_bytes, options_.persist_model_bytes,
                        room_to_persist(options_.budgets.live_limit_bytes, largest));
  std::vector<PlanParam> plan_params;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const auto rounded =
        static_cast<std::int64_t>(device::round_to_arena(static_cast<std::size_t>(bytes[i])));
    plan_params.push_back({nvme_ ? rounded : bytes[i],
                           persists[i] && !params()[static_cast<int>(i)].shard_is_full()});
  }
  PlanInput input{uses, units, plan_params, options_.budgets};
  if (!nvme_) {
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
      sums.nvme_bytes += params[id].is_on_nvme() ? params[id].layout().shard_bytes() : 0;
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

Param& LoaderFixture::add(std::int64_t numel, DType dtype) {
  Param& param = add_param(numel, Tier::kNvme, dtype);
  shards_.add(param);
  versions_.push_back(0);
  return param;
}

void LoaderFixture::add_blocks(int num_params) {
  for (int i = 0; i < num_params; ++i) {
    add(kBlockNumel);
  }
}

ShardLoader& LoaderFixture::make_loader(std::size_t buffer_bytes) {
  for (int id = 0; id < params().num_params(); ++id) {
    set_version(id, 1);
  }
  loader_ = std::make_unique<ShardLoader>(params(), shards_, device(), Tier::kHost, buffer_bytes);
  return *loader_;
}

std::vector<std::byte> LoaderFixture::shard_of(int id, int version) const {
  const Param& param = params()[id];
  const std::size_t element = bytes_of(param.layout().dtype());
  std::vector<std::byte> bytes(param.layout().shard_bytes());
  const std::size_t used = static_cast<std::size_t>(param.range().numel) * element;
  for (std::size_t i = 0; i < used; ++i) {
    const std::size_t mixed = (i / 251 + i) * 7 + static_cast<std::size_t>(id * 31 + version);
    bytes[i] = static_cast<std::byte>(mixed % 255 + 1);
  }
  return bytes;
}

void LoaderFixture::set_version(int id, int version) {
  const std::vector<std::byte> bytes = shard_of(id, version);
  if (!bytes.empty()) {
    std::memcpy(store_.bytes_at(static_cast<std::uint64_t>(shards_.offset(id))), bytes.data(),
                bytes.size());
  }
  versions_[static_cast<std::size_t>(id)] = version;
}

void LoaderFixture::write_version(int id, int version) {
  const Param& param = params()[id];
  const std::vector<std::byte> bytes = shard_of(id, version);
  device::Memory& source = sources_.emplace_back(device().allocate(
      Tier::kHost, tier::whole_blocks(bytes.size()), Role::kStaging, tier::kBlockBytes));
  if (!bytes.empty()) {
    std::memset(source.data(), 0, source.bytes());
    std::memcpy(source.data(), bytes.data(), bytes.size());
  }
  std::ignore = shards_.start_write(param, 0, param.layout().shard_numel(), source.data());
  versions_[static_cast<std::size_t>(id)] = version;
}

int LoaderFixture::pass_on(int id, int version, std::int64_t step) {
  const Param& param = params()[id];
  const std::vector<std::byte> bytes = shard_of(id, version);
  const std::size_t element = bytes_of(param.layout().dtype());
  int num_taken = 0;
  for (std::int64_t begin = 0; begin < param.range().numel; begin += step) {
    const std::int64_t numel = std::min(step, param.range().numel - begin);
    const std::byte* values = bytes.data() + static_cast<std::size_t>(begin) * element;
    num_taken += params().pass_on(id, begin, numel, values) ? 1 : 0;
  }
  return num_taken;
}

std::unique_ptr<LoaderFixture::Destination> LoaderFixture::start_load(int id, Pending ready) {
  auto destination = std::make_unique<Destination>();
  destination->bytes.assign(params()[id].layout().shard_bytes() + Destination::kBehind,
                            std::byte{0x5a});
  destination->loaded =
      loader_->start_load(params()[id], destination->bytes.data(), std::move(ready));
  return destination;
}

void LoaderFixture::expect_version(int id, const Destination& destination, int version) const {
  std::vector<std::byte> expected = shard_of(id, version);
  const std::size_t shard_bytes = expected.size();
  expected.resize(shard_bytes + Destination::kBehind, std::byte{0x5a});
  ASSERT_EQ(destination.bytes.size(), expected.size());
  const auto [wrong, right] =
      std::mismatch(destination.bytes.begin(), destination.bytes.end(), expected.begin());
  ASSERT_TRUE(wrong == destination.bytes.end())
      << "p" << id << " version " << version << " byte " << wrong - destination.bytes.begin()
      << " of " << shard_bytes << " is " << std::to_integer<int>(*wrong) << " and not "
      << std::to_integer<int>(*right);
}

void LoaderFixture::expect_load(int id) {
  const std::unique_ptr<Destination> destination = start_load(id);
  destination->loaded.wait();
  expect_version(id, *destination, versions_[static_cast<std::size_t>(id)]);
}

std::vector<std::string> LoaderFixture::extent_names(std::initializer_list<int> ids) const {
  std::vector<std::string> names;
  for (const int id : ids) {
    names.push_back(extent_name(id));
  }
  return names;
}

}  // namespace tessera::coordinator
