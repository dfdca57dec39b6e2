#include "tessera/checkpoint/snapshot.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/core/error.h"
#include "tessera/device/handed_over.h"
#include "tessera/shard/shard_store.h"

namespace tessera::checkpoint {
namespace {

using device::Pending;

static_assert(kTileStep == shard::kShardStep);

// Read ahead, and being written.
constexpr std::size_t kNumTiles = 4;
// Hashed and copied at once, so that what one pass has read lies in a cache for the next.
constexpr std::size_t kPassBytes = std::size_t{128} << 10;

// Done when the work is, whatever has become of it: updates go on. A stream is ordered behind the
// work itself, which is copies of its device then, and fails only with that.
class QuietState final : public device::PendingState {
 public:
  explicit QuietState(Pending work) : work_(std::move(work)) {}
  bool done() override { return work_.done(); }
  void wait() override { device::wait_ignoring_failure(work_); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    try {
      return work_.wait_for(limit);
    } catch (...) {  // whoever asks for the snapshot is told
      return true;
    }
  }
  std::optional<Pending> wait_handed_over() override { return work_; }

 private:
  const Pending work_;
};

Pending quiet(const Pending& work) {
  return work.state() == nullptr ? work : Pending(std::make_shared<QuietState>(work));
}

std::int64_t numel_of(const TensorEntry& entry) {
  return static_cast<std::int64_t>(entry.bytes() / bytes_of(entry.dtype));
}

// What a read of a whole tensor may touch.
std::size_t room_for(const TensorEntry& entry) {
  const std::int64_t steps = (numel_of(entry) + kTileStep - 1) / kTileStep;
  return tier::whole_blocks(static_cast<std::size_t>(steps * kTileStep) * bytes_of(entry.dtype));
}

}  // namespace

struct Snapshot::Impl {
  enum class State : std::uint8_t { kWaiting, kReading, kCopying, kBuffered, kRead };

  struct Owner {
    std::vector<std::size_t> tensors;
    std::size_t room = 0;  // in the buffer, for all of them
    // Guarded by mutex_.
    State state = State::kWaiting;
    // Of kReading and kCopying, and of kWaiting once it was asked for: fulfilled when they are
    // over.
    std::shared_ptr<device::HandedOver> released;
    // Of kCopying, in which it is the copying thread's, and of kBuffered, in which it is the
    // writer's when it has been taken from buffered_.
    tier::Lease lease;
    Pending copied;
  };
  // A part of a tensor that is read at once.
  struct Tile {
    std::size_t tensor = 0;
    std::int64_t begin = 0;
    std::int64_t numel = 0;
  };
  // What the reader hands to the writer.
  struct Piece {
    std::optional<Tile> tile;         // none: nothing is to be written
    const std::byte* from = nullptr;  // may be null where the tile has no elements
    Pending read;
    Owner* ends = nullptr;                     // whose last piece it is
    std::shared_ptr<const tier::Lease> lease;  // of what was buffered; null: a tile's memory
  };

  Impl(std::vector<SnapshotTensor> all, const SnapshotOptions& given)
      : tensors(std::move(all)),
        buffer(given.buffer),
        clock(given.clock),
        begin_ns(now_ns()),
        tile_bytes(std::max(tier::whole_blocks(given.tile_bytes),
                            static_cast<std::size_t>(kTileStep) * sizeof(double))),
        writer(std::make_unique<FragmentWriter>(given.path, entries(), given.writer)),
        tile_memory(given.device->allocate(given.tier, kNumTiles * tile_bytes, Role::kStaging,
                                           tier::kBlockBytes)),
        results(tensors.size()),
        file_bytes(writer->file_bytes()) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [found, is_new] = index.emplace(tensors[i].owner, owners.size());
      if (is_new) {
        owners.emplace_back();
      }
      owners[found->second].tensors.push_back(i);
      owners[found->second].room += room_for(tensors[i].entry);
    }
    thread = std::thread([this] { run(); });
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::vector<TensorEntry> entries() const {
    std::vector<TensorEntry> list;
    for (const SnapshotTensor& tensor : tensors) {
      list.push_back(tensor.entry);
    }
    return list;
  }

  // While everything is still there for those that are inside release().
  void stop() {
    give_up();
    thread.join();
  }
  void give_up() {
    fail(std::make_exception_ptr(IoError("the snapshot was given up before it was complete")));
  }

