// The one fixture of this folder, in two parts.
//
//   CoordinatorFixture   one rank's model, with an optimizer whose result can be computed by hand:
//                        the value of element e of parameter p after v updates. Uses compare what
//                        they see with that.
//   LoaderFixture        shards of one rank, a store that can be held and let fail, and a loader.
//
// Threads: one fixture per rank's thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/option_table.h"
#include "tessera/tier/store.h"
#include "testing/held_store.h"
#include "testing/plain_codec.h"
#include "testing/thread_backend.h"
#include "tests/support/rank_fixture.h"

namespace tessera::coordinator {

using comm::Group;
using comm::run_ranks;
using device::Completion;
using device::Pending;
using support::DeviceChoice;
using support::HeldStore;
using support::name_of;
using support::StoreCall;

// Which parameters are on NVMe, and how.
struct NvmeChoice {
  std::vector<int> ids = {};  // none: no parameter is, and there is no loader
  std::size_t buffer_bytes = kSmallestLoaderBytes;
  bool passes_on = true;  // whether the update hands over what it writes
  bool is_held = false;   // a HeldStore; else as late as the device is

  bool has(int id) const;
};

struct Model {
  std::vector<std::int64_t> numels;     // by parameter
  std::vector<std::vector<int>> units;  // by unit: its parameters
  std::vector<bool> is_dynamic = {};    // by unit; none: no unit is
  NvmeChoice nvme = {};
  Tier secondary = Tier::kDevice;  // of secondary shards, where there are any
};

// `num_layers` units of one parameter, all of the same size.
Model equal_layers(int num_layers, std::int64_t numel);
// A tied parameter (first and last unit), small ones, one smaller than the ranks, one without
// elements, a unit without parameters.
Model mixed_model();

// Nothing is merged; as many may persist as there are.
CoordinatorOptions make_options(std::int64_t bucket, std::int64_t limit, std::int64_t reuse = 0,
                                std::int64_t persist = 0);

// The store and loader of one rank, and an update that writes on a thread of its own, in the order
// of registration, and passes values on if it may.
class NvmeSide {
 public:
  NvmeSide(const NvmeChoice& choice, shard::ParamTable& params, device::Device& device);
  // All updates come to their end first.
  ~NvmeSide();
  NvmeSide(const NvmeSide&) = delete;
  NvmeSide& operator=(const NvmeSide&) = delete;

  ShardLoader& loader() { return *loader_; }
  // REQUIRES: NvmeChoice::is_held.
  HeldStore& held_store() { return *held_store_; }
  std::uint64_t written_bytes() const { return store_->stats().written_bytes; }
  std::uint64_t read_bytes() const { return store_->stats().read_bytes; }

  // Counts one update of the parameter, whose shard will be `values`.
  void start_update(shard::Param& param, const std::vector<float>& values);
  // The update of this parameter, and those of the ones behind it, wait.
  void hold_update(int id);
  void release_updates();
  // The same for what the store holds, too: nothing waits for a test any more.
  void release_all();
  // Updates of this parameter fail from now on.
  void fail_update(int id);

 private:
  struct Update {
    const shard::Param* param = nullptr;
    std::byte* values = nullptr;
    std::shared_ptr<Completion> done;
  };
  void carry_out();
  void update(const Update& update);

  const NvmeChoice choice_;
  shard::ParamTable& params_;
  device::Device& device_;
  std::deque<device::Memory> sources_;  // of writes, which may be under way until the end
  std::unique_ptr<tier::Store> store_;
  HeldStore* held_store_ = nullptr;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<ShardLoader> loader_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<Update> updates_;
  std::set<int> held_;
  std::set<int> failing_;
  bool is_closing_ = false;

  std::thread worker_;
};

class CoordinatorFixture : public support::RankFixture {
 public:
  CoordinatorFixture(Group& group, const Model& model, const CoordinatorOptions& options,
                     DeviceChoice choice = DeviceChoice::kCpu, const Clock* clock = nullptr,
                     const GatherPhases& phases = {}, Group* secondary = nullptr,
                     bool is_quantised = false);
  // The last update reads and writes memory that goes with this object.
  ~CoordinatorFixture();

  Group& group() { return group_; }
  Coordinator& coordinator() { return *coordinator_; }
  CoordinatorStats take_stats() { return coordinator_->take_stats(); }
  const Model& model() const { return model_; }
  std::size_t num_units() const { return model_.units.size(); }
  // REQUIRES: the model has parameters on NVMe.
  NvmeSide& nvme() { return *nvme_; }
  ShardLoader& loader() { return nvme_->loader(); }
  HeldStore& store() { return nvme_->held_store(); }

  void begin(UnitId unit, Phase phase) { coordinator_->begin_use(unit, phase); }
  // Compares the unit's parameters, then ends the use.
  void end(UnitId unit, Phase phase);
  void expect_right_values(UnitId unit) const;
  // What a hold shows: never quantised.
  void expect_exact_values(int param) const;
  // Uses that end before the next begins.
  void run(const std::vector<UnitId>& units, Phase phase = Phase::kForward);
  // Forward: units in order. Backward: the reverse.
  void train(std::vector<UnitId> units);
  void train() { train(all_units()); }
  // Units inside units, a backward that ends late, a forward that runs again inside a backward.
  void train_overlapping();
  // Four steps with updates between them; the last two follow the plan, and cost what it says.
  void train_at_planned_cost();
  // end_step(), then every shard gets the values of the next version, late if the device is, and
  // the next pass is started ahead.
  void end_step_and_update();
  // The optimizer's half alone.
  void update();
  void wait_for_updates() const;

