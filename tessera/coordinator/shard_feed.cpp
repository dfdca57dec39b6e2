#include "tessera/coordinator/shard_feed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;

namespace {

// Large enough for the disk, small against any budget.
constexpr std::size_t kLargestTile = std::size_t{4} << 20;
constexpr std::size_t kSmallestTile = kSmallestFeedBytes / 2;

}  // namespace

FeedSizes feed_sizes(std::size_t buffer_bytes) {
  FeedSizes sizes;
  sizes.tile_bytes =
      std::clamp(buffer_bytes / 8 / kSmallestTile * kSmallestTile, kSmallestTile, kLargestTile);
  sizes.window_bytes = (buffer_bytes - std::min(buffer_bytes, 2 * sizes.tile_bytes)) /
                       tier::kBlockBytes * tier::kBlockBytes;
  return sizes;
}

ShardFeed::ShardFeed(shard::ParamTable& params, shard::ShardStore& store, device::Device& device,
                     Tier tier, std::size_t buffer_bytes)
    : params_(params),
      store_(store),
      device_(device),
      copies_(device.stream(device::StreamKind::kRead)),
      sizes_(feed_sizes(buffer_bytes)),
      tiles_(device, tier, 2 * sizes_.tile_bytes, "parameter tiles"),
      window_(device, tier, sizes_.window_bytes, "parameter window") {
  TESSERA_INVARIANT(buffer_bytes >= kSmallestFeedBytes, "a feed with ", buffer_bytes,
                    " bytes of buffers; it needs ", kSmallestFeedBytes);
  worker_ = std::thread([this] { carry_out(); });
}

ShardFeed::~ShardFeed() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
  forget_all();
}

std::int64_t ShardFeed::tile_numel(const Param& param) const {
  const auto numel =
      static_cast<std::int64_t>(sizes_.tile_bytes / bytes_of(param.layout().dtype()));
  return numel / shard::kShardStep * shard::kShardStep;
}

Pending ShardFeed::start_bring(const Param& param, std::byte* to, Pending ready) {
  auto done = std::make_shared<device::Completion>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(wanted_, [&](const Wanted& wanted) { return wanted.param == &param; });
    brings_.push_back({&param, to, param.updated(), std::move(ready), done});
  }
  changed_.notify_all();
  return Pending(std::move(done));
}

void ShardFeed::carry_out() {
  for (;;) {
    Bring next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return is_closing_ || !brings_.empty(); });
      if (brings_.empty()) {
        return;
      }
      next = std::move(brings_.front());
      brings_.pop_front();
      is_bringing_ = true;
    }
    try {
      bring(next);
      next.done->succeed();
    } catch (...) {
      next.done->fail(std::current_exception());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_bringing_ = false;
    }
    changed_.notify_all();
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (brings_.empty()) {  // else what is asked for comes first
        read_more();          // the window has room again
      }
    } catch (...) {  // whoever asks for the shard meets it again
    }
  }
}

void ShardFeed::wait_idle() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return brings_.empty() && !is_bringing_; });
}

void ShardFeed::bring(const Bring& bring) {
  bring.ready.wait();
  bring.updated.wait();
  const std::size_t bytes = bring.param->layout().shard_bytes();
  if (bytes == 0) {
    return;
  }
  if (!take_from_window(bring)) {
    stream_from_store(*bring.param, bring.to);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.brought_bytes += bytes;
}

bool ShardFeed::take_from_window(const Bring& bring) {
  Ahead found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = ahead_.find(bring.param->id());
    if (entry == ahead_.end() || !entry->second.is_whole) {
      return false;
    }
    found = std::move(entry->second);
    ahead_.erase(entry);
  }
  const std::size_t bytes = bring.param->layout().shard_bytes();
  try {
    found.read.wait();
  } catch (...) {
    return false;  // the store is asked again, and says what is wrong
  }
  device_.start_copy(bring.to, found.lease.data(), bytes, copies_).wait();
  const std::lock_guard<std::mutex> lock(mutex_);
  (found.is_update ? stats_.from_update_bytes : stats_.read_ahead_bytes) += bytes;
  return true;
}

