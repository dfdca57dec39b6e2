// Updates on a device with memory of its own: of states that live there, and of states in pinned
// memory of the host, which stream up into a slot, are updated, and stream down again.
//
//   read stream    | states up           behind the slot's last copies down, and this piece's
//   reduce stream  | update              behind the copies up, the gradient, and the shard's
//   readers write stream   | new parameter down (if it lives on the host), then states down
//
// All of it is ordered by events; the host only hands it over. States do not depend on gradients:
// prepare() sends the first ones up while a backward still runs, as many as there are slots.
//
// Cut: a shard is updated in pieces of at most slot elements. Bits do not depend on it.
//
// States of a parameter are made when it is trainable for the first time, and stay. They lie in one
// piece: master (unless the parameter is its own), state 0, state 1, each in whole blocks; charged
// as Role::kOptimizer. Slots are one allocation, charged as Role::kStaging.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/tiered_parts.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class DeviceUpdate {
 public:
  // `stored`: by id, says which parameters are ours, and where their states live. All of it
  // outlives this. Throws ConfigError if states stream and there are no slots.
  DeviceUpdate(shard::ParamTable& params, const RuleOptions& rule, const OwnMemoryParts& own,
               const std::vector<StoredParts>& stored);
  // Waits for what was started; failures are the waiters' business.
  ~DeviceUpdate();
  DeviceUpdate(const DeviceUpdate&) = delete;
  DeviceUpdate& operator=(const DeviceUpdate&) = delete;

  bool is_ours(int id) const { return stored_[static_cast<std::size_t>(id)].device_update; }
  bool has(int id) const { return slots_[static_cast<std::size_t>(id)].exists; }
  // Moments are zero, the master is made from the shard. Once per parameter.
  void add(int id);
  void make_master(int id);
  // What is trainable has changed.
  void plan();

  void prepare();
  // Gives each parameter its Pending. `scalars`: but for the step, which this counts.
  void start(grad::Reducer& gradients, const UpdateScalars& scalars);
  // Until no gradient is needed any more. Copies down may still be under way.
  void wait();
  // All of it.
  void wait_all();
  // A copy, on the host, of tensor 0 (the master, or else the first state) and on.
  std::vector<float> read(int id, std::size_t tensor);
  TieredStats take_stats();

 private:
  struct Slot {  // of one parameter
    bool exists = false;
    device::Memory memory;  // of the device or pinned
    std::int64_t num_updates = 0;
  };
  struct Piece {
    int param = 0;
    std::int64_t begin = 0;
    std::int64_t numel = 0;  // without padding
    bool is_last = false;    // of its parameter
    device::Pending down;    // of its states, the last time
  };
  struct Room {  // for one piece at a time
    std::byte* data = nullptr;
    device::Pending free;  // its last copies down
    device::Pending up;
  };

  bool is_resident(int id) const { return stored_[static_cast<std::size_t>(id)].states_on_device; }
  // Something of it comes to the device for every update.
  bool needs_slot(int id) const { return !is_resident(id) || params_[id].is_on_host(); }
  std::size_t num_tensors(const shard::Param& param) const;
  std::size_t tensor_bytes(const shard::Param& param) const;
  float* tensor(int id, std::size_t number) const;  // where it lives
  Room& room_of(std::size_t piece) { return rooms_[(first_room_ + piece) % rooms_.size()]; }
  // Where the parameter of a piece is while it is updated.
  std::byte* parameter_place(const Piece& piece, const Room& room) const;
  UpdateTask make_task(int id, const grad::ShardGradient& gradient, const UpdateScalars& scalars);
  void update_resident(grad::Reducer& gradients, const UpdateScalars& scalars);
  void start_up(std::size_t piece);
  void update_piece(std::size_t piece, const grad::ShardGradient& gradient,
                    const UpdateScalars& scalars);

  shard::ParamTable& params_;
  const RuleOptions rule_;
  device::Device& device_;
  Kernels& kernels_;
  const std::vector<StoredParts>& stored_;
  device::Stream& read_;
  device::Stream& write_;
  device::Stream& update_;
  std::vector<Slot> slots_;  // by id
  device::Memory room_memory_;
  std::vector<Room> rooms_;
  std::size_t slot_numel_ = 0;
  std::vector<Piece> pieces_;     // of streamed parameters, in registration order
  std::size_t first_room_ = 0;    // of the next update's first piece
  std::size_t num_prepared_ = 0;  // pieces of the next update that are up, or on their way
  device::Pending last_update_;
  TieredStats stats_;
};

}  // namespace tessera::optim
