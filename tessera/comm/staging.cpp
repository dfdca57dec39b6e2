#include "tessera/comm/staging.h"

#include <map>
#include <mutex>

namespace tessera::comm {

struct Staging::Shelf {
  struct Buffer {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };

  explicit Shelf(Ledger* charged) : ledger(charged) {}
  ~Shelf() {
    for (const auto& [bytes, memory] : idle) {
      discharge(bytes);
    }
  }

  void discharge(std::size_t bytes) const {
    if (ledger != nullptr) {
      ledger->discharge(Tier::kHost, Role::kStaging, bytes);
    }
  }

  // The smallest idle buffer that holds `bytes` without wasting more than it uses.
  Buffer find(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    const auto found = idle.lower_bound(bytes);
    if (found == idle.end() || found->first > 2 * bytes) {
      return {};
    }
    Buffer buffer{found->second, found->first};
    idle.erase(found);
    return buffer;
  }

  void put_back(Buffer buffer) {
    const std::lock_guard lock(mutex);
    idle.emplace(buffer.bytes, std::move(buffer.memory));
    if (idle.size() > kMaxKept) {
      // The smallest is the cheapest to make again.
      discharge(idle.begin()->first);
      idle.erase(idle.begin());
    }
  }

  Ledger* const ledger;
  std::mutex mutex;
  std::multimap<std::size_t, std::shared_ptr<std::byte>> idle;  // guarded by mutex
};

Staging::Staging(Backend& backend, Ledger* ledger)
    : backend_(backend), shelf_(std::make_shared<Shelf>(ledger)) {}

std::shared_ptr<std::byte> Staging::take(std::size_t bytes, device::Stream* stream) {
  if (backend_.stream_ordered()) {
    return backend_.make_staging(bytes, stream);
  }
  Shelf::Buffer buffer = shelf_->find(bytes);
  if (!buffer.memory) {
    buffer = {backend_.make_staging(bytes, stream), bytes};
    if (shelf_->ledger != nullptr) {
      shelf_->ledger->charge(Tier::kHost, Role::kStaging, bytes);
    }
  }
  std::byte* const data = buffer.memory.get();
  return {data,
          [shelf = shelf_, buffer = std::move(buffer)](std::byte*) { shelf->put_back(buffer); }};
}

}  // namespace tessera::comm
