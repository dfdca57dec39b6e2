// One rank's model in plain memory, with an optimizer whose result can be computed by hand: value
// of element e of parameter p after v updates. Uses compare what they see with that.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/device/device_cpu.h"
#include "testing/mock_device.h"
#include "tests/coordinator/stored_side.h"

namespace tessera::coordinator {

enum class DeviceChoice : std::uint8_t { kCpu, kLazy, kRandom };
std::string name_of(DeviceChoice choice);
std::unique_ptr<device::Device> make_device(DeviceChoice choice, int rank);

class PlainTensor final : public shard::FullTensor {
 public:
  explicit PlainTensor(const float** data) : data_(data) {}
  void attach(void* data) override { *data_ = static_cast<const float*>(data); }
  void detach() override { *data_ = nullptr; }

 private:
  const float** data_;
};

struct Model {
  std::vector<std::int64_t> numels;     // by parameter
  std::vector<std::vector<int>> units;  // by unit: its parameters
  std::vector<bool> is_dynamic = {};    // by unit; none: no unit is
  StoredChoice stored = {};
};

// `num_layers` units of one parameter, all of the same size.
Model equal_layers(int num_layers, std::int64_t numel);
// A tied parameter (first and last unit), small ones, one smaller than the ranks, one without
// elements, a unit without parameters.
Model mixed_model();

// Nothing is merged; as many may persist as there are.
CoordinatorOptions make_options(std::int64_t bucket, std::int64_t limit, std::int64_t reuse,
                                std::int64_t persist);

class RankWorld {
 public:
  RankWorld(comm::Group& group, const Model& model, const CoordinatorOptions& options,
            DeviceChoice choice = DeviceChoice::kCpu, const Clock* clock = nullptr);
  // The last update reads and writes memory that goes with this object.
  ~RankWorld();

  Coordinator& coordinator() { return *coordinator_; }
  shard::ParamTable& params() { return params_; }
  const Model& model() const { return model_; }
  // REQUIRES: the model has stored parameters.
  StoredSide& stored() { return *stored_; }
  const std::vector<std::string>& log_lines() const { return *log_lines_; }

  // Forward: units in order. Backward: the reverse. Each use ends before the next begins.
  void run_step();
  void begin(UnitId unit, Phase phase);
  // Compares the unit's parameters, then ends the use.
  void end(UnitId unit, Phase phase);
  void expect_right_values(UnitId unit) const;
  // end_step(), then every shard gets the values of the next version, late if the device is, and
  // the next pass is started ahead.
  void end_step_and_update();
  // The optimizer's half alone.
  void update();

  std::int64_t full_bytes_of(UnitId unit) const;
  std::int64_t largest_unit_bytes() const;
  // The plan that the coordinator should follow for `uses`.
  PrefetchPlan expected_plan(const std::vector<Use>& uses) const;
  static std::vector<Use> uses_of_step(std::size_t num_units);

 private:
  static float value(int param, std::int64_t element, int version);
  TierOptions tier_options() const;

  comm::Group& group_;
  const Model model_;
  const CoordinatorOptions options_;
  std::unique_ptr<device::Device> device_;
  std::vector<const float*> data_;  // by parameter: what its tensor shows; null: released
  shard::ParamTable params_;
  SteadyClock clock_;
  Spans spans_;
  std::shared_ptr<std::vector<std::string>> log_lines_;
  std::vector<std::vector<float>> sources_;  // what updates are copied from
  int version_ = 0;
  std::unique_ptr<StoredSide> stored_;  // outlives the coordinator
  std::unique_ptr<Coordinator> coordinator_;
};

// What one step of a plan costs.
struct PlanSums {
  std::uint64_t num_gathers = 0;
  std::uint64_t num_demanded = 0;
  std::uint64_t num_prefetched = 0;
  std::uint64_t gathered_bytes = 0;
};
PlanSums sums_of(const PrefetchPlan& plan, const shard::ParamTable& params);

// A model of equal layers that divide by 2, 3 and 4 ranks without padding.
constexpr std::int64_t kLayerNumel = 480;
constexpr std::int64_t kLayerBytes = kLayerNumel * 4;
constexpr int kLayers = 6;
inline const std::vector<UnitId> kInOrder = {0, 1, 2, 3, 4, 5};

inline void run_forward(RankWorld& world, const std::vector<UnitId>& units) {
  for (const UnitId unit : units) {
    world.begin(unit, Phase::kForward);
    world.end(unit, Phase::kForward);
  }
}

}  // namespace tessera::coordinator
