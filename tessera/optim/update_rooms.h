// Internal to optim: memory of the device in which states that stream to it are updated, one piece
// at a time. Own rooms are there for good, and are used in turn. Lent ones belong to somebody who
// can spare them for a while: each is used once, and is given back when its piece has gone down.
//
//            take            leave (own)
//   kFree ----------> kTaken -----------> kFree      its copy down may be under way (Room::free)
//                       |    leave (lent)
//                       +---------------> kDraining --> drop
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

struct Room {
  enum class State : std::uint8_t { kFree, kTaken, kDraining };
  std::byte* data = nullptr;
  device::Pending free;         // of what was in it before
  device::Pending up;           // the states that come into it
  int lender = -1;              // -1: own
  std::shared_ptr<void> owner;  // of lent memory
  State state = State::kFree;
};

class UpdateRooms {
 public:
  // Charged as Role::kStaging. `device` outlives this.
  void take_own(device::Device& device, int num_rooms, std::size_t room_bytes);
  std::size_t room_bytes() const { return room_bytes_; }
  // The first own one, for what is done while nothing else is.
  std::byte* first_data() const { return rooms_.front()->data; }

  // `ready`: nobody uses it any more.
  void lend(int lender, std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  std::size_t num_free() const { return free_.size(); }
  // The one that was free first; null: none is.
  Room* take();
  // The piece in it is on its way down.
  void leave(Room& room, device::Pending down);
  // What was to be updated in it will not be.
  void put_back(Room& room);
  // Any lent one of that lender, of every lender for -1; null: none is left.
  Room* find_lent(int lender) const;
  // Of a lent one that nobody uses.
  void drop(Room& room);

 private:
  device::Memory own_;
  std::size_t room_bytes_ = 0;
  std::vector<std::unique_ptr<Room>> rooms_;  // own ones first
  std::deque<Room*> free_;
};

}  // namespace tessera::optim
