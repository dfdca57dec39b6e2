#include "tessera/comm/staging.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/device/arena_map.h"

namespace tessera::comm {
namespace {

// Memory of the backend, on the books while it lives.
class Buffer {
 public:
  Buffer(std::shared_ptr<std::byte> memory, std::size_t bytes, Ledger* ledger)
      : memory_(std::move(memory)), bytes_(bytes), ledger_(ledger) {
    if (ledger_ != nullptr) {
      ledger_->charge(Tier::kHost, Role::kStaging, bytes_);
    }
  }
  ~Buffer() {
    memory_.reset();
    if (ledger_ != nullptr) {
      ledger_->discharge(Tier::kHost, Role::kStaging, bytes_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
  Ledger* const ledger_;
};
using BufferPtr = std::shared_ptr<Buffer>;

struct Region {
  explicit Region(BufferPtr memory) : buffer(std::move(memory)), map(buffer->bytes()) {}
  const BufferPtr buffer;
  device::ArenaMap map;  // guarded by the state's mutex
};

// How long the network may hold a call that has come to its end.
constexpr std::chrono::seconds kLetGoLimit{10};

void keep_for_good(BufferPtr buffer) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<BufferPtr>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(buffer));
}

}  // namespace

// Outlives the Staging in what was taken from it.
struct Staging::State {
  explicit State(Ledger* charged) : ledger(charged) {}

  // The smallest idle buffer that holds `bytes` without wasting more than it uses.
  BufferPtr find_idle(std::size_t bytes) {
    const auto found = idle.lower_bound(bytes);
    if (found == idle.end() || found->first > 2 * bytes) {
      return nullptr;
    }
    return std::move(idle.extract(found).mapped());
  }

  void put_back(BufferPtr buffer) {
    {
      const std::lock_guard lock(mutex);
      if (is_closed) {
        keep_for_good(std::move(buffer));
      } else if (region == nullptr) {
        const std::size_t bytes = buffer->bytes();
        idle.emplace(bytes, std::move(buffer));
        if (idle.size() > kMaxKept) {
          idle.erase(idle.begin());  // the smallest is the cheapest to make again
        }
      }
      buffer.reset();
      --num_taken;
    }
    changed.notify_all();
  }

  void put_back(std::shared_ptr<Region> of, const device::Extent& extent) {
    {
      const std::lock_guard lock(mutex);
      of->map.release(extent);
      if (is_closed) {
        keep_for_good(of->buffer);
      }
      of.reset();
      --num_taken;
    }
    changed.notify_all();
  }

  Ledger* const ledger;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::multimap<std::size_t, BufferPtr> idle;  // by bytes; empty beside a region
  std::shared_ptr<Region> region;              // null: the shelf
  // And not given back: until then a region or buffer that was replaced is on the books.
  std::size_t num_taken = 0;
  bool is_stopped = false;
  bool is_closed = false;  // see [Note: what outlives the group]
};

Staging::Staging(Backend& backend, Ledger* ledger, device::Device* copied_from)
    : backend_(backend),
      copied_from_(copied_from),
      state_(std::make_shared<State>(copied_from == nullptr ? ledger : nullptr)) {}

Staging::~Staging() {
  if (copied_from_ == nullptr) {
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kLetGoLimit,
                           [&] { return state_->is_stopped || state_->num_taken == 0; });
  state_->is_closed = true;
  state_->idle.clear();
  state_->region.reset();
}

std::shared_ptr<std::byte> Staging::allocate(std::size_t bytes, device::Stream* stream) {
  if (copied_from_ == nullptr) {
    return backend_.make_staging(bytes, stream);
  }
  auto memory = std::make_shared<device::Memory>(
      copied_from_->allocate(Tier::kPinned, bytes, Role::kStaging));
  return {memory, memory->data()};
}

void Staging::take(StagingLease& lease, device::Stream* stream) {
  const std::size_t bytes = lease.bytes();
  if (backend_.stream_ordered()) {
    lease.memory_ = backend_.make_staging(bytes, stream);
    return;
  }
  std::unique_lock lock(state_->mutex);
  std::optional<device::Extent> extent;
  // A region may be replaced by another one meanwhile.
  const auto may_go_on = [&] {
    if (state_->is_stopped || state_->region == nullptr) {
      return true;
    }
    extent = state_->region->map.place(bytes);
    return extent || device::round_to_arena(bytes) > state_->region->buffer->bytes();
  };
  state_->changed.wait(lock, may_go_on);
  TESSERA_CHECK(!state_->is_stopped, CommError, "the group is out of use: a call that waited for ",
                bytes, " bytes of staging is given up");
  if (extent) {
    ++state_->num_taken;
    lease.memory_ = {state_->region->buffer->data() + extent->offset,
                     [state = state_, region = state_->region, taken = *extent](
                         std::byte*) mutable { state->put_back(std::move(region), taken); }};
    return;
  }
  BufferPtr buffer = state_->find_idle(bytes);
  if (!buffer) {
    buffer = std::make_shared<Buffer>(allocate(bytes, stream), bytes, state_->ledger);
  }
  ++state_->num_taken;
  std::byte* const data = buffer->data();
  lease.memory_ = {data, [state = state_, buffer = std::move(buffer)](std::byte*) mutable {
                     state->put_back(std::move(buffer));
                   }};
}

void Staging::reserve(std::size_t bytes) {
  if (backend_.stream_ordered()) {
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->is_stopped || state_->num_taken == 0; });
  state_->idle.clear();
  state_->region.reset();
  if (bytes > 0) {
    state_->region = std::make_shared<Region>(
        std::make_shared<Buffer>(allocate(bytes, nullptr), bytes, state_->ledger));
  }
  lock.unlock();
  state_->changed.notify_all();
}

void Staging::stop() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_stopped = true;
  }
  state_->changed.notify_all();
}

}  // namespace tessera::comm
