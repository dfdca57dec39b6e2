#include "tessera/device/block_cache.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::device {
namespace {

HostPages map_large(std::size_t bytes) {
  const bool is_huge = bytes >= kHugePageBytes;
  const HostPages pages = map_pages(bytes, is_huge ? kHugePageBytes : page_bytes(), Tier::kHost);
  prefer_huge_pages(pages.data, pages.bytes);
  return pages;
}

}  // namespace

BlockCache::~BlockCache() {
  for (const auto& [bytes, block] : idle_) {
    unmap_pages(block.pages);
  }
}

void* BlockCache::take(std::size_t bytes) {
  const std::size_t page = page_bytes();
  const std::size_t wanted = (bytes + page - 1) / page * page;
  const std::lock_guard lock(mutex_);
  HostPages pages;
  if (const auto found = find_idle(wanted); found != idle_.end()) {
    pages = found->second.pages;
    oldest_.erase(found->second.since);
    idle_bytes_ -= pages.bytes;
    idle_.erase(found);
  } else {
    // What this call brings to the peak may be taken; everything else must fit below it.
    const std::size_t limit = std::max(peak_bytes_, live_bytes_ + wanted);
    free_idle_until(limit - wanted);
    pages = map_block(wanted);
  }
  live_.emplace(pages.data, pages.bytes);
  live_bytes_ += pages.bytes;
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  return pages.data;
}

bool BlockCache::give_back(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(data);
  if (found == live_.end()) {
    return false;
  }
  const HostPages pages{data, found->second};
  live_.erase(found);
  live_bytes_ -= pages.bytes;
  idle_bytes_ += pages.bytes;
  const std::uint64_t since = ++num_given_back_;
  oldest_.emplace(since, idle_.emplace(pages.bytes, Idle{pages, since}));
  return true;
}

BlockCache::IdleBlocks::iterator BlockCache::find_idle(std::size_t bytes) {
  const auto found = idle_.lower_bound(bytes);
  return found != idle_.end() && found->first - bytes <= found->first / 8 ? found : idle_.end();
}

void BlockCache::free_idle_until(std::size_t held_bytes) {
  while (live_bytes_ + idle_bytes_ > held_bytes && !oldest_.empty()) {
    const auto block = oldest_.begin()->second;
    oldest_.erase(oldest_.begin());
    unmap_pages(block->second.pages);
    idle_bytes_ -= block->first;
    idle_.erase(block);
  }
}

HostPages BlockCache::map_block(std::size_t bytes) {
  ++num_mapped_;
  try {
    return map_large(bytes);
  } catch (const DeviceError&) {
    if (idle_.empty()) {
      throw;
    }
  }
  free_idle_until(live_bytes_);
  return map_large(bytes);
}

std::size_t BlockCache::live_bytes() const {
  const std::lock_guard lock(mutex_);
  return live_bytes_;
}

std::size_t BlockCache::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return live_bytes_ + idle_bytes_;
}

std::size_t BlockCache::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

std::uint64_t BlockCache::num_mapped() const {
  const std::lock_guard lock(mutex_);
  return num_mapped_;
}

}  // namespace tessera::device
