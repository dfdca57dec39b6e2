// One rank that trains the same numbers wherever its shards live: parameters of given sizes, exact
// gradients, and either a ShardedOptimizer (nothing stored) or a TieredOptimizer.
//
// Threads: one world per rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/spans.h"
#include "tessera/optim/sharded_optimizer.h"
#include "tessera/optim/tiered_optimizer.h"
#include "testing/fault_engine.h"
#include "testing/thread_backend.h"
#include "tests/support/temporary_directory.h"

namespace tessera::optim {

struct TieredShape {
  std::int64_t numel = 0;
  StoredParts stored;
  bool trainable = true;
};

enum class StoreKind { kMemory, kFile };

struct TieredCase {
  std::vector<TieredShape> shapes;
  DType dtype = DType::kFloat32;
  RuleOptions rule;
  std::int64_t sub_group_numel = 2048;
  double num_buffers = 1;  // of the largest sub-group; parts are rounded up to blocks
  StoreKind store = StoreKind::kMemory;
  bool is_late = false;
  bool reads_ahead = true;
  bool writes_behind = true;
  // As TieredParts has it.
  std::function<bool(int, std::int64_t, std::int64_t, const void*)> on_updated = {};
};

constexpr double kTieredLr = 1e-3;
constexpr double kTieredScale = 0.25;

// All that training leaves, with padding: of every parameter its shard, then its master and states.
using Trained = std::vector<std::vector<std::byte>>;

class TieredWorld {
 public:
  TieredWorld(comm::Group& group, const TieredCase& test);
  ~TieredWorld();

  // Gives every trainable parameter a gradient; sums over ranks are exact.
  void backward(int step);
  // A whole step, waited for.
  void step(int number);
  // The gradient of one parameter comes; what follows is the caller's. Gives its memory.
  std::weak_ptr<void> add_gradient(int step, int id);
  Trained trained();
  // Of a stored shard: whole blocks, as they are in the store.
  std::vector<std::byte> stored_shard(int id);
  // Writes the shard anew, in memory or in the store.
  void write_shard(int id, std::uint64_t seed);

  shard::ParamTable& params() { return *params_; }
  grad::Reducer& reducer() { return *reducer_; }
  Optimizer& optimizer() { return *optimizer_; }
  // REQUIRES: not the reference.
  TieredOptimizer& tiered() { return *tiered_; }
  tier::Store& states() { return *states_; }
  tier::BufferPool& buffers() { return *buffers_; }
  device::Device& device() { return *device_; }
  Ledger& ledger() { return ledger_; }
  testing::FaultEngine& engine() { return *engine_; }
  // Destroys the reducer and makes it again: the trainable parameters have changed.
  void remake_reducer();
  void destroy_optimizer() { optimizer_.reset(); }

  // Nothing is stored: the optimizer that keeps everything in memory.
  static bool is_reference(const TieredCase& test) { return test.num_buffers == 0; }

 private:
  std::unique_ptr<tier::Store> make_store(const std::string& role, Role charged);
  void make_stores();
  void make_buffers();
  std::size_t largest_lease() const;

  const TieredCase test_;
  comm::Group& group_;
  Ledger ledger_;
  SteadyClock clock_;
  Spans spans_;
  testing::TemporaryDirectory directory_;
  std::unique_ptr<testing::FaultEngine> engine_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<tier::Store> parameters_;
  std::unique_ptr<tier::Store> gradients_;
  std::unique_ptr<tier::Store> states_;
  std::unique_ptr<shard::ShardStore> shards_;
  std::unique_ptr<shard::ParamTable> params_;
  std::unique_ptr<tier::BufferPool> gradient_buffers_;
  std::unique_ptr<tier::BufferPool> buffers_;
  grad::GradientTier gradient_tier_;
  std::unique_ptr<Kernels> kernels_;
  std::unique_ptr<grad::Reducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  TieredOptimizer* tiered_ = nullptr;
};

// Of all ranks, in order.
std::vector<Trained> train(int num_ranks, const TieredCase& test, int num_steps);

// The same sizes and rule with everything in memory.
TieredCase in_memory(TieredCase test);

constexpr StoredParts kAllStored{true, true, true};
constexpr StoredParts kStates{false, false, true};

inline void run_one(const TieredCase& test, const std::function<void(TieredWorld&)>& body) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, test);
    body(world);
  });
}

}  // namespace tessera::optim
