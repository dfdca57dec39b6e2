#include "tessera/comm/staging.h"

#include <algorithm>
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

constexpr std::size_t kPackAlignment = 16;

// Of one rank's pieces: in the pack, and by themselves; and what `num_pieces` of each take that are
// received beside their place.
struct Pieces {
  std::size_t packed = 0;
  std::size_t direct = 0;
  std::size_t copied = 0;
};

Pieces add_up(std::span<const GatherPiece> all, std::size_t pack_below_bytes,
              std::size_t num_pieces, CallMemory memory) {
  std::vector<std::size_t> wire_bytes;
  for (const GatherPiece& piece : all) {
    wire_bytes.push_back(piece.wire_bytes);
  }
  const std::vector<bool> is_packed =
      packed_pieces(wire_bytes, memory == CallMemory::kShared ? 0 : pack_below_bytes);
  Pieces pieces;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (is_packed[i]) {
      pieces.packed += packed_bytes(wire_bytes[i]);
    } else {
      pieces.direct += wire_bytes[i];
      pieces.copied += is_staged_piece(all[i], num_pieces, memory)
                           ? staging_room(wire_bytes[i] * num_pieces)
                           : 0;
    }
  }
  return pieces;
}

std::vector<GatherPiece> not_encoded(std::span<const std::size_t> shard_bytes) {
  std::vector<GatherPiece> pieces;
  for (const std::size_t bytes : shard_bytes) {
    pieces.push_back({bytes, false});
  }
  return pieces;
}

// What the buffers of one Staging are charged. The ledger may go when the Staging has: a call that
// is stuck in the network frees its buffer later (see [Note: what outlives the group]).
class Charges {
 public:
  Charges(Tier tier, Ledger* ledger) : tier_(tier), ledger_(ledger) {}

  void add(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (ledger_ != nullptr) {
      ledger_->charge(tier_, Role::kStaging, bytes);
      bytes_ += bytes;
    }
  }
  void remove(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (ledger_ != nullptr) {
      ledger_->discharge(tier_, Role::kStaging, bytes);
      bytes_ -= bytes;
    }
  }
  // Takes everything off the ledger, and does not use it any more.
  void close() {
    const std::lock_guard lock(mutex_);
    if (Ledger* const ledger = std::exchange(ledger_, nullptr); ledger != nullptr && bytes_ > 0) {
      ledger->discharge(tier_, Role::kStaging, bytes_);
    }
  }

 private:
  const Tier tier_;
  // Guarded by mutex_.
  std::mutex mutex_;
  Ledger* ledger_;  // null: nothing is charged
  std::size_t bytes_ = 0;
};

// Memory of the backend, charged while it lives and its Staging does.
class Buffer {
 public:
  Buffer(std::shared_ptr<std::byte> memory, std::size_t bytes, std::shared_ptr<Charges> charges)
      : memory_(std::move(memory)), bytes_(bytes), charges_(std::move(charges)) {
    charges_->add(bytes_);
  }
  ~Buffer() {
    memory_.reset();
    charges_->remove(bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
  const std::shared_ptr<Charges> charges_;
};
using BufferPtr = std::shared_ptr<Buffer>;

// How long the network may hold a call that has ended.
constexpr std::chrono::seconds kFreeLimit{10};

void keep_for_good(BufferPtr buffer) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<BufferPtr>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(buffer));
}

}  // namespace

std::vector<bool> packed_pieces(std::span<const std::size_t> shard_bytes,
                                std::size_t pack_below_bytes) {
  std::vector<bool> is_packed(shard_bytes.size());
  std::transform(shard_bytes.begin(), shard_bytes.end(), is_packed.begin(),
                 [&](std::size_t bytes) { return is_small_piece(bytes, pack_below_bytes); });
  if (std::count(is_packed.begin(), is_packed.end(), true) == 1) {
    is_packed.assign(is_packed.size(), false);
  }
  return is_packed;
}

