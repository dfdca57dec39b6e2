// Internal to optim: memory of the device in which states that stream to it are updated, one piece
// at a time. Own slots are there for good, and are used in turn. Lent ones belong to somebody who
// can spare them for a while: each is used once, and is given back when its piece has gone down.
//
//           take             leave (own)
//   kFree --------> kTaken ---------------> kFree, with a copy down under way at most
//     |                |     leave (lent)
//     +----------------+------------------> kDraining ----> drop
//          retire
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
  device::Pending free;         // of what was in it before
  device::Pending up;           // the states that come into it
  int lender = -1;              // -1: own
  std::shared_ptr<void> owner;  // of lent memory
  State state = State::kFree;
};

class UpdateSlots {
 public:
  // Charged as Role::kStaging. `device` outlives this.
  void take_own(device::Device& device, int num_slots, std::size_t slot_bytes);
  std::size_t slot_bytes() const { return slot_bytes_; }
  // The first own one, for what is done while nothing else is.
  std::byte* first_data() const { return slots_.front()->data; }

  // `ready`: nobody uses it any more.
  void lend(int lender, std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  std::size_t num_free() const { return free_.size(); }
  // The one that was free first; null: none is.
  UpdateSlot* take();
  // The piece in it is on its way down.
  void leave(UpdateSlot& slot, device::Pending down);
  // What was to be updated in it will not be.
  void put_back(UpdateSlot& slot);
  // Any lent one of that lender, of every lender for -1; null: none is left.
  UpdateSlot* find_lent(int lender) const;
  // A free, lent one is not given out any more.
  void retire(UpdateSlot& slot);
  // Of a lent one that is draining, once `free` is done.
  void drop(UpdateSlot& slot);

 private:
  device::Memory own_;
  std::size_t slot_bytes_ = 0;
  std::vector<std::unique_ptr<UpdateSlot>> slots_;  // own ones first
  std::deque<UpdateSlot*> free_;
};

}  // namespace tessera::optim
