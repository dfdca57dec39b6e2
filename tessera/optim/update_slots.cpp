#include "tessera/optim/update_slots.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {

void UpdateSlots::take_own(device::Device& device, int num_slots, std::size_t slot_bytes) {
  slot_bytes_ = slot_bytes;
  own_ = device.allocate(Tier::kDevice, static_cast<std::size_t>(num_slots) * slot_bytes,
                         Role::kStaging);
  for (int i = 0; i < num_slots; ++i) {
    auto slot = std::make_unique<UpdateSlot>();
    slot->data = own_.data() + static_cast<std::size_t>(i) * slot_bytes;
    free_.push_back(slot.get());
    slots_.push_back(std::move(slot));
  }
}

void UpdateSlots::lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner) {
  auto slot = std::make_unique<UpdateSlot>();
  slot->data = data;
  slot->free = std::move(ready);
  slot->is_lent = true;
  slot->owner = std::move(owner);
  free_.push_back(slot.get());
  slots_.push_back(std::move(slot));
  ++num_lent_;
  most_lent_ = std::numeric_limits<std::size_t>::max();
}

UpdateSlot* UpdateSlots::take() {
  if (free_.empty()) {
    return nullptr;
  }
  UpdateSlot* const slot = free_.front();
  free_.pop_front();
  slot->state = UpdateSlot::State::kTaken;
  slot->h2d = device::Pending();
  return slot;
}

void UpdateSlots::let_drain(UpdateSlot& slot) {
  slot.state = UpdateSlot::State::kDraining;
  draining_.push_back(&slot);
}

void UpdateSlots::limit_lent(std::size_t num_slots) {
  most_lent_ = num_slots;
  std::erase_if(free_, [this](UpdateSlot* slot) {
    const bool drains = slot->is_lent && has_too_many_lent();
    if (drains) {
      let_drain(*slot);
    }
    return drains;
  });
}

void UpdateSlots::leave(UpdateSlot& slot, device::Pending d2h) {
  slot.free = std::move(d2h);
  if (slot.is_lent && has_too_many_lent()) {
    let_drain(slot);
    return;
  }
  slot.state = UpdateSlot::State::kFree;
  free_.push_back(&slot);
}

void UpdateSlots::put_back(UpdateSlot& slot) {
  slot.free = std::exchange(slot.h2d, device::Pending());
  if (slot.is_lent && has_too_many_lent()) {
    let_drain(slot);
    return;
  }
  slot.state = UpdateSlot::State::kFree;
  free_.push_front(&slot);
}

void UpdateSlots::drop(UpdateSlot& slot) {
  TESSERA_INVARIANT(slot.state == UpdateSlot::State::kDraining,
                    "a slot for an update is given back while it is used");
  std::erase(draining_, &slot);
  std::erase_if(slots_, [&slot](const auto& each) { return each.get() == &slot; });
  --num_lent_;
}

}  // namespace tessera::optim
