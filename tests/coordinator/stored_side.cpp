#include "tests/coordinator/stored_side.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "testing/memory_store.h"

namespace tessera::coordinator {

using device::Pending;
using shard::Param;

bool StoredChoice::has(int id) const { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

StoredSide::StoredSide(const StoredChoice& choice, shard::ParamTable& params,
                       device::Device& device)
    : choice_(choice), device_(device) {
  std::size_t bytes = 0;
  for (const int id : choice_.ids) {
    bytes += tier::whole_blocks(params[id].layout().shard_bytes());
  }
  if (choice_.kind == StoredChoice::Kind::kHeld) {
    auto store = std::make_unique<support::HeldStore>(bytes);
    held_store_ = store.get();
    store_ = std::move(store);
  } else {
    store_ = std::make_unique<tier::MemoryStore>(device, Tier::kHost, Role::kShard, bytes);
  }
  shards_ = std::make_unique<shard::ShardStore>(*store_);
  for (const int id : choice_.ids) {
    shards_->add(params[id]);
  }
  loader_ = std::make_unique<ShardLoader>(params, *shards_, device, Tier::kHost, choice_.buffer_bytes);
  worker_ = std::thread([this] { carry_out(); });
}

StoredSide::~StoredSide() {
  release_all();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
  device_.stream(device::StreamKind::kWrite).synchronize();
}

void StoredSide::start_update(Param& param, const std::vector<float>& values) {
  const std::size_t bytes = param.layout().shard_bytes();
  device::Memory& source = sources_.emplace_back(
      device_.allocate(Tier::kHost, tier::whole_blocks(bytes), Role::kStaging, tier::kBlockBytes));
  if (bytes > 0) {
    std::memset(source.data(), 0, source.bytes());
    std::memcpy(source.data(), values.data(), bytes);
  }
  auto done = std::make_shared<device::Completion>();
  param.set_updated(Pending(done));
  {
    const std::lock_guard lock(mutex_);
    updates_.push_back({&param, source.data(), std::move(done)});
  }
  changed_.notify_all();
}

void StoredSide::hold_update(int id) {
  const std::lock_guard lock(mutex_);
  held_.insert(id);
}

void StoredSide::fail_update(int id) {
  const std::lock_guard lock(mutex_);
  failing_.insert(id);
}

void StoredSide::release_updates() {
  {
    const std::lock_guard lock(mutex_);
    held_.clear();
  }
  changed_.notify_all();
}

void StoredSide::release_all() {
  release_updates();
  if (held_store_ != nullptr) {
    held_store_->release();
  }
}

void StoredSide::carry_out() {
  for (;;) {
    Update next;
    bool fails = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] {
        return updates_.empty() ? is_closing_ : !held_.contains(updates_.front().param->id());
      });
      if (updates_.empty()) {
        return;
      }
      next = std::move(updates_.front());
      updates_.pop_front();
      fails = failing_.contains(next.param->id());
    }
    try {
      TESSERA_CHECK(!fails, IoError, "the update of parameter '", next.param->name(),
                    "' fails because a test says so");
      update(next);
      next.done->succeed();
    } catch (...) {
      next.done->fail(std::current_exception());
    }
  }
}

void StoredSide::update(const Update& update) {
  const Param& param = *update.param;
  const shard::Layout& layout = param.layout();
  shards_->wait_written(param.id());
  for (std::int64_t begin = 0; choice_.offers && begin < layout.shard_numel();
       begin += shard::kShardStep) {
    const std::int64_t numel = std::min(shard::kShardStep, layout.shard_numel() - begin);
    const std::byte* values =
        update.values + static_cast<std::size_t>(begin) * bytes_of(layout.dtype());
    if (!loader_->receive(param.id(), begin, numel, values)) {
      break;
    }
  }
  std::ignore = shards_->start_write(param, 0, layout.shard_numel(), update.values);
}

}  // namespace tessera::coordinator