  std::vector<UnitId> all_units() const;
  std::int64_t largest_unit_bytes() const;
  // Of train().
  std::vector<Use> uses_of_step() const;
  // The plan that the coordinator should follow for `uses`.
  PrefetchPlan expected_plan(const std::vector<Use>& uses) const;

 private:
  static float value(int param, std::int64_t element, int version);
  // Of all ranks' shards, padding included.
  std::vector<float> exact_values(int param) const;
  TierOptions tier_options() const;

  Group& group_;
  const Model model_;
  const CoordinatorOptions options_;
  const comm::PlainCodec codec_{&device()};  // where gathers are quantised
  const bool is_quantised_;
  std::vector<std::vector<float>> sources_;  // what updates are copied from
  int version_ = 0;
  std::unique_ptr<NvmeSide> nvme_;  // outlives the coordinator
  std::unique_ptr<Coordinator> coordinator_;
};

// Runs `body` on every rank, in groups of these sizes.
template <typename Body>
void on_ranks(const std::vector<int>& sizes, const Model& model, const CoordinatorOptions& options,
              DeviceChoice choice, const Body& body) {
  for (const int size : sizes) {
    run_ranks(size, [&](Group& group) {
      CoordinatorFixture rank(group, model, options, choice);
      body(rank);
    });
  }
}
template <typename Body>
void on_ranks(const std::vector<int>& sizes, const Model& model, const CoordinatorOptions& options,
              const Body& body) {
  on_ranks(sizes, model, options, DeviceChoice::kCpu, body);
}

// What one step of a plan costs.
struct PlanSums {
  std::uint64_t num_gathers = 0;
  std::uint64_t num_demanded = 0;
  std::uint64_t num_prefetched = 0;
  std::uint64_t gathered_bytes = 0;
  std::uint64_t nvme_bytes = 0;  // of shards that are loaded from there
};
PlanSums sums_of(const PrefetchPlan& plan, const shard::ParamTable& params);

// A model of equal layers that divide by 2, 3 and 4 ranks without padding.
constexpr std::int64_t kLayerNumel = 480;
constexpr std::int64_t kLayerBytes = kLayerNumel * 4;
constexpr int kLayers = 6;
inline const std::vector<UnitId> kInOrder = {0, 1, 2, 3, 4, 5};
inline Model six_layers() { return equal_layers(kLayers, kLayerNumel); }

constexpr std::int64_t kBlockNumel = 1024;  // fp32 elements of one block of a store

class LoaderFixture : public support::RankFixture {
 public:
  explicit LoaderFixture(int rank = 0, int num_ranks = 1) : RankFixture(rank, num_ranks) {}

  // On NVMe.
  shard::Param& add(std::int64_t numel, DType dtype = DType::kFloat32);
  void add_blocks(int num_params);  // of one block each
  // After the parameters; each gets its first values, straight in the store.
  ShardLoader& make_loader(std::size_t buffer_bytes);
  // For shards of one block: two tiles, and a window of so many.
  ShardLoader& make_loader_for_blocks(std::size_t num_blocks) {
    return make_loader(kSmallestLoaderBytes + num_blocks * tier::kBlockBytes);
  }

  HeldStore& store() { return store_; }
  ShardLoader& loader() { return *loader_; }
  void destroy_loader() { loader_.reset(); }

  // The shard of `version`: elements are different, padding is zero.
  std::vector<std::byte> shard_of(int id, int version) const;
  // As if it had always been there.
  void set_version(int id, int version);
  // What an update does: writes through the store; the source is kept.
  void write_version(int id, int version);
  // Passes all of it on, `step` elements at once; how many pieces were taken.
  int pass_on(int id, int version, std::int64_t step = kBlockNumel);

  // Memory that a shard is loaded to, with bytes behind it that must not be touched.
  struct Destination {
    static constexpr std::size_t kBehind = 64;
    std::vector<std::byte> bytes;
    Pending loaded;
  };
  std::unique_ptr<Destination> start_load(int id, Pending ready = {});
  void expect_version(int id, const Destination& destination, int version) const;
  // Loads the shard, which must be of its last version.
  void expect_load(int id);
  std::string extent_name(int id) const {
    return detail::concat("parameter '", params()[id].name(), "'");
  }
  std::vector<std::string> extent_names(std::initializer_list<int> ids) const;

 private:
  std::vector<device::Memory> sources_;  // of writes that may be under way
  HeldStore store_{std::size_t{256} << 10};
  shard::ShardStore shards_{store_};
  std::vector<int> versions_;
  std::unique_ptr<ShardLoader> loader_;
};

// A chance for what must not happen, before a test looks whether it has. No right program depends
// on how long it takes.
inline void let_others_run() {
  for (int i = 0; i < 2000; ++i) {
    std::this_thread::yield();
  }
}

}  // namespace tessera::coordinator