  // --- whoever is about to change an owner's tensors ---

  Pending release(int id) {
    const auto found = index.find(id);
    if (found == index.end()) {
      return {};
    }
    Owner& owner = owners[found->second];
    std::unique_lock<std::mutex> lock(mutex);
    if (owner.state == State::kRead || (owner.state == State::kWaiting && failure)) {
      return {};
    }
    if (owner.state == State::kBuffered) {
      return quiet(owner.copied);
    }
    if (!owner.released) {
      owner.released = std::make_shared<device::HandedOver>();
      begin_holding();
      if (owner.state == State::kWaiting) {
        if (take_room(owner)) {
          return copy(owner, lock);
        }
        urgent.push_back(&owner);
        changed.notify_all();
      }
    }
    return Pending(owner.released);
  }

  // REQUIRES: the mutex is held.
  bool take_room(Owner& owner) {
    if (buffer == nullptr || owner.room > buffer->capacity_bytes()) {
      return false;
    }
    std::optional<tier::Lease> lease = buffer->try_acquire(owner.room);
    if (!lease) {
      must_make_room = !buffered.empty();
      return false;
    }
    owner.lease = std::move(*lease);
    return true;
  }

  // On the thread that asks: copies of host memory are made, others are started.
  Pending copy(Owner& owner, std::unique_lock<std::mutex>& lock) {
    owner.state = State::kCopying;
    ++num_copying;
    lock.unlock();
    std::vector<Pending> copies;
    std::exception_ptr error;
    try {
      std::byte* to = owner.lease.data();
      for (const std::size_t number : owner.tensors) {
        const SnapshotTensor& tensor = tensors[number];
        if (const std::int64_t numel = numel_of(tensor.entry); numel > 0) {
          copies.push_back(tensor.start_read(0, numel, to));
        }
        to += room_for(tensor.entry);
      }
    } catch (...) {
      error = std::current_exception();
    }
    const Pending copied = Pending::all(std::move(copies));
    if (error) {
      fail(error);
    }
    lock.lock();
    const bool is_of_use = !failure;
    if (!is_of_use) {
      // Nobody else would wait for what is under way into the lease.
      lock.unlock();
      device::wait_ignoring_failure(copied);
      owner.lease.reset();
      lock.lock();
    }
    owner.copied = is_of_use ? copied : Pending();
    owner.state = is_of_use ? State::kBuffered : State::kRead;
    if (is_of_use) {
      buffered.push_back(&owner);
    }
    const Pending released = quiet(owner.copied);
    hand_over(owner, released);
    --num_copying;
    changed.notify_all();
    return released;
  }

