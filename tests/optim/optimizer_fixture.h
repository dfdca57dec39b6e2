// One rank that trains the same numbers wherever its shards live and whoever updates them:
// parameters of given sizes and placements, gradients whose sums over ranks are exact, a reducer
// and an optimizer.
//
// Threads: one fixture per rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/spans.h"
#include "tessera/optim/optimizer.h"
#include "testing/fault_engine.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"
#include "tests/support/rank_fixture.h"
#include "tests/support/temporary_directory.h"

namespace tessera::optim {

struct FixtureShape {
  std::int64_t numel = 0;
  Placement placement = {};
  bool trainable = true;
  int used_every = 1;  // its gradient comes in every so many backwards, ...
  int used_by = -1;    // ... on this rank, if there is such a one; -1: on all
};

enum class FixtureDevice { kCpu, kMock, kDiscrete };
enum class StoreKind { kMemory, kFile };

struct FixtureCase {
  std::vector<FixtureShape> shapes;
  DType dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  RuleOptions rule;
  FixtureDevice device = FixtureDevice::kCpu;
  device::LateMode mode = device::LateMode::kLazy;
  int num_backwards = 1;
  int num_micro_batches = 1;        // as memory is planned, on a discrete device; 0: not known
  bool has_host_gradients = false;  // of what the device updates: slots have room for them
  int num_host_buffers = 0;         // as ReducerParts'
  bool sums_squares = true;         // on a discrete device: as gradients are added
  int bad_step = 0;                 // of which a gradient has an infinity, ...
  int bad_rank = -1;                // ... on this rank; -1: on all
  // NVMe.
  std::int64_t sub_group_numel = 2048;
  double num_buffers = 1;  // of the largest sub-group; parts are rounded up to blocks
  StoreKind store = StoreKind::kMemory;
  bool reads_ahead = true;
  bool writes_behind = true;
  std::function<bool(int, std::int64_t, std::int64_t, const void*)> on_updated = {};
  // Slots of a discrete device.
  int num_slots = 2;
  std::size_t slot_numel = 4096;
};

constexpr double kFixtureLr = 1e-3;
constexpr double kFixtureScale = 0.25;

constexpr Placement on_nvme(bool parameter, bool gradient, bool states) {
  const auto tier = [](bool is_on_nvme) { return is_on_nvme ? Tier::kNvme : Tier::kDevice; };
  return {tier(parameter), tier(gradient), tier(states), Updater::kCpu};
}
constexpr Placement kAllOnNvme = on_nvme(true, true, true);
constexpr Placement kStatesOnNvme = on_nvme(false, false, true);

// The whole tensor, with what its type keeps of it; multiples of 2^-10 of `scale`.
std::vector<float> whole_values(std::int64_t numel, DType dtype, std::uint64_t seed, float scale);
std::vector<float> whole_parameter(std::int64_t numel, DType dtype, std::uint64_t seed);
std::vector<float> whole_gradient(std::int64_t numel, DType dtype, int step, int backward, int id);

// All that training leaves, with padding: of every parameter its shard, then its master and states.
using Trained = std::vector<std::vector<std::byte>>;

class OptimizerFixture : public support::RankFixture {
 public:
  OptimizerFixture(comm::Group& group, const FixtureCase& test);
  ~OptimizerFixture();

  // Gives every trainable parameter that is used its gradients.
  void backward(int step);
  void start_update() { optimizer_->start_update(*reducer_, kFixtureLr, kFixtureScale); }
  // A whole step, waited for.
  void step(int number);
  Trained trained();
  // Whole blocks, as they are on NVMe.
  std::vector<std::byte> nvme_shard(int id);
  // Writes the shard anew, in memory or on NVMe.
  void write_shard(int id, std::uint64_t seed);
  void write_shard(int id, std::vector<std::byte> values);  // shard_bytes() of them

  comm::Group& group() { return group_; }
  grad::Reducer& reducer() { return *reducer_; }
  Optimizer& optimizer() { return *optimizer_; }
  tier::Store& states() { return *states_; }
  tier::BufferPool& buffers() { return *buffers_; }
  shard::ShardStore& shards() { return *shards_; }
  Kernels& kernels() { return *kernels_; }
  testing::FaultEngine& engine() { return *engine_; }
  OptimizerOptions options();
  // The memory of the last gradient of a parameter.
  const std::weak_ptr<void>& gradient(int id) const {
    return gradients_[static_cast<std::size_t>(id)];
  }
  // REQUIRES: a discrete device. H2D copies under way at once, at most.
  std::size_t most_copies_h2d();
  // Destroys the reducer and makes it again: the trainable parameters have changed.
  void remake_reducer();
  void destroy_optimizer() { optimizer_.reset(); }
  // Another optimizer goes on, with these placements. REQUIRES: nothing is on NVMe.
  void hand_over(const std::vector<Placement>& placements);

 private:
  std::unique_ptr<tier::Store> make_store(const std::string& role, Role charged);
  void make_stores();
  std::size_t largest_lease() const;

  const FixtureCase test_;
  comm::Group& group_;
  testing::TemporaryDirectory directory_;
  std::unique_ptr<testing::FaultEngine> engine_;
  std::unique_ptr<device::Device> host_;  // beside a discrete device
  std::unique_ptr<tier::Store> parameter_store_;
  std::unique_ptr<tier::Store> gradient_store_;
  std::unique_ptr<tier::Store> states_;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<tier::BufferPool> gradient_buffers_;
  std::unique_ptr<tier::BufferPool> buffers_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<Kernels> host_kernels_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::weak_ptr<void>> gradients_;  // by id
};

// The same sizes and rule with everything in memory of a CPU.
FixtureCase in_memory(FixtureCase test);
// Of all ranks, in order.
std::vector<Trained> train(int num_ranks, const FixtureCase& test, int num_steps);

inline void run_one(const FixtureCase& test, const std::function<void(OptimizerFixture&)>& body) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, test);
    body(fixture);
  });
}

}  // namespace tessera::optim