// While one tile is copied, the next is read.
void ShardFeed::stream_from_store(const Param& param, std::byte* to) {
  store_.wait_written(param.id());
  const std::size_t element = bytes_of(param.layout().dtype());
  const std::int64_t shard_numel = param.layout().shard_numel();
  const std::int64_t step = tile_numel(param);
  struct Tile {
    tier::Lease lease;
    Pending read;
    std::int64_t begin = 0;
    std::int64_t numel = 0;
  };
  std::deque<Tile> tiles;
  std::int64_t next = 0;
  const auto start_next = [&] {
    Tile& tile = tiles.emplace_back();  // kept from here on, whatever is thrown
    tile.begin = next;
    tile.numel = std::min(step, shard_numel - next);
    tile.lease = tiles_.acquire(sizes_.tile_bytes);
    tile.read = store_.start_read(param, tile.begin, tile.numel, tile.lease.data());
    next += tile.numel;
  };
  try {
    while (next < shard_numel || !tiles.empty()) {
      while (next < shard_numel && tiles.size() < 2) {
        start_next();
      }
      Tile tile = std::move(tiles.front());
      tiles.pop_front();
      tile.read.wait();
      device_
          .start_copy(to + static_cast<std::size_t>(tile.begin) * element, tile.lease.data(),
                      static_cast<std::size_t>(tile.numel) * element, copies_)
          .wait();
    }
  } catch (...) {
    for (const Tile& tile : tiles) {  // their memory is being written until they are done
      try {
        tile.read.wait();
      } catch (...) {  // the first failure is on its way already
      }
    }
    throw;
  }
}

void ShardFeed::read_ahead(std::span<const int> ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wanted_.clear();
  listed_ = std::set<int>(ids.begin(), ids.end());
  for (const int id : ids) {
    if (params_[id].is_on_nvme() && params_[id].layout().shard_bytes() > 0) {
      wanted_.push_back({&params_[id], params_[id].updated()});
    }
  }
  read_more();
}

void ShardFeed::read_more() {
  while (!wanted_.empty()) {
    const Param& param = *wanted_.front().param;
    const auto known = ahead_.find(param.id());
    const bool is_being_brought = std::any_of(
        brings_.begin(), brings_.end(), [&](const Bring& bring) { return bring.param == &param; });
    if (known == ahead_.end() && !is_being_brought) {
      const std::size_t bytes = tier::whole_blocks(param.layout().shard_bytes());
      if (!wanted_.front().updated.done() || !store_.is_written(param.id()) ||
          bytes > window_.capacity_bytes()) {
        return;
      }
      std::optional<tier::Lease> lease = window_.try_acquire(bytes);
      while (!lease && let_one_go()) {
        lease = window_.try_acquire(bytes);
      }
      if (!lease) {
        return;
      }
      Ahead& entry = ahead_[param.id()];
      entry.lease = std::move(*lease);
      try {
        entry.read = store_.start_read(param, 0, param.layout().shard_numel(), entry.lease.data());
      } catch (...) {
        ahead_.erase(param.id());
        throw;
      }
      entry.is_whole = true;
    }
    wanted_.pop_front();
  }
}

bool ShardFeed::let_one_go() {
  const auto in_vain = std::find_if(ahead_.begin(), ahead_.end(), [this](const auto& entry) {
    const auto is_it = [&](const Bring& bring) { return bring.param->id() == entry.first; };
    return !entry.second.is_update && entry.second.read.done() && !listed_.contains(entry.first) &&
           std::none_of(brings_.begin(), brings_.end(), is_it);
  });
  if (in_vain == ahead_.end()) {
    return false;
  }
  ahead_.erase(in_vain);
  return true;
}