std::size_t packed_bytes(std::size_t shard_bytes) {
  return (shard_bytes + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
}

std::size_t all_gather_staging_bytes(std::span<const GatherPiece> pieces,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const Pieces all = add_up(pieces, pack_below_bytes, ranks, memory);
  return staging_room(all.packed * ranks) + all.copied;
}

std::size_t all_gather_staging_bytes(std::span<const std::size_t> shard_bytes,
                                     std::size_t pack_below_bytes, int num_ranks,
                                     CallMemory memory) {
  return all_gather_staging_bytes(not_encoded(shard_bytes), pack_below_bytes, num_ranks, memory);
}

std::size_t gather_to_staging_bytes(std::span<const GatherPiece> pieces,
                                    std::size_t pack_below_bytes, const GatherToStaging& call) {
  if (call.num_wanting == 0) {
    return 0;
  }
  const auto num_pieces = static_cast<std::size_t>(call.receives ? call.num_ranks : 1);
  const Pieces all = add_up(pieces, pack_below_bytes, num_pieces, call.memory);
  const std::size_t copies =
      call.copies && call.memory != CallMemory::kShared
          ? (all.packed + all.direct) * static_cast<std::size_t>(call.num_wanting)
          : 0;
  return staging_room(all.packed * num_pieces) + staging_room(copies) + all.copied;
}

std::size_t gather_to_staging_bytes(std::span<const std::size_t> shard_bytes,
                                    std::size_t pack_below_bytes, const GatherToStaging& call) {
  return gather_to_staging_bytes(not_encoded(shard_bytes), pack_below_bytes, call);
}

std::size_t reduce_scatter_staging_bytes(std::int64_t shard_numel, DType dtype, int num_ranks,
                                         CallMemory memory) {
  if (num_ranks == 1 || memory == CallMemory::kShared) {
    return 0;
  }
  const auto numel = static_cast<std::size_t>(shard_numel);
  const std::size_t all =
      staging_room(numel * bytes_of(dtype) * static_cast<std::size_t>(num_ranks));
  // What is received; and the copies of what is sent and of the sum, in the wider type it may have.
  return memory == CallMemory::kReached
             ? all
             : 2 * all + staging_room(numel * std::max(bytes_of(dtype), sizeof(float)));
}

std::size_t encoded_reduce_scatter_staging_bytes(std::size_t wire_bytes, int num_ranks) {
  return 2 * staging_room(wire_bytes * static_cast<std::size_t>(num_ranks));
}

std::size_t all_reduce_staging_bytes(std::int64_t numel, DType dtype, int num_ranks,
                                     CallMemory memory) {
  if (num_ranks == 1 || memory == CallMemory::kShared) {
    return 0;
  }
  const bool is_copied = memory == CallMemory::kCopied;
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const std::size_t bytes = static_cast<std::size_t>(numel) * bytes_of(dtype);
  if (bytes * ranks <= kSmallAllReduceBytes) {
    return staging_room(bytes * ranks) + (is_copied ? staging_room(bytes) : 0);
  }
  // What is received, and, where `num_ranks` does not divide, a copy with equal pieces.
  const std::size_t count = (static_cast<std::size_t>(numel) + ranks - 1) / ranks;
  const std::size_t padded = count * bytes_of(dtype) * ranks;
  return (is_copied || padded > bytes ? 2 : 1) * staging_room(padded);
}

std::size_t broadcast_staging_bytes(std::size_t bytes, CallMemory memory) {
  return memory == CallMemory::kCopied ? staging_room(bytes) : 0;
}

std::size_t all_to_all_staging_bytes(std::size_t piece_bytes, int num_ranks, CallMemory memory) {
  return memory == CallMemory::kCopied
             ? 2 * staging_room(piece_bytes * static_cast<std::size_t>(num_ranks))
             : 0;
}

// Outlives the Staging in what was taken from it.
struct Staging::State {
  State(Tier tier, Ledger* ledger) : charges(std::make_shared<Charges>(tier, ledger)) {}

  // The smallest idle buffer that holds `bytes` without wasting more than it uses.
  BufferPtr find_idle(std::size_t bytes) {
    const auto found = idle.lower_bound(bytes);
    if (found == idle.end() || found->first > 2 * bytes) {
      return nullptr;
    }
    return std::move(idle.extract(found).mapped());
  }

  // `extent`: which part of the region; null: the whole buffer, which was not the region.
  void put_back(BufferPtr buffer, const std::optional<device::Extent>& extent) {
    BufferPtr dropped;  // freed without the mutex: on a GPU that waits for its streams
    {
      const std::lock_guard lock(mutex);
      if (is_closed) {
        keep_for_good(std::move(buffer));
      } else if (extent && buffer == region) {
        region_map->release(*extent);
      } else if (!extent && region == nullptr) {
        const std::size_t bytes = buffer->bytes();
        idle.emplace(bytes, std::move(buffer));
        if (idle.size() > kMaxKept) {  // the smallest is the cheapest to make again
          dropped = std::move(idle.extract(idle.begin()).mapped());
        }
      } else {
        dropped = std::move(buffer);
      }
      buffer.reset();
      --num_taken;
    }
    changed.notify_all();
  }

  const std::shared_ptr<Charges> charges;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::multimap<std::size_t, BufferPtr> idle;  // by bytes; empty beside a region
  BufferPtr region;                            // null: the shelf
  std::optional<device::ArenaMap> region_map;
  // And not given back: until then a region or buffer that was replaced is on the books.
  std::size_t num_taken = 0;
  bool is_stopped = false;
  bool is_closed = false;  // see [Note: what outlives the group]
};

Staging::Staging(Backend& backend, Ledger* ledger, device::Device* copied_from)
    : backend_(backend),
      copied_from_(copied_from),
      state_(std::make_shared<State>(backend.staging_tier(),
                                     copied_from == nullptr ? ledger : nullptr)) {}

Staging::~Staging() {
  if (copied_from_ == nullptr) {
    state_->charges->close();
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kFreeLimit,
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
  if (backend_.stream_ordered() && !backend_.reads_peers()) {
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
    extent = state_->region_map->place(bytes);
    return extent || device::round_to_arena(bytes) > state_->region->bytes();
  };
  state_->changed.wait(lock, may_go_on);
  TESSERA_CHECK(!state_->is_stopped, CommError, "the group is out of use: a call that waited for ",
                bytes, " bytes of staging is aborted");
  BufferPtr buffer = extent ? state_->region : state_->find_idle(bytes);
  if (!buffer) {
    buffer = std::make_shared<Buffer>(allocate(bytes, stream), bytes, state_->charges);
  }
  ++state_->num_taken;
  std::byte* const data = buffer->data() + (extent ? extent->offset : 0);
  lease.memory_ = {data, [state = state_, buffer = std::move(buffer), extent](std::byte*) mutable {
                     state->put_back(std::move(buffer), extent);
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
    state_->region = std::make_shared<Buffer>(allocate(bytes, nullptr), bytes, state_->charges);
    state_->region_map.emplace(bytes);
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
