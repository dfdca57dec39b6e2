#include "tessera/coordinator/shard_loader.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;

namespace {

// Large enough for the disk, small against any budget.
constexpr std::size_t kLargestTile = std::size_t{4} << 20;
constexpr std::size_t kSmallestTile = kSmallestLoaderBytes / 2;

}  // namespace

LoaderSizes loader_sizes(std::size_t buffer_bytes) {
  LoaderSizes sizes;
  sizes.tile_bytes =
      std::clamp(buffer_bytes / 8 / kSmallestTile * kSmallestTile, kSmallestTile, kLargestTile);
  sizes.window_bytes = (buffer_bytes - std::min(buffer_bytes, 2 * sizes.tile_bytes)) /
                       tier::kBlockBytes * tier::kBlockBytes;
  return sizes;
}

ShardLoader::ShardLoader(shard::ParamTable& params, shard::ShardStore* store,
                         device::Device& device, Tier tier, const LoaderSizes& sizes)
    : params_(params),
      store_(store),
      device_(device),
      gather_(device.stream(device::StreamKind::kGather)),
      read_(device.stream(device::StreamKind::kRead)),
      sizes_(sizes),
      tiles_(device, tier, 2 * sizes_.tile_bytes, "parameter tiles"),
      window_(device, tier, sizes_.window_bytes, "parameter window") {}

ShardLoader::ShardLoader(shard::ParamTable& params, device::Device& device)
    : ShardLoader(params, nullptr, device, Tier::kHost, LoaderSizes()) {}

ShardLoader::ShardLoader(shard::ParamTable& params, shard::ShardStore& store,
                         device::Device& device, Tier tier, std::size_t buffer_bytes)
    : ShardLoader(params, &store, device, tier, loader_sizes(buffer_bytes)) {
  TESSERA_INVARIANT(buffer_bytes >= kSmallestLoaderBytes, "a loader with ", buffer_bytes,
                    " bytes of buffers; it needs ", kSmallestLoaderBytes);
  params_.set_receiver([this](int id, std::int64_t begin, std::int64_t numel, const void* values) {
    return receive(id, begin, numel, values);
  });
}

ShardLoader::~ShardLoader() {
  if (store_ != nullptr) {
    params_.set_receiver({});
  }
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  for (Lane* lane : {&host_, &nvme_}) {
    if (lane->worker.joinable()) {
      lane->worker.join();
    }
  }
  forget_all();
}

std::int64_t ShardLoader::tile_numel(const Param& param) const {
  const auto numel =
      static_cast<std::int64_t>(sizes_.tile_bytes / bytes_of(param.layout().stored_dtype()));
  return numel / shard::kShardStep * shard::kShardStep;
}

Pending ShardLoader::start_load(const Param& param, std::byte* to, Pending ready, void* decoded,
                                device::StreamKind late) {
  Load load{&param,          param.tier(),     to,      decoded, {},
            param.updated(), std::move(ready), nullptr, late};
  const std::lock_guard lock(mutex_);
  if (load.tier == Tier::kHost) {
    load.copy = param.device_copy();
    const bool is_on_device = load.copy.values != nullptr;
    host_.stats.loaded_bytes += is_on_device ? 0 : param.layout().shard_bytes();
    // The worker starts copies without the lock, but none is left when this one is not queued.
    if (host_.is_idle() &&
        (is_on_device ? load.copy.made.done() : load.updated.done() && load.ready.done())) {
      return this->load(load);
    }
  }
  return queue(std::move(load));
}

Pending ShardLoader::queue(Load load) {
  std::erase_if(wanted_, [&](const Wanted& wanted) { return wanted.param == load.param; });
  load.done = std::make_shared<device::HandedOver>();
  Pending done(load.done);
  Lane& lane = lane_of(load.tier);
  lane.loads.push_back(std::move(load));
  if (!lane.worker.joinable()) {
    lane.worker = std::thread([this, &lane] { carry_out(lane); });
  }
  changed_.notify_all();
  return done;
}

void ShardLoader::carry_out(Lane& lane) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_closing_ || !lane.loads.empty(); });
    if (lane.loads.empty()) {
      return;
    }
    const Load next = std::move(lane.loads.front());
    lane.loads.pop_front();
    lane.is_loading = true;
    lane.is_reading_copy = next.copy.values != nullptr;
    lock.unlock();
    try {
      next.done->hand_over(load(next));
    } catch (...) {
      next.done->fail(std::current_exception());
    }
    lock.lock();
    lane.is_loading = false;
    lane.is_reading_copy = false;
    changed_.notify_all();
    try {
      if (nvme_.loads.empty()) {  // else what is asked for comes first
        read_more();              // the window has room again
      }
    } catch (...) {  // whoever asks for the shard meets it again
    }
  }
}

