// Training without torch, where every gather, reduction, copy and update may be delayed: what
// coordinator, reducer and optimizer do together, on the mock device and over delayed ranks,
// against the same arithmetic done at once by one thread.
//
// A step runs units forward and backward in an order of its own. Every use reads all it has been
// given and compares it, so a use that came too early meets poison or old values; the gradient of a
// parameter is made from the values that the last use in backward has seen, so that mistakes carry
// on. An update is waited for only before the next backward: the gathers of the next forward must
// order themselves behind it.
//
// Threads: one RankTraining per rank's thread; the plan is shared and read only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/optimizer.h"
#include "testing/mock_device.h"
#include "tests/property/draw.h"

namespace tessera::testing {

enum class DeviceChoice : std::uint8_t { kCpu, kLazy, kRandom };

struct TrainingPlan {
  std::uint64_t seed = 0;
  int ranks = 2;
  int steps = 3;
  int micro_batches = 1;
  std::vector<std::int64_t> numels;     // by parameter
  std::vector<std::vector<int>> units;  // by unit: its parameters, some in several
  // By step modulo their number: units in forward order; each is inside the one before where its
  // number is negative (-1 - unit).
  std::vector<std::vector<int>> orders;
  coordinator::CoordinatorOptions coordinator;
  std::int64_t bucket_bytes = 0;
  std::size_t pack_below_bytes = 0;
  DeviceChoice device = DeviceChoice::kCpu;

  std::string describe() const;
};
TrainingPlan draw_training(std::uint64_t seed);

// values[version][parameter][element]
using Versions = std::vector<std::vector<std::vector<float>>>;
Versions train_at_once(const TrainingPlan& plan);

class RankTraining {
 public:
  RankTraining(comm::Group& group, const TrainingPlan& plan, const Versions& expected);
  ~RankTraining();
  RankTraining(const RankTraining&) = delete;
  RankTraining& operator=(const RankTraining&) = delete;

  // What was seen and not expected; empty: nothing.
  std::vector<std::string> run();

 private:
  void run_step(int step);
  void finish_update();
  void run_micro_batch(int step, int micro_batch);
  void begin(int unit, coordinator::Phase phase, int step);
  void add_gradient(int param, int step, int micro_batch);
  void compare(int param, int version, const float* values, const char* where);

  const TrainingPlan& plan_;
  const Versions& expected_;
  std::unique_ptr<comm::Group> reduce_group_;
  std::unique_ptr<device::Device> device_;
  std::vector<const float*> data_;  // by parameter: what its tensor shows
  shard::ParamTable params_;
  SteadyClock clock_;
  Spans spans_;
  std::unique_ptr<optim::Kernels> kernels_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  bool is_updating_ = false;
  std::vector<std::string> findings_;
};

}  // namespace tessera::testing
