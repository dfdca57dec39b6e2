// Masters and states of this rank's shards: their memory layout, reads and writes.
//
// The layout is the same on every tier: a shard is cut into pieces, and the fp32 tensors of a piece
// are adjacent: master (unless the shard is the master), state 0, state 1.
//
//   in memory, updated in place    one piece per shard; on a CPU without NVMe the tensors are
//                                  packed, elsewhere each has whole blocks
//   in pinned memory, streamed     pieces of slot_numel() elements without padding, tensors aligned
//     through slots of a device    to kStreamedStep: one copy moves a piece
//   on NVMe                        pieces of sub_group_numel elements, tensors in whole blocks
//                                  (sub_group.h), each an extent with a name
//
// Only fp32 parameters are their own masters. States are made when a parameter is trainable for the
// first time, and stay; in memory they are charged as Role::kOptimizer. Padding stays zero.
//
// Threads: one caller at a time; write() also from several threads; const accessors and
// start_read() from any thread, as long as nothing changes the parameter concerned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string_view>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/optim/optimizer_options.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/sub_group.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

// States of all parameters in host memory, moved from one optimizer to the next.
struct CarriedStates {
  struct Each {
    bool exists = false;
    std::vector<std::vector<float>> tensors;  // by index in tensor_names(); shard_numel() each
    std::int64_t updates = 0;
  };
  std::vector<Each> params;  // by id; empty: there are none
  std::int64_t num_updates = 0;
};

class OptimizerStates {
 public:
  struct Piece {
    std::int64_t begin = 0;  // in the shard
    std::int64_t numel = 0;
    std::uint64_t offset = 0;  // offset of its first tensor, in the parameter's memory or on NVMe
    std::size_t tensor_bytes = 0;  // distance from one tensor to the next
  };

  // Throws ConfigError if states stream to the device and there are no slots for them.
  OptimizerStates(shard::ParamTable& params, const RuleOptions& rule,
                  const OptimizerOptions& options);
  OptimizerStates(const OptimizerStates&) = delete;
  OptimizerStates& operator=(const OptimizerStates&) = delete;

  // True if the CPU pipeline updates the parameter, false if the device does; whether or not it is
  // trainable.
  bool is_on_cpu(int id) const;
  // True if the device updates the parameter and part of its data is copied to the device for every
  // update.
  bool streams(int id) const;
  bool are_resident(int id) const {
    return !is_discrete_ || params_[id].placement().states == Tier::kDevice;
  }
  // Elements of a piece that streams; 0: nothing streams.
  std::int64_t slot_numel() const { return slot_numel_; }

  bool has(int id) const { return slots_[static_cast<std::size_t>(id)].exists; }
  // Allocates space on NVMe. Once per parameter.
  void add(int id);
  // Allocates memory, unless there is some: moments are zero, the master is not made yet. Meanwhile
  // tensors of other parameters may be written. REQUIRES: has() it.
  void take_memory(int id);
  // Makes the master from the shard. `host_copy`: the pinned copy of a shard in a discrete device's
  // memory, if there is one.
  void make_master(int id, const std::byte* host_copy = nullptr);

  // Moves the states out, and frees their memory. REQUIRES: has(id), and no update runs.
  CarriedStates::Each take(int id);
  // Moves states into allocated memory. REQUIRES: not on NVMe.
  void put(int id, const CarriedStates::Each& states);

  // "master" (unless the shard is the master), then the rule's states. `number` below is an index
  // into this list.
  std::vector<std::string_view> tensor_names(int id) const;
  // Reads elements [begin, begin + numel) of a tensor from any tier; padding is zero. `begin` is a
  // multiple of kShardStep. `to`: host memory aligned to kBlockBytes that holds numel rounded up to
  // kShardStep; where nothing is on NVMe, any memory.
  device::Pending start_read(int id, std::size_t number, std::int64_t begin, std::int64_t numel,
                             std::byte* to) const;
  // Writes the same elements, except padding, which stays zero. `numel` is a multiple of
  // kShardStep, except at the end. Writes to NVMe may be in flight until finish_writes().
  void write(int id, std::size_t number, std::int64_t begin, std::int64_t numel,
             const std::byte* from);
  void finish_writes() { writes_.finish(); }
  // Waits for writes in flight after a failure.
  void drop_writes() { writes_.drop(); }

