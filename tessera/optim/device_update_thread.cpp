// Of DeviceUpdate: the thread that hands pieces over, the slots that it has, and who waits for it.
#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/optim/device_update.h"

namespace tessera::optim {

using device::Pending;

// REQUIRES: the thread is idle, and does not go ahead.
void DeviceUpdate::put_slots_back() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Piece& piece : pieces_) {
    if (piece.slot != nullptr) {
      slots_.put_back(*std::exchange(piece.slot, nullptr));
    }
  }
}

void DeviceUpdate::prepare() {
  if (pieces_.empty()) {
    return;
  }
  wait_handed_over();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Piece& piece : pieces_) {
    piece.is_updated = false;
  }
  next_ahead_ = 0;
  goes_ahead_ = true;
  changed_.notify_all();
}

bool DeviceUpdate::wants_slot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return goes_ahead_ && next_ahead_ + slots_.num_free() < pieces_.size();
}

void DeviceUpdate::lend(std::byte* data, Pending ready, std::shared_ptr<void> owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_.lend(data, std::move(ready), std::move(owner));
  changed_.notify_all();
}

void DeviceUpdate::keep_lent(std::size_t num_slots) {
  std::unique_lock<std::mutex> lock(mutex_);
  slots_.limit_lent(num_slots);
  while (slots_.num_lent() > num_slots) {
    goes_ahead_ = false;
    if (UpdateSlot* const slot = slots_.first_draining()) {
      const Pending free = slot->free;
      lock.unlock();
      wait_ignoring_failure(free);
      lock.lock();
      slots_.drop(*slot);  // only this thread does
    } else if (is_busy_ || !items_.empty()) {
      changed_.wait(lock);
    } else {
      // Sent ahead in vain; the last one is needed last.
      const auto piece = std::find_if(pieces_.rbegin(), pieces_.rend(), [](const Piece& each) {
        return each.slot != nullptr && each.slot->is_lent;
      });
      TESSERA_INVARIANT(piece != pieces_.rend(), "a slot for an update is taken by nobody");
      slots_.put_back(*std::exchange(piece->slot, nullptr));
    }
  }
}

// Own slots are free, with a copy down under way at most, or have pieces that were sent ahead. Lent
// ones may be wanted back.
UpdateSlot* DeviceUpdate::take_slot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (UpdateSlot* const slot = slots_.take()) {
    return slot;
  }
  const auto last = std::find_if(pieces_.rbegin(), pieces_.rend(), [](const Piece& piece) {
    return piece.slot != nullptr && !piece.slot->is_lent;
  });
  TESSERA_INVARIANT(last != pieces_.rend(), "there is no slot for an update");
  slots_.put_back(*std::exchange(last->slot, nullptr));
  return slots_.take();
}

void DeviceUpdate::hand_over_item(const Item& item) {
  const States& states = states_[static_cast<std::size_t>(item.param)];
  for (std::size_t i = 0; i < states.num_pieces; ++i) {
    Piece& piece = pieces_[states.first_piece + i];
    if (piece.slot == nullptr) {
      piece.slot = take_slot();
      start_up(piece);
    }
    update_piece(piece, item, i + 1 == states.num_pieces);
  }
}

bool DeviceUpdate::can_go_ahead() {
  while (next_ahead_ < pieces_.size() &&
         (pieces_[next_ahead_].slot != nullptr || pieces_[next_ahead_].is_updated)) {
    ++next_ahead_;
  }
  return goes_ahead_ && next_ahead_ < pieces_.size() && slots_.num_free() > 0;
}

void DeviceUpdate::go_ahead(std::unique_lock<std::mutex>& lock) {
  Piece& piece = pieces_[next_ahead_++];
  piece.slot = slots_.take();
  lock.unlock();
  start_up(piece);
}

// See [Note: who hands pieces over].
void DeviceUpdate::hand_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !items_.empty() || can_go_ahead() || is_stopping_; });
    Item item;
    const bool has_item = !items_.empty();
    if (has_item) {
      item = std::move(items_.front());
      items_.pop_front();
    } else if (!can_go_ahead()) {
      return;
    }
    is_busy_ = true;
    std::exception_ptr error;
    try {
      if (has_item) {
        const std::exception_ptr before = failure_;
        lock.unlock();
        if (before) {
          std::rethrow_exception(before);
        }
        hand_over_item(item);
      } else {
        go_ahead(lock);
      }
    } catch (...) {
      error = std::current_exception();
      for (const auto& handed_over : {item.made, item.done}) {
        if (handed_over && handed_over->is_open()) {
          handed_over->fail(error);
        }
      }
    }
    lock.lock();
    failure_ = failure_ ? failure_ : error;
    goes_ahead_ = goes_ahead_ && !error;
    is_busy_ = false;
    changed_.notify_all();
  }
}

void DeviceUpdate::wait_handed_over() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty() && !is_busy_; });
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void DeviceUpdate::wait() {
  wait_handed_over();
  std::vector<Pending> last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = {last_update_, last_parameter_};
  }
  Pending::all(std::move(last)).wait();
}

void DeviceUpdate::wait_all() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    goes_ahead_ = false;
  }
  wait();
  for (const Piece& piece : pieces_) {
    piece.down.wait();
  }
  read_.synchronize();
}

}  // namespace tessera::optim
