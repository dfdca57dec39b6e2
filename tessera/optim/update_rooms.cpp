#include "tessera/optim/update_rooms.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

void UpdateRooms::take_own(device::Device& device, int num_rooms, std::size_t room_bytes) {
  room_bytes_ = room_bytes;
  own_ = device.allocate(device::MemoryKind::kDevice,
                         static_cast<std::size_t>(num_rooms) * room_bytes, Role::kStaging);
  for (int i = 0; i < num_rooms; ++i) {
    auto room = std::make_unique<Room>();
    room->data = own_.data() + static_cast<std::size_t>(i) * room_bytes;
    free_.push_back(room.get());
    rooms_.push_back(std::move(room));
  }
}

void UpdateRooms::lend(int lender, std::byte* data, device::Pending ready,
                       std::shared_ptr<void> owner) {
  TESSERA_INVARIANT(lender >= 0, "lender ", lender, " of a room for an update");
  auto room = std::make_unique<Room>();
  room->data = data;
  room->free = std::move(ready);
  room->lender = lender;
  room->owner = std::move(owner);
  free_.push_back(room.get());
  rooms_.push_back(std::move(room));
}

Room* UpdateRooms::take() {
  if (free_.empty()) {
    return nullptr;
  }
  Room* const room = free_.front();
  free_.pop_front();
  room->state = Room::State::kTaken;
  room->up = device::Pending();
  return room;
}

void UpdateRooms::leave(Room& room, device::Pending down) {
  room.free = std::move(down);
  if (room.lender >= 0) {
    room.state = Room::State::kDraining;
    return;
  }
  room.state = Room::State::kFree;
  free_.push_back(&room);
}

void UpdateRooms::put_back(Room& room) {
  room.free = std::exchange(room.up, device::Pending());
  room.state = Room::State::kFree;
  free_.push_front(&room);
}

Room* UpdateRooms::find_lent(int lender) const {
  const auto found = std::find_if(rooms_.begin(), rooms_.end(), [lender](const auto& room) {
    return room->lender >= 0 && (lender < 0 || room->lender == lender);
  });
  return found == rooms_.end() ? nullptr : found->get();
}

void UpdateRooms::drop(Room& room) {
  TESSERA_INVARIANT(room.lender >= 0 && room.state != Room::State::kTaken,
                    "a room for an update is given back while it is used");
  std::erase(free_, &room);
  std::erase_if(rooms_, [&room](const auto& each) { return each.get() == &room; });
}

}  // namespace tessera::optim
