// What is done with one sub-group of an update: its reads, the fused update of its pieces, its
// writes. When, and in which memory, is update_pipeline.h's.
//
// A piece is updated as soon as what it needs has come, and its parameter is fulfilled with its
// last piece; so a failure reaches the parameter concerned and those after it, not those before it.
//
// Padding is never updated: it stays zero in shards, masters, states and whole blocks.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/device/handed_over.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/sub_group.h"
#include "tessera/optim/tiered_parts.h"
#include "tessera/optim/tiered_states.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

// One update of all trainable parameters.
struct UpdateJob {
  struct Item {
    bool keeps = false;  // no gradient came: nothing changes, and the parameter is made again
    UpdateScalars scalars;
    const void* gradient = nullptr;  // null: stored
    DType gradient_dtype = DType::kFloat32;
    device::Pending gradient_came;
    device::Pending may_start;   // what reads the shard, and what makes the gradient
    std::byte* shard = nullptr;  // null: stored
    // Carries new values from `shard` to where they belong, once all are there; null: they are.
    std::function<device::Pending()> deliver;
    std::shared_ptr<device::HandedOver> done;  // null: not updated
    int num_pieces_left = 0;
    std::vector<device::Pending> writes;  // of pieces so far that must be read from the store
  };
  grad::Reducer* gradients = nullptr;  // stays until the job is done
  std::vector<Item> items;             // by id
};

// A sub-group in memory. Its lease must stay until everything below is done.
struct UpdateStage {
  std::size_t number = 0;  // of the sub-group in its plan
  const SubGroup* group = nullptr;
  tier::Lease lease;
  device::Pending states_read;
  // By piece; empty: none were started.
  std::vector<device::Pending> parameters_read;
  std::vector<device::Pending> gradients_read;
  std::vector<device::Pending> writes;

  // All that is in flight.
  std::vector<device::Pending> transfers() const;
};

class StageWork {
 public:
  struct Parts {
    shard::ParamTable& params;
    device::Device& device;
    Kernels& kernels;
    RuleOptions rule;
    const TieredParts& tiers;
    const TieredStates& states;
  };
  explicit StageWork(const Parts& parts)
      : parts_(parts), stream_(parts.device.stream(device::StreamKind::kWrite)) {}

  // Stored states, and stored parameters that are their own masters.
  void start_reads(UpdateStage& stage);
  // Stored gradients; once per stage, later calls do nothing.
  void start_gradient_reads(UpdateStage& stage, UpdateJob& job);
  // Waits for the reads; new values of stored parameters are on their way when it returns.
  void update(UpdateStage& stage, UpdateJob& job);
  void start_state_writes(UpdateStage& stage);

  // Since the last call.
  TieredStats take_stats();

 private:
  void wait_timed(const device::Pending& read);
  void update_piece(const UpdateStage& stage, std::size_t index, const UpdateJob::Item& item);
  void finish_piece(UpdateStage& stage, std::size_t index, UpdateJob::Item& item);
  // Elements of the piece that are not padding.
  std::int64_t real_numel(const SubGroupPiece& piece) const;

  const Parts parts_;
  device::Stream& stream_;
  TieredStats stats_;
};

}  // namespace tessera::optim
