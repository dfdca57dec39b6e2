#include "tessera/checkpoint/snapshot.h"

#include <unistd.h>

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
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/core/error.h"
#include "tessera/device/handed_over.h"
#include "tessera/shard/shard_store.h"

namespace tessera::checkpoint {
namespace {

using device::Pending;

static_assert(kTileStep == shard::kShardStep);

// Being read, and being written.
constexpr std::size_t kNumTiles = 8;
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

// Of this thread, and of those that it makes. Not so low that on a full machine a save would never
// end.
void lower_priority() noexcept { std::ignore = ::nice(10); }

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
    // Of kCopying, in which it is the copying thread's, and of kBuffered, until its tiles share it.
    tier::Lease lease;
    Pending copied;
    std::shared_ptr<const tier::Lease> shared_lease;  // of kBuffered while tiles are taken
    std::size_t num_tiles_out = 0;  // taken, and not read; of what was buffered, not written
    bool all_taken = false;
  };
  // A part of a tensor that is read at once.
  struct Tile {
    std::size_t tensor = 0;
    std::int64_t begin = 0;
    std::int64_t numel = 0;
  };
  // A tile on its way to the file.
  struct Piece {
    std::uint64_t number = 0;  // in the order of the file
    Tile tile;
    Owner* owner = nullptr;
    std::size_t slot = 0;  // of the tiles' memory; taken also by what was buffered
    FilePlace place;
    const std::byte* from = nullptr;  // may be null where the tile has no elements
    Pending read;
    std::shared_ptr<const tier::Lease> lease;  // of what was buffered; null: the slot's memory
    bool is_out = true;                        // of its owner's num_tiles_out
  };
  // A tensor's checksum, which takes its tiles in order.
  struct Checksum {
    Xxh3 hash;
    std::int64_t next = 0;                  // first element that it lacks
    bool is_busy = false;                   // a thread adds the tile that begins there
    std::map<std::int64_t, Piece> waiting;  // by their first elements
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
        num_threads(std::clamp(given.num_threads, 1, static_cast<int>(kNumTiles))),
        in_background(given.in_background),
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
    end_waiting = owners.size();
    for (std::size_t slot = kNumTiles; slot-- > 0;) {
      free_slots.push_back(slot);
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
    was_asked = true;
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
    fail_locked(std::move(error));
  }
  void fail_locked(std::exception_ptr error) {
    if (failure || is_done) {
      return;
    }
    failure = std::move(error);
    if (writer) {
      writer->fail(failure);
    }
    for (Owner* const owner : urgent) {
      hand_over(*owner, {});
    }
    urgent.clear();
    if (Owner* const owner = std::exchange(current, nullptr)) {
      owner->all_taken = true;
      if (owner->num_tiles_out == 0) {
        finish_reading(*owner);
      }
    }
    changed.notify_all();
  }

  // --- the snapshot's threads ---

  void run() {
    if (in_background) {
      lower_priority();
    }
    try {
      std::vector<std::thread> helpers;
      while (helpers.size() + 1 < static_cast<std::size_t>(num_threads)) {
        try {
          helpers.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
          break;  // no more threads to be had: those that there are do it all
        }
      }
      work();
      for (std::thread& helper : helpers) {
        helper.join();
      }
      check();
      writer->finish();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        results[i].written.offset = writer->written(i).offset;
      }
    } catch (...) {
      fail(std::current_exception());
    }
    end();
  }

  void work() {
    while (std::optional<Piece> piece = take_piece()) {
      write(std::move(*piece));
    }
  }

