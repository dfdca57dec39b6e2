#include "tessera/shard/shard_store.h"

#include <exception>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::shard {

void ShardStore::add(const Param& param) {
  const auto id = static_cast<std::size_t>(param.id());
  if (offsets_.size() <= id) {
    offsets_.resize(id + 1, -1);
  }
  TESSERA_INVARIANT(offsets_[id] < 0, "parameter '", param.name(), "' is on NVMe already");
  offsets_[id] = static_cast<std::int64_t>(store_.allocate(
      param.layout().shard_bytes(), detail::concat("parameter '", param.name(), "'")));
}

void ShardStore::forget(int id) { offsets_[static_cast<std::size_t>(id)] = -1; }

bool ShardStore::has(int id) const {
  const auto i = static_cast<std::size_t>(id);
  return i < offsets_.size() && offsets_[i] >= 0;
}

std::int64_t ShardStore::offset(int id) const { return offsets_[static_cast<std::size_t>(id)]; }

namespace {

struct ByteRange {
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
};

ByteRange bytes_in(const Param& param, std::int64_t shard_offset, std::int64_t begin,
                   std::int64_t numel) {
  const Layout& layout = param.layout();
  TESSERA_INVARIANT(shard_offset >= 0 && begin % kShardStep == 0 && begin >= 0 && numel >= 0 &&
                        begin + numel <= layout.stored_numel() &&
                        (begin + numel == layout.stored_numel() ||
                         begin + numel == param.range().numel || numel % kShardStep == 0),
                    "words [", begin, ", +", numel, ") of the shard of parameter '", param.name(),
                    "', which has ", layout.stored_numel(), " and is at ", shard_offset);
  const std::size_t element = bytes_of(layout.stored_dtype());
  return {static_cast<std::uint64_t>(shard_offset) + static_cast<std::uint64_t>(begin) * element,
          tier::whole_blocks(static_cast<std::size_t>(numel) * element)};
}

}  // namespace

device::Pending ShardStore::start_read(const Param& param, std::int64_t begin, std::int64_t numel,
                                       void* to) {
  const ByteRange range = bytes_in(param, offset(param.id()), begin, numel);
  return store_.start_read(range.offset, static_cast<std::byte*>(to), range.bytes);
}

device::Pending ShardStore::start_write(const Param& param, std::int64_t begin, std::int64_t numel,
                                        const void* from) {
  const ByteRange range = bytes_in(param, offset(param.id()), begin, numel);
  device::Pending written =
      store_.start_write(range.offset, static_cast<const std::byte*>(from), range.bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<device::Pending>& writes = writes_[param.id()];
  forget_done(writes);
  writes.push_back(written);
  return written;
}

// Those that failed stay: whoever asks is told, every time.
void ShardStore::forget_done(std::vector<device::Pending>& writes) {
  std::erase_if(writes, [](const device::Pending& write) {
    try {
      if (write.done()) {
        write.wait();
        return true;
      }
    } catch (const std::exception&) {  // it stays
    }
    return false;
  });
}

bool ShardStore::is_written(int id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = writes_.find(id);
  if (found == writes_.end()) {
    return true;
  }
  forget_done(found->second);
  return found->second.empty();
}

void ShardStore::wait_written(int id) {
  std::vector<device::Pending> writes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = writes_.find(id);
    if (found == writes_.end()) {
      return;
    }
    writes = found->second;
  }
  device::Pending::all(std::move(writes)).wait();
}

device::Pending start_read_shard(const Param& param, ShardStore* store, std::int64_t begin,
                                 std::int64_t numel, std::byte* to) {
  if (!param.is_on_nvme()) {
    return param.start_read(begin, numel, to);
  }
  store->wait_written(param.id());
  return store->start_read(param, begin, numel, to);
}

}  // namespace tessera::shard
