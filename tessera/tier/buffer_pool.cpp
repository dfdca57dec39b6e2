#include "tessera/tier/buffer_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_memory.h"
#include "tessera/tier/io_engine.h"

namespace tessera::tier {

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Lease::reset() noexcept {
  if (pool_ != nullptr) {
    pool_->give_back(data_, bytes_);
  }
  pool_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

BufferPool::BufferPool(device::Device& device, Tier tier, std::size_t bytes, std::string name)
    : name_(std::move(name)),
      capacity_(whole_blocks(bytes)),
      region_(device.allocate(tier, capacity_, Role::kStaging, kBlockBytes)) {
  if (capacity_ > 0) {
    device::prefer_huge_pages(region_.data(), capacity_);
    pieces_.emplace(0, Piece{capacity_, true});
  }
}

Lease BufferPool::acquire(std::size_t bytes) {
  const std::size_t rounded = rounded_or_refused(bytes);
  std::unique_lock lock(mutex_);
  refuse_if_closed();
  if (rounded == 0 || waiters_.empty()) {
    if (std::optional<Lease> lease = take(rounded)) {
      return std::move(*lease);
    }
  }
  ++num_waits_;
  // Leaves the queue on every way out; what is left may be enough for the next in it.
  struct Queued {
    BufferPool& pool;
    const std::list<std::size_t>::iterator place =
        pool.waiters_.insert(pool.waiters_.end(), pool.num_waits_);
    ~Queued() {
      pool.waiters_.erase(place);
      pool.changed_.notify_all();
    }
  } queued{*this};
  std::optional<Lease> lease;
  changed_.wait(lock, [&] {
    if (!closed_ && queued.place == waiters_.begin()) {
      lease = take(rounded);
    }
    return closed_ || lease;
  });
  if (!lease) {
    refuse_if_closed();
  }
  return std::move(*lease);
}

std::optional<Lease> BufferPool::try_acquire(std::size_t bytes) {
  const std::size_t rounded = rounded_or_refused(bytes);
  const std::lock_guard lock(mutex_);
  refuse_if_closed();
  return rounded == 0 || waiters_.empty() ? take(rounded) : std::nullopt;
}

void BufferPool::close(std::exception_ptr reason) {
  TESSERA_INVARIANT(reason != nullptr, name_, ": a pool is closed with the error that ends it");
  const std::lock_guard lock(mutex_);
  if (!closed_) {
    closed_ = std::move(reason);
  }
  changed_.notify_all();
}

std::size_t BufferPool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return capacity_ - leased_;
}

std::size_t BufferPool::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::size_t BufferPool::num_waits() const {
  const std::lock_guard lock(mutex_);
  return num_waits_;
}

std::size_t BufferPool::rounded_or_refused(std::size_t bytes) const {
  // Compared before rounding, which a number near the largest there is would not survive.
  TESSERA_CHECK(bytes <= capacity_, ConfigError, name_, ": ", bytes,
                " bytes are needed in one piece, the pool has ", capacity_,
                "; raise the memory budget, or make the pieces smaller");
  return whole_blocks(bytes);
}

void BufferPool::refuse_if_closed() const {
  if (closed_) {
    std::rethrow_exception(closed_);
  }
}

// The smallest piece that is large enough, and of those the first: leases of a few sizes that come
// and go find the places of their like, and the large pieces stay whole.
std::optional<Lease> BufferPool::take(std::size_t bytes) {
  if (bytes == 0) {
    return Lease();
  }
  auto best = pieces_.end();
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    const bool fits = piece->second.is_free && piece->second.bytes >= bytes;
    if (fits && (best == pieces_.end() || piece->second.bytes < best->second.bytes)) {
      best = piece;
    }
  }
  if (best == pieces_.end()) {
    return std::nullopt;
  }
  const std::size_t offset = best->first;
  const std::size_t left = best->second.bytes - bytes;
  if (left > 0) {
    pieces_.emplace_hint(std::next(best), offset + bytes, Piece{left, true});
  }
  best->second = Piece{bytes, false};
  leased_ += bytes;
  peak_ = std::max(peak_, leased_);
  return Lease(*this, region_.data() + offset, bytes);
}

void BufferPool::give_back(std::byte* data, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  const auto piece = pieces_.find(static_cast<std::size_t>(data - region_.data()));
  piece->second.is_free = true;
  join_with_next(piece);
  if (piece != pieces_.begin()) {
    join_with_next(std::prev(piece));
  }
  leased_ -= bytes;
  changed_.notify_all();
}

void BufferPool::join_with_next(std::map<std::size_t, Piece>::iterator piece) noexcept {
  const auto next = std::next(piece);
  if (piece->second.is_free && next != pieces_.end() && next->second.is_free) {
    piece->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
}

}  // namespace tessera::tier