  // The first failure counts. What nobody reads is released; the rest by whoever reads it.
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure || is_done) {
      return;
    }
    failure = std::move(error);
    for (Owner* const owner : urgent) {
      hand_over(*owner, {});
    }
    urgent.clear();
    changed.notify_all();
  }

  // --- the writer ---

  void run() {
    try {
      std::thread reader([this] { read_all(); });
      while (std::optional<Piece> piece = take_piece()) {
        write(*piece);
      }
      reader.join();
      check();
      writer->finish();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        results[i].written = writer->written(i);
      }
    } catch (...) {
      fail(std::current_exception());
    }
    end();
  }

  std::optional<Piece> take_piece() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return has_read_all || !pieces.empty(); });
    if (pieces.empty()) {
      return std::nullopt;
    }
    Piece piece = std::move(pieces.front());
    pieces.pop_front();
    return piece;
  }

  // After a failure: only waits until nothing is read any more.
  void write(Piece& piece) {
    try {
      check();
      piece.read.wait();
      if (piece.ends != nullptr && piece.lease == nullptr) {
        finish_reading(*piece.ends);
      }
      if (piece.tile) {
        write_tile(*piece.tile, piece.from);
      }
    } catch (...) {
      fail(std::current_exception());
      device::wait_ignoring_failure(piece.read);
    }
    const bool had_tile = piece.tile && piece.lease == nullptr;
    piece.lease.reset();
    if (piece.ends != nullptr) {
      finish_reading(*piece.ends);
    }
    if (had_tile) {
      const std::lock_guard<std::mutex> lock(mutex);
      ++num_written_tiles;
      changed.notify_all();
    }
  }

  // Tiles of a tensor come in order.
  void write_tile(const Tile& tile, const std::byte* from) {
    const SnapshotTensor& tensor = tensors[tile.tensor];
    const std::size_t element = bytes_of(tensor.entry.dtype);
    const std::span bytes(from, static_cast<std::size_t>(tile.numel) * element);
    if (tile.begin == 0) {
      writer->begin(tile.tensor);
    }
    const std::uint64_t begin = static_cast<std::uint64_t>(tile.begin) * element;
    const std::vector<ContentPiece> pieces =
        tensor.pieces.empty()
            ? std::vector<ContentPiece>{{0, tensor.entry.bytes(), tensor.content_begin}}
            : tensor.pieces;
    for (std::size_t offset = 0; offset < bytes.size(); offset += kPassBytes) {
      const auto part = bytes.subspan(offset, std::min(kPassBytes, bytes.size() - offset));
      for (const ContentPiece& piece : pieces) {
        const std::uint64_t first = std::max(begin + offset, piece.begin);
        const std::uint64_t last =
            std::min(begin + offset + part.size(), piece.begin + piece.bytes);
        if (first < last) {
          ContentHash hash(piece.content_begin + first - piece.begin);
          hash.add(bytes.subspan(first - begin, last - first));
          results[tile.tensor].content += hash.value();
        }
      }
      writer->append(part);
    }
    bytes_so_far += bytes.size();
  }

  void finish_reading(Owner& owner) {
    const std::lock_guard<std::mutex> lock(mutex);
    owner.state = State::kRead;
    if (owner.released && owner.released->is_open()) {
      hand_over(owner, {});
    }
  }

  // --- the reader ---

  void read_all() {
    Owner* owner = nullptr;
    try {
      while ((owner = next()) != nullptr) {
        if (owner->state == State::kBuffered) {
          hand_buffered(*owner);
        } else {
          read_waiting(*owner);
        }
      }
    } catch (...) {
      fail(std::current_exception());
      Piece rest;  // behind what is being read of it
      rest.ends = owner;
      hand(std::move(rest));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    has_read_all = true;
    changed.notify_all();
  }

  void hand(Piece piece) {
    const std::lock_guard<std::mutex> lock(mutex);
    pieces.push_back(std::move(piece));
    changed.notify_all();
  }

  // Null: there is nothing more to do.
  Owner* next() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] {
      skip_what_has_begun();
      return failure || !urgent.empty() || !buffered.empty() || next_waiting < owners.size() ||
             num_copying == 0;
    });
    must_make_room = must_make_room && !buffered.empty();
    if (failure) {
      return nullptr;
    }
    if (!urgent.empty()) {
      return take(urgent, State::kReading);
    }
    if (next_waiting < owners.size() && !must_make_room) {
      Owner& owner = owners[next_waiting++];
      owner.state = State::kReading;
      return &owner;
    }
    return buffered.empty() ? nullptr : take(buffered, State::kBuffered);
  }

  void skip_what_has_begun() {
    while (next_waiting < owners.size() && owners[next_waiting].state != State::kWaiting) {
      ++next_waiting;
    }
  }

  static Owner* take(std::deque<Owner*>& queue, State state) {
    Owner* const owner = queue.front();
    queue.pop_front();
    owner->state = state;
    return owner;
  }

  void check() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  std::vector<Tile> tiles_of(const Owner& owner) const {
    std::vector<Tile> tiles;
    for (const std::size_t number : owner.tensors) {
      const TensorEntry& entry = tensors[number].entry;
      const auto most =
          static_cast<std::int64_t>(tile_bytes / bytes_of(entry.dtype)) / kTileStep * kTileStep;
      std::int64_t begin = 0;
      do {
        tiles.push_back({number, begin, std::min(most, numel_of(entry) - begin)});
        begin += most;
      } while (begin < numel_of(entry));
    }
    return tiles;
  }

  void read_waiting(Owner& owner) {
    const std::vector<Tile> tiles = tiles_of(owner);
    for (const Tile& tile : tiles) {
      Piece piece;
      piece.tile = tile;
      std::byte* const memory = await_tile();
      piece.from = memory;
      if (tile.numel > 0) {
        piece.read = tensors[tile.tensor].start_read(tile.begin, tile.numel, memory);
      }
      piece.ends = &tile == &tiles.back() ? &owner : nullptr;
      hand(std::move(piece));
    }
  }

  // They are written in the order in which they are handed out.
  std::byte* await_tile() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock,
                 [this] { return failure || num_read_tiles < num_written_tiles + kNumTiles; });
    if (failure) {
      std::rethrow_exception(failure);
    }
    return tile_memory.data() + num_read_tiles++ % kNumTiles * tile_bytes;
  }

  void hand_buffered(Owner& owner) {
    const auto lease = std::make_shared<const tier::Lease>(std::move(owner.lease));
    const std::byte* from = lease->data();
    const std::vector<Tile> tiles = tiles_of(owner);
    for (const Tile& tile : tiles) {
      const TensorEntry& entry = tensors[tile.tensor].entry;
      Piece piece;
      piece.tile = tile;
      piece.from = from + static_cast<std::size_t>(tile.begin) * bytes_of(entry.dtype);
      piece.read = owner.copied;
      piece.ends = &tile == &tiles.back() ? &owner : nullptr;
      piece.lease = lease;
      hand(std::move(piece));
      if (tile.begin + tile.numel == numel_of(entry)) {
        from += room_for(entry);
      }
    }
  }

  // --- times; the mutex is held ---

  std::int64_t now_ns() const { return clock == nullptr ? 0 : clock->now_ns(); }
  void begin_holding() {
    if (num_held++ == 0) {
      held_since_ns = now_ns();
    }
  }
  void hand_over(Owner& owner, const Pending& released) {
    owner.released->hand_over(released);
    if (--num_held == 0) {
      held_ns += now_ns() - held_since_ns;
    }
  }

  // Nothing is in flight any more, and all leases are given back, when it returns.
  void end() {
    writer.reset();
    tile_memory.reset();
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return num_copying == 0; });
    for (Owner* const owner : buffered) {  // of a failure
      device::wait_ignoring_failure(owner->copied);
      owner->lease.reset();
    }
    is_done = true;
    writing_ns = now_ns() - begin_ns;
    changed.notify_all();
  }

  const std::vector<SnapshotTensor> tensors;
  tier::BufferPool* const buffer;
  const Clock* const clock;
  const std::int64_t begin_ns;
  const std::size_t tile_bytes;

  // Of the writer; `results` and `file_bytes` of everybody once it is done.
  std::unique_ptr<FragmentWriter> writer;
  device::Memory tile_memory;
  std::vector<SnapshotTensorResult> results;
  const std::uint64_t file_bytes;
  std::atomic<std::uint64_t> bytes_so_far{0};

  std::map<int, std::size_t> index;  // by owner
  std::deque<Owner> owners;          // in the order of their first tensors

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::size_t next_waiting = 0;  // no owner before it waits
  std::deque<Owner*> urgent;     // asked for, and there was no room; they wait
  std::deque<Owner*> buffered;
  bool must_make_room = false;  // somebody was refused whom room would have helped
  std::deque<Piece> pieces;
  bool has_read_all = false;
  std::size_t num_read_tiles = 0;  // whose memory was handed out
  std::size_t num_written_tiles = 0;
  int num_copying = 0;
  int num_held = 0;  // releases that are not done
  std::int64_t held_since_ns = 0;
  std::int64_t held_ns = 0;
  std::int64_t writing_ns = 0;
  std::exception_ptr failure;
  bool is_done = false;

  std::thread thread;  // last: it uses everything above
};

Snapshot::Snapshot(std::vector<SnapshotTensor> tensors, const SnapshotOptions& options)
    : impl_(std::make_unique<Impl>(std::move(tensors), options)) {}

Snapshot::~Snapshot() { impl_->stop(); }

Pending Snapshot::release(int owner) { return impl_->release(owner); }

void Snapshot::give_up() { impl_->give_up(); }

bool Snapshot::done() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->is_done;
}

void Snapshot::wait() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->changed.wait(lock, [this] { return impl_->is_done; });
  if (impl_->failure) {
    std::rethrow_exception(impl_->failure);
  }
}

const std::vector<SnapshotTensorResult>& Snapshot::results() const { return impl_->results; }

SnapshotTimes Snapshot::times() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return {static_cast<double>(impl_->writing_ns) * 1e-9,
          static_cast<double>(impl_->held_ns) * 1e-9};
}

std::uint64_t Snapshot::file_bytes() const { return impl_->file_bytes; }

std::uint64_t Snapshot::bytes_so_far() const { return impl_->bytes_so_far; }

}  // namespace tessera::checkpoint