bool ShardFeed::offer(int id, std::int64_t begin, std::int64_t numel, const void* values) {
  const Param& param = params_[id];
  const std::size_t element = bytes_of(param.layout().dtype());
  if (param.layout().shard_bytes() == 0) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto entry = ahead_.find(id);
  if (entry == ahead_.end()) {
    const std::size_t bytes = tier::whole_blocks(param.layout().shard_bytes());
    if (begin != 0 || bytes > window_.capacity_bytes()) {
      return false;
    }
    std::optional<tier::Lease> lease = window_.try_acquire(bytes);
    if (!lease) {
      return false;
    }
    Ahead fresh;
    fresh.lease = std::move(*lease);
    fresh.is_update = true;
    const std::size_t used = static_cast<std::size_t>(param.range().numel) * element;
    std::memset(fresh.lease.data() + used, 0, fresh.lease.bytes() - used);
    entry = ahead_.emplace(id, std::move(fresh)).first;
  }
  Ahead& ahead = entry->second;
  if (!ahead.is_update || ahead.num_offered != begin) {
    return false;
  }
  const std::int64_t real = std::clamp<std::int64_t>(param.range().numel - begin, 0, numel);
  if (real > 0) {
    std::memcpy(ahead.lease.data() + static_cast<std::size_t>(begin) * element, values,
                static_cast<std::size_t>(real) * element);
  }
  ahead.num_offered += numel;
  ahead.is_whole = ahead.num_offered >= param.range().numel;
  return true;
}

void ShardFeed::forget(int id) {
  Ahead gone;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(wanted_, [id](const Wanted& wanted) { return wanted.param->id() == id; });
    const auto entry = ahead_.find(id);
    if (entry == ahead_.end()) {
      return;
    }
    gone = std::move(entry->second);
    ahead_.erase(entry);
  }
  try {
    gone.read.wait();  // its memory is being written
  } catch (...) {
    // Nobody wants what was read.
  }
}

void ShardFeed::forget_all() {
  forget_if([](const Ahead&) { return true; });
}

void ShardFeed::forget_read_ahead() {
  forget_if([](const Ahead& ahead) { return !ahead.is_update; });
}

template <typename Condition>
void ShardFeed::forget_if(Condition condition) {
  std::map<int, Ahead> gone;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted_.clear();
    for (auto entry = ahead_.begin(); entry != ahead_.end();) {
      const auto here = entry++;
      if (condition(here->second)) {
        gone.insert(ahead_.extract(here));
      }
    }
  }
  for (const auto& [id, ahead] : gone) {
    try {
      ahead.read.wait();
    } catch (...) {  // as in forget()
    }
  }
}

void ShardFeed::write(const Param& param, std::int64_t begin, std::int64_t numel,
                      const void* elements) {
  forget(param.id());
  store_.wait_written(param.id());
  const std::size_t element = bytes_of(param.layout().dtype());
  // What is behind the last element is padding, and part of what is written.
  const bool is_last = begin + numel == param.range().numel;
  const std::int64_t end = is_last ? param.layout().shard_numel() : begin + numel;
  const std::int64_t step = tile_numel(param);
  const auto* from = static_cast<const std::byte*>(elements);
  for (std::int64_t at = begin; at < end; at += step) {
    const std::int64_t count = std::min(step, end - at);
    const tier::Lease lease = tiles_.acquire(sizes_.tile_bytes);
    const std::size_t used =
        static_cast<std::size_t>(std::clamp<std::int64_t>(begin + numel - at, 0, count)) * element;
    if (used > 0) {
      std::memcpy(lease.data(), from + static_cast<std::size_t>(at - begin) * element, used);
    }
    std::memset(lease.data() + used, 0,
                tier::whole_blocks(static_cast<std::size_t>(count) * element) - used);
    store_.start_write(param, at, count, lease.data()).wait();
  }
}

void ShardFeed::read(const Param& param, void* to) {
  if (param.layout().shard_bytes() > 0) {
    start_bring(param, static_cast<std::byte*>(to), Pending()).wait();
  }
}

FeedStats ShardFeed::take_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(stats_, {});
}

}  // namespace tessera::coordinator
