#include "tessera/optim/update_slots.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

void UpdateSlots::take_own(device::Device& device, int num_slots, std::size_t slot_bytes) {
  slot_bytes_ = slot_bytes;
  own_ = device.allocate(device::MemoryKind::kDevice,
                         static_cast<std::size_t>(num_slots) * slot_bytes, Role::kStaging);
  for (int i = 0; i < num_slots; ++i) {
    auto slot = std::make_unique<UpdateSlot>();
    slot->data = own_.data() + static_cast<std::size_t>(i) * slot_bytes;
    free_.push_back(slot.get());
    slots_.push_back(std::move(slot));
  }
}

void UpdateSlots::lend(int lender, std::byte* data, device::Pending ready,
                       std::shared_ptr<void> owner) {
  TESSERA_INVARIANT(lender >= 0, "lender ", lender, " of a slot for an update");
  auto slot = std::make_unique<UpdateSlot>();
  slot->data = data;
  slot->free = std::move(ready);
  slot->lender = lender;
  slot->owner = std::move(owner);
  free_.push_back(slot.get());
  slots_.push_back(std::move(slot));
}

UpdateSlot* UpdateSlots::take() {
  if (free_.empty()) {
    return nullptr;
  }
  UpdateSlot* const slot = free_.front();
  free_.pop_front();
  slot->state = UpdateSlot::State::kTaken;
  slot->up = device::Pending();
  return slot;
}

void UpdateSlots::leave(UpdateSlot& slot, device::Pending down) {
  slot.free = std::move(down);
  if (slot.lender >= 0) {
    slot.state = UpdateSlot::State::kDraining;
    return;
  }
  slot.state = UpdateSlot::State::kFree;
  free_.push_back(&slot);
}

void UpdateSlots::put_back(UpdateSlot& slot) {
  slot.free = std::exchange(slot.up, device::Pending());
  slot.state = UpdateSlot::State::kFree;
  free_.push_front(&slot);
}

UpdateSlot* UpdateSlots::find_lent(int lender) const {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [lender](const auto& slot) {
    return slot->lender >= 0 && (lender < 0 || slot->lender == lender);
  });
  return found == slots_.end() ? nullptr : found->get();
}

void UpdateSlots::retire(UpdateSlot& slot) {
  std::erase(free_, &slot);
  slot.state = UpdateSlot::State::kDraining;
}

void UpdateSlots::drop(UpdateSlot& slot) {
  TESSERA_INVARIANT(slot.lender >= 0 && slot.state == UpdateSlot::State::kDraining,
                    "a slot for an update is given back while it is used");
  std::erase_if(slots_, [&slot](const auto& each) { return each.get() == &slot; });
}

}  // namespace tessera::optim