Pending ShardLoader::load(const Load& load) {
  Pending loaded = load_bytes(load);
  if (load.decoded == nullptr || load.param->layout().shard_bytes() == 0) {
    return loaded;
  }
  const shard::Layout& layout = load.param->layout();
  gather_.wait(loaded);
  return load.param->codec()->decode(load.to, layout.shard_numel(), load.decoded, layout.dtype(),
                                     &gather_);
}

Pending ShardLoader::load_bytes(const Load& load) {
  const shard::Layout& layout = load.param->layout();
  if (load.copy.values != nullptr) {
    device::Stream* stream = &gather_;
    if (load.done != nullptr && load.late == device::StreamKind::kRead) {
      stream = &read_;  // where nothing waits for anything but the copies before it
      load.ready.wait();
      load.copy.made.wait();
    } else {
      // Behind the former users of its memory, as all that the gather stream is given from now on.
      const std::shared_ptr<device::PendingState>& made = load.copy.made.state();
      gather_.wait(made ? made->wait_handed_over().value_or(load.copy.made) : Pending());
    }
    const std::size_t bytes =
        static_cast<std::size_t>(load.param->range().numel) * bytes_of(layout.dtype());
    Pending loaded = device_.start_copy(load.to, load.copy.values, bytes, *stream);
    if (const std::size_t padding = layout.shard_bytes() - bytes; padding > 0) {
      loaded =
          device_.start_fill(load.to + bytes, 0, padding, *stream);  // blocks may reach into it
    }
    return loaded;
  }
  load.ready.wait();
  load.updated.wait();
  if (load.tier == Tier::kHost) {
    return device_.start_copy(load.to, load.param->shard(), layout.shard_bytes(), read_);
  }
  if (layout.shard_bytes() > 0) {
    load_from_nvme(load);
  }
  return {};
}

void ShardLoader::load_from_nvme(const Load& load) {
  if (!load_from_window(load)) {
    load_in_tiles(*load.param, load.to);
  }
  const std::lock_guard lock(mutex_);
  nvme_.stats.loaded_bytes += load.param->layout().shard_bytes();
}

bool ShardLoader::load_from_window(const Load& load) {
  Ahead found;
  {
    const std::lock_guard lock(mutex_);
    const auto entry = ahead_.find(load.param->id());
    if (entry == ahead_.end() || !entry->second.is_whole) {
      return false;
    }
    found = std::move(entry->second);
    ahead_.erase(entry);
  }
  const std::size_t bytes = load.param->layout().shard_bytes();
  try {
    found.read.wait();
  } catch (...) {
    return false;  // the store is asked again, and says what is wrong
  }
  device_.start_copy(load.to, found.lease.data(), bytes, read_).wait();
  const std::lock_guard lock(mutex_);
  (found.is_update ? nvme_.stats.from_update_bytes : nvme_.stats.read_ahead_bytes) += bytes;
  return true;
}

// While one tile is copied, the next is read.
void ShardLoader::load_in_tiles(const Param& param, std::byte* to) {
  store_->wait_written(param.id());
  const std::size_t element = bytes_of(param.layout().stored_dtype());
  const std::int64_t shard_numel = param.layout().stored_numel();
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
    tile.read = store_->start_read(param, tile.begin, tile.numel, tile.lease.data());
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
                      static_cast<std::size_t>(tile.numel) * element, read_)
          .wait();
    }
  } catch (...) {
    for (const Tile& tile : tiles) {  // their memory is being written until they are done
      wait_ignoring_failure(tile.read);
    }
    throw;
  }
}

void ShardLoader::wait_idle() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return host_.is_idle() && nvme_.is_idle(); });
}

void ShardLoader::read_ahead(std::span<const int> ids) {
  const std::lock_guard lock(mutex_);
  wanted_.clear();
  listed_ = std::set<int>(ids.begin(), ids.end());
  for (const int id : ids) {
    if (params_[id].is_on_nvme() && params_[id].layout().shard_bytes() > 0) {
      wanted_.push_back({&params_[id], params_[id].updated()});
    }
  }
  read_more();
}

bool ShardLoader::is_queued(int id) const {
  return std::any_of(nvme_.loads.begin(), nvme_.loads.end(),
                     [id](const Load& load) { return load.param->id() == id; });
}