  // A piece that is older than all whose reads were started; those are started as long as there are
  // slots. Nothing: there is no more for this thread to do.
  // The file's staging advances only behind the oldest piece. Whoever has started the read of that
  // one takes it, unless another does, and never a younger one before: so nobody waits in vain.
  std::optional<Piece> take_piece() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      if (!failure && !free_slots.empty() && has_next()) {
        std::optional<Piece> piece = claim();
        if (!piece) {
          continue;
        }
        lock.unlock();
        start_reading(*piece);
        lock.lock();
        // What was in host memory is in this core's cache now.
        if (piece->read.done() && (started.empty() || piece->number < started.begin()->first)) {
          return piece;
        }
        started.emplace(piece->number, std::move(*piece));
        continue;
      }
      if (!started.empty()) {
        const auto oldest = started.begin();
        Piece piece = std::move(oldest->second);
        started.erase(oldest);
        return piece;
      }
      if (failure || is_all_taken()) {
        return std::nullopt;
      }
      changed.wait(lock);
    }
  }

  // --- the mutex is held ---

  bool has_next() {
    skip_what_has_begun();
    return current != nullptr || !urgent.empty() || !buffered.empty() || next_waiting < end_waiting;
  }
  bool is_all_taken() { return !has_next() && num_copying == 0; }

  void skip_what_has_begun() {
    while (next_waiting < end_waiting && owners[next_waiting].state != State::kWaiting) {
      ++next_waiting;
    }
    while (next_waiting < end_waiting && owners[end_waiting - 1].state != State::kWaiting) {
      --end_waiting;
    }
  }

  // REQUIRES: has_next().
  Owner* next_owner() {
    must_make_room = must_make_room && !buffered.empty();
    if (!urgent.empty()) {
      return take(urgent, State::kReading);
    }
    if (next_waiting < end_waiting && !must_make_room) {
      Owner& owner = was_asked ? owners[--end_waiting] : owners[next_waiting++];
      owner.state = State::kReading;
      return &owner;
    }
    return take(buffered, State::kBuffered);
  }

  static Owner* take(std::deque<Owner*>& queue, State state) {
    Owner* const owner = queue.front();
    queue.pop_front();
    owner->state = state;
    return owner;
  }

  // The next tile, with its place in the file. Nothing: it could not be made, which is a failure.
  std::optional<Piece> claim() {
    try {
      if (current == nullptr) {
        current = next_owner();
        current_tiles = tiles_of(*current);
        next_tile = 0;
        if (current->state == State::kBuffered) {
          current->shared_lease = std::make_shared<const tier::Lease>(std::move(current->lease));
          next_buffered = current->shared_lease->data();
        }
      }
      const Tile tile = current_tiles[next_tile];
      const TensorEntry& entry = tensors[tile.tensor].entry;
      if (tile.begin == 0) {
        writer->begin(tile.tensor);
      }
      Piece piece;
      piece.number = next_number++;
      piece.tile = tile;
      piece.owner = current;
      piece.place = writer->place(static_cast<std::uint64_t>(tile.numel) * bytes_of(entry.dtype));
      piece.slot = free_slots.back();
      if (current->state == State::kBuffered) {
        piece.lease = current->shared_lease;
        piece.from = next_buffered + static_cast<std::size_t>(tile.begin) * bytes_of(entry.dtype);
        piece.read = current->copied;
        if (tile.begin + tile.numel == numel_of(entry)) {
          next_buffered += room_for(entry);
        }
      } else {
        piece.from = tile_memory.data() + piece.slot * tile_bytes;
      }
      free_slots.pop_back();
      ++current->num_tiles_out;
      if (++next_tile == current_tiles.size()) {
        current->all_taken = true;
        current->shared_lease.reset();
        current = nullptr;
      }
      return piece;
    } catch (...) {
      fail_locked(std::current_exception());
      return std::nullopt;
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

  void finish_reading(Owner& owner) {
    owner.state = State::kRead;
    if (owner.released && owner.released->is_open()) {
      hand_over(owner, {});
    }
  }

  // The piece needs its owner no more.
  void let_go(Piece& piece) {
    if (std::exchange(piece.is_out, false) && --piece.owner->num_tiles_out == 0 &&
        piece.owner->all_taken) {
      finish_reading(*piece.owner);
    }
  }

  void finish(Piece& piece) {
    piece.lease.reset();
    let_go(piece);
    free_slots.push_back(piece.slot);
    changed.notify_all();
  }

  // --- without it ---

  // A failure is that of the piece's read.
  void start_reading(Piece& piece) const {
    if (piece.lease != nullptr || piece.tile.numel == 0) {
      return;
    }
    try {
      piece.read = tensors[piece.tile.tensor].start_read(
          piece.tile.begin, piece.tile.numel, tile_memory.data() + piece.slot * tile_bytes);
    } catch (...) {
      piece.read = Pending::failed(std::current_exception());
    }
  }

  void check() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  // After a failure: only waits until nothing is read any more.
  void write(Piece piece) {
    try {
      check();
      piece.read.wait();
      if (piece.lease == nullptr) {
        const std::lock_guard<std::mutex> lock(mutex);
        let_go(piece);
      }
      put(piece);
    } catch (...) {
      fail(std::current_exception());
      device::wait_ignoring_failure(piece.read);
      const std::lock_guard<std::mutex> lock(mutex);
      finish(piece);
    }
  }

  void put(Piece& piece) {
    const std::size_t number = piece.tile.tensor;
    const SnapshotTensor& tensor = tensors[number];
    const std::size_t element = bytes_of(tensor.entry.dtype);
    const std::span bytes(piece.from, static_cast<std::size_t>(piece.tile.numel) * element);
    const std::uint64_t begin = static_cast<std::uint64_t>(piece.tile.begin) * element;
    const std::vector<ContentPiece> parts =
        tensor.pieces.empty()
            ? std::vector<ContentPiece>{{0, tensor.entry.bytes(), tensor.content_begin}}
            : tensor.pieces;
    std::unique_lock<std::mutex> lock(mutex);
    Checksum& checksum = checksums[number];
    const bool is_next = take_turn(checksum, piece);
    lock.unlock();
    std::uint64_t content = 0;
    for (std::size_t offset = 0; offset < bytes.size(); offset += kPassBytes) {
      const auto pass = bytes.subspan(offset, std::min(kPassBytes, bytes.size() - offset));
      content += content_of(parts, begin + offset, pass);
      if (is_next) {
        checksum.hash.add(pass);
      }
      writer->fill(piece.place, offset, pass);
    }
    bytes_so_far += bytes.size();
    lock.lock();
    results[number].content += content;
    if (is_next || take_turn(checksum, piece)) {
      add_in_order(lock, number, piece, /*is_added=*/is_next);
    } else {
      const std::int64_t first = piece.tile.begin;
      checksum.waiting.emplace(first, std::move(piece));
    }
  }

  // Of bytes that begin at `begin` of their tensor.
  static std::uint64_t content_of(const std::vector<ContentPiece>& parts, std::uint64_t begin,
                                  std::span<const std::byte> bytes) {
    std::uint64_t sum = 0;
    for (const ContentPiece& part : parts) {
      const std::uint64_t first = std::max(begin, part.begin);
      const std::uint64_t last = std::min(begin + bytes.size(), part.begin + part.bytes);
      if (first < last) {
        ContentHash hash(part.content_begin + first - part.begin);
        hash.add(bytes.subspan(first - begin, last - first));
        sum += hash.value();
      }
    }
    return sum;
  }

  static bool take_turn(Checksum& checksum, const Piece& piece) {
    if (checksum.is_busy || checksum.next != piece.tile.begin) {
      return false;
    }
    checksum.is_busy = true;
    return true;
  }

  // Whose turn it is adds its tile, unless that was done, and those behind it that have come
  // meanwhile.
  void add_in_order(std::unique_lock<std::mutex>& lock, std::size_t number, Piece& first,
                    bool is_added) {
    Checksum& checksum = checksums[number];
    const TensorEntry& entry = tensors[number].entry;
    std::optional<Piece> piece = std::move(first);
    while (piece) {
      if (!std::exchange(is_added, false)) {
        lock.unlock();
        checksum.hash.add(
            {piece->from, static_cast<std::size_t>(piece->tile.numel) * bytes_of(entry.dtype)});
        lock.lock();
      }
      checksum.next += piece->tile.numel;
      finish(*piece);
      piece.reset();
      if (const auto next = checksum.waiting.find(checksum.next); next != checksum.waiting.end()) {
        piece = std::move(next->second);
        checksum.waiting.erase(next);
      }
    }
    checksum.is_busy = false;
    if (checksum.next == numel_of(entry)) {
      results[number].written.xxh3 = checksum.hash.value();
      checksums.erase(number);
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
    std::unique_lock<std::mutex> lock(mutex);
    std::unique_ptr<FragmentWriter> ended = std::move(writer);
    lock.unlock();
    ended.reset();
    tile_memory.reset();
    lock.lock();
    // Of a failure; what they hold is read.
    while (!checksums.empty()) {
      for (auto& [first, piece] : checksums.begin()->second.waiting) {
        finish(piece);
      }
      checksums.erase(checksums.begin());
    }
    changed.wait(lock, [this] { return num_copying == 0; });
    for (Owner& owner : owners) {  // of a failure
      if (owner.lease.data() != nullptr || owner.shared_lease) {
        device::wait_ignoring_failure(owner.copied);
        owner.lease.reset();
        owner.shared_lease.reset();
      }
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

  // Until everything is written; the rest of everybody once it is done.
  std::unique_ptr<FragmentWriter> writer;
  device::Memory tile_memory;
  const int num_threads;
  const bool in_background;
  std::vector<SnapshotTensorResult> results;
  const std::uint64_t file_bytes;
  std::atomic<std::uint64_t> bytes_so_far{0};

  std::map<int, std::size_t> index;  // by owner
  std::deque<Owner> owners;          // in the order of their first tensors

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::size_t next_waiting = 0;  // no owner before it waits
  std::size_t end_waiting = 0;   // nor one from here on
  bool was_asked = false;        // by an update
  std::deque<Owner*> urgent;     // asked for, and there was no room; they wait
  std::deque<Owner*> buffered;
  bool must_make_room = false;  // somebody was refused whom room would have helped
  Owner* current = nullptr;     // whose tiles are taken now
  std::vector<Tile> current_tiles;
  std::size_t next_tile = 0;
  const std::byte* next_buffered = nullptr;  // where the tensor of the next tile lies in its lease
  std::vector<std::size_t> free_slots;
  std::uint64_t next_number = 0;
  std::map<std::uint64_t, Piece> started;     // being read, by their numbers
  std::map<std::size_t, Checksum> checksums;  // of tensors that have begun, and are not complete
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

bool Snapshot::wait_for(std::chrono::nanoseconds limit) const {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  return impl_->changed.wait_for(lock, limit, [this] { return impl_->is_done; });
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

void Snapshot::wait_for_bytes(std::uint64_t bytes, std::chrono::nanoseconds limit) const {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->changed.wait_for(lock, limit,
                          [&] { return impl_->is_done || impl_->bytes_so_far.load() >= bytes; });
}

}  // namespace tessera::checkpoint
