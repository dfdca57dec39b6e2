// Internal to optim: slots in device memory in which streamed states are updated, one piece at a
// time, in turn. Owned slots live as long as the executor. Lent slots are borrowed from torch's
// allocator (engine/memory_lender.h); the lender reclaims a number of them, in any order.
//
//           take            leave, put_back
//   kFree --------> kTaken ----------------> kFree; a copy may be in flight
//     |               |
//     +---------------+--------------------> kDraining ----> drop
//        surplus lent slots
//
// Threads: guarded by its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "tessera/device/device.h"

namespace tessera::optim {

struct UpdateSlot {
  enum class State : std::uint8_t { kFree, kTaken, kDraining };
  std::byte* data = nullptr;
  device::Pending free;  // done when the previous contents are no longer used
  device::Pending h2d;   // the copy of states into it
  bool is_lent = false;
  std::shared_ptr<void> owner;  // keeps lent memory alive
  State state = State::kFree;
};

class UpdateSlots {
 public:
  // Charged as Role::kStaging. `device` outlives this.
  void take_own(device::Device& device, int num_slots, std::size_t slot_bytes);
  std::size_t slot_bytes() const { return slot_bytes_; }

  // `ready`: done when the previous user of the memory is.
  void lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  std::size_t num_lent() const { return num_lent_; }
  // Drains lent slots beyond `num_slots`: free ones first, then those that are left next. A
  // draining slot is not taken again. lend() removes the limit.
  void limit_lent(std::size_t num_slots);
  std::size_t num_free() const { return free_.size(); }
  // The slot that has been free longest; null: none is free.
  UpdateSlot* take();
  // The slot's piece is being copied to the host.
  void leave(UpdateSlot& slot, device::Pending d2h);
  // The update that was to use the slot is cancelled.
  void put_back(UpdateSlot& slot);
  // The draining slot whose `free` is done first; null: none drains.
  UpdateSlot* first_draining() const { return draining_.empty() ? nullptr : draining_.front(); }
  // Removes a draining slot. REQUIRES: its `free` is done.
  void drop(UpdateSlot& slot);

 private:
  bool has_too_many_lent() const { return num_lent_ - draining_.size() > most_lent_; }
  void let_drain(UpdateSlot& slot);

  device::Memory own_;
  std::size_t slot_bytes_ = 0;
  std::vector<std::unique_ptr<UpdateSlot>> slots_;  // own ones first
  std::deque<UpdateSlot*> free_;                    // in the order in which they were left
  std::deque<UpdateSlot*> draining_;                // the same
  std::size_t num_lent_ = 0;
  std::size_t most_lent_ = 0;
};

}  // namespace tessera::optim