void ShardLoader::read_more() {
  for (; !wanted_.empty(); wanted_.pop_front()) {
    const Param& param = *wanted_.front().param;
    if (ahead_.contains(param.id()) || is_queued(param.id())) {
      continue;
    }
    const std::size_t bytes = tier::whole_blocks(param.layout().shard_bytes());
    if (!wanted_.front().updated.done() || !store_->is_written(param.id()) ||
        bytes > window_.capacity_bytes()) {
      return;
    }
    std::optional<tier::Lease> lease = window_.try_acquire(bytes);
    while (!lease && free_one()) {
      lease = window_.try_acquire(bytes);
    }
    if (!lease) {
      return;
    }
    Ahead& entry = ahead_[param.id()];
    entry.lease = std::move(*lease);
    try {
      entry.read = store_->start_read(param, 0, param.layout().stored_numel(), entry.lease.data());
    } catch (...) {
      ahead_.erase(param.id());
      throw;
    }
    entry.is_whole = true;
  }
}

bool ShardLoader::free_one() {
  const auto in_vain = std::find_if(ahead_.begin(), ahead_.end(), [this](const auto& entry) {
    return !entry.second.is_update && entry.second.read.done() && !listed_.contains(entry.first) &&
           !is_queued(entry.first);
  });
  if (in_vain == ahead_.end()) {
    return false;
  }
  ahead_.erase(in_vain);
  return true;
}

bool ShardLoader::receive(int id, std::int64_t begin, std::int64_t numel, const void* values) {
  const Param& param = params_[id];
  const std::size_t element = bytes_of(param.layout().dtype());
  if (param.layout().shard_bytes() == 0) {
    return false;
  }
  const std::lock_guard lock(mutex_);
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
  if (!ahead.is_update || ahead.num_received != begin) {
    return false;
  }
  const std::int64_t real = std::clamp<std::int64_t>(param.range().numel - begin, 0, numel);
  if (real > 0) {
    std::memcpy(ahead.lease.data() + static_cast<std::size_t>(begin) * element, values,
                static_cast<std::size_t>(real) * element);
  }
  ahead.num_received += numel;
  ahead.is_whole = ahead.num_received >= param.range().numel;
  return true;
}

void ShardLoader::forget(int id) {
  forget_if([id](int other, bool) { return other == id; });
}

void ShardLoader::forget_all() {
  forget_if([](int, bool) { return true; });
}

void ShardLoader::forget_read_ahead() {
  forget_if([](int, bool is_update) { return !is_update; });
}

template <typename Condition>
void ShardLoader::forget_if(Condition condition) {
  std::map<int, Ahead> gone;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(wanted_,
                  [&](const Wanted& wanted) { return condition(wanted.param->id(), false); });
    for (auto entry = ahead_.begin(); entry != ahead_.end();) {
      const auto here = entry++;
      if (condition(here->first, here->second.is_update)) {
        gone.insert(ahead_.extract(here));
      }
    }
  }
  for (const auto& [id, ahead] : gone) {
    wait_ignoring_failure(ahead.read);  // its memory is being written; nobody wants what was read
  }
}

void ShardLoader::forget_device_copies() {
  std::unique_lock lock(mutex_);
  for (Load& load : host_.loads) {
    if (load.copy.values != nullptr) {
      load.copy = {};
      host_.stats.loaded_bytes += load.param->layout().shard_bytes();
    }
  }
  changed_.wait(lock, [this] { return !host_.is_reading_copy; });
  device::Stream& reduce = device_.stream(device::StreamKind::kReduce);
  reduce.wait(gather_.record());
  reduce.wait(read_.record());
}

void ShardLoader::write(const Param& param, std::int64_t begin, std::int64_t numel,
                        const void* elements) {
  forget(param.id());
  store_->wait_written(param.id());
  const shard::Layout& layout = param.layout();
  const std::size_t element = bytes_of(layout.stored_dtype());
  // What is behind the last element is padding, and part of what is written.
  const bool is_last =
      begin + numel == (layout.is_encoded() ? layout.stored_numel() : param.range().numel);
  const std::int64_t end = is_last ? layout.stored_numel() : begin + numel;
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
    store_->start_write(param, at, count, lease.data()).wait();
  }
}

void ShardLoader::read(const Param& param, void* to) {
  Pending loaded;
  {
    const std::lock_guard lock(mutex_);
    loaded = queue(
        {&param, Tier::kNvme, static_cast<std::byte*>(to), nullptr, {}, param.updated(), {}, {}});
  }
  loaded.wait();
}

LoaderStats ShardLoader::take_stats(Tier tier) {
  const std::lock_guard lock(mutex_);
  return std::exchange(lane_of(tier).stats, {});
}

}  // namespace tessera::coordinator
