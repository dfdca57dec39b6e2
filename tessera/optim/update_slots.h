// Internal to optim: memory of the device in which states that stream to it are updated, one piece
// at a time, in turn. Own slots are there for good. Lent ones belong to somebody who can spare them
// for a while, and wants a number of them back, no matter which.
//
//           take            leave, put_back
//   kFree --------> kTaken ----------------> kFree, with a copy under way at most
//     |               |
//     +---------------+--------------------> kDraining ----> drop
//        of lent ones that are too many
//
// Threads: guarded by whoever has it.
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
  device::Pending free;  // of what was in it before
  device::Pending h2d;   // the states that are copied into it
  bool is_lent = false;
  std::shared_ptr<void> owner;  // of lent memory
  State state = State::kFree;
};

class UpdateSlots {
 public:
  // Charged as Role::kStaging. `device` outlives this.
  void take_own(device::Device& device, int num_slots, std::size_t slot_bytes);
  std::size_t slot_bytes() const { return slot_bytes_; }

  // `ready`: nobody uses it any more.
  void lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  std::size_t num_lent() const { return num_lent_; }
  // Lent ones beyond this many drain: those that are free, which are not given out any more, then
  // those that are left next. From lend() on there is no limit.
  void limit_lent(std::size_t num_slots);
  std::size_t num_free() const { return free_.size(); }
  // The one that was free first; null: none is.
  UpdateSlot* take();
  // The piece in it is on its way to the host.
  void leave(UpdateSlot& slot, device::Pending d2h);
  // What was to be updated in it will not be.
  void put_back(UpdateSlot& slot);
  // The one whose `free` is done first; null: none drains yet.
  UpdateSlot* first_draining() const { return draining_.empty() ? nullptr : draining_.front(); }
  // Of one that is draining, once `free` is done.
  void drop(UpdateSlot& slot);

 private:
  bool has_too_many_lent() const { return num_lent_ - draining_.size() > most_lent_; }
  void let_drain(UpdateSlot& slot);

  device::Memory own_;
  std::size_t slot_bytes_ = 0;
  std::vector<std::unique_ptr<UpdateSlot>> slots_;  // own ones first
  std::deque<UpdateSlot*> free_;                    // that which was left first comes first
  std::deque<UpdateSlot*> draining_;                // the same
  std::size_t num_lent_ = 0;
  std::size_t most_lent_ = 0;
};

}  // namespace tessera::optim