  // Plan of the trainable parameters that the CPU updates. REQUIRES: has() each of them.
  SubGroupPlan plan() const;
  std::size_t num_tensors(int id) const;
  std::vector<Piece> pieces(int id) const;
  // Memory of the states; null: on NVMe.
  std::byte* memory(int id) const { return slots_[static_cast<std::size_t>(id)].memory.data(); }
  // A tensor that is updated in place: tensor 0 is the master, if there is one.
  float* tensor(int id, std::size_t number) const;
  // The same if the host can read it; null if it cannot, or if the tensor is in several pieces.
  float* host_tensor(int id, std::size_t number) const;
  // A copy of a tensor, from any tier.
  std::vector<float> read(int id, std::size_t number) const;
  // The same for the shard of a parameter that is its own master.
  std::vector<float> read_parameter(int id) const;

  std::int64_t num_updates(int id) const { return slots_[static_cast<std::size_t>(id)].updates; }
  void count_update(int id) { ++slots_[static_cast<std::size_t>(id)].updates; }
  void set_num_updates(int id, std::int64_t updates) {
    slots_[static_cast<std::size_t>(id)].updates = updates;
  }

 private:
  // Writes of tiles to NVMe in flight, as many as there are leases: a lease is released when it has
  // been written.
  class TileWrites {
   public:
    TileWrites() = default;
    ~TileWrites() { drop(); }
    TileWrites(const TileWrites&) = delete;
    TileWrites& operator=(const TileWrites&) = delete;

    tier::Lease acquire(tier::BufferPool& pool, std::size_t bytes);
    void add(tier::Lease lease, device::Pending written);
    void finish();
    void drop();  // after a failure that the caller has seen

   private:
    struct Write {
      tier::Lease lease;
      device::Pending written;
    };
    void retire_oldest();
    std::deque<Write> writes_;
  };
  // A part of a tensor that lies in one piece.
  struct Part {
    std::int64_t begin = 0;  // in the shard
    std::int64_t numel = 0;
    std::uint64_t offset = 0;  // in the parameter's memory or on NVMe
  };
  struct Slot {
    bool exists = false;
    bool has_memory = false;  // or needs none
    device::Memory memory;
    std::int64_t offset = -1;  // on NVMe
    std::int64_t updates = 0;  // the step that corrects the moments
  };
  bool is_on_nvme(int id) const { return params_[id].placement().states == Tier::kNvme; }
  std::size_t tensor_bytes(int id) const;  // in memory
  void check_placement(int id) const;
  void fit_slots();
  void allocate_extents(int id);
  std::int64_t numel_in_pieces(int id) const;
  std::int64_t most_in_piece(int id) const;
  Piece piece_at(int id, std::int64_t begin) const;  // that begins there
  std::vector<Part> parts(int id, std::size_t number, std::int64_t begin, std::int64_t numel) const;
  std::vector<Piece> master_tiles(int id) const;
  void make_resident_master(const shard::Param& param);
  void make_host_master(const shard::Param& param, const std::byte* host_copy);
  void copy_from_device(void* to, const void* from, std::size_t bytes) const;
  bool are_on_device(int id) const { return is_discrete_ && !is_on_cpu(id) && are_resident(id); }
  // A whole shard in fp32, read by start_read(begin, numel, to).
  template <typename StartRead>
  std::vector<float> read_tiles(int id, bool on_nvme, const StartRead& start_read) const;

  shard::ParamTable& params_;
  const RuleOptions rule_;
  const OptimizerOptions& options_;
  const bool is_discrete_;
  bool uses_nvme_ = false;  // some data is on NVMe
  std::int64_t slot_numel_ = 0;
  std::vector<Slot> slots_;  // by id
  std::mutex writes_mutex_;
  TileWrites writes_;  // guarded by writes_mutex_ while write() may be called
};

}  // namespace tessera::optim
