#include "tessera/engine/shard_writer.h"

#include <algorithm>
#include <vector>

#include "tessera/shard/shard_store.h"

namespace tessera::engine {
namespace {

// Of elements that come from a device to be encoded.
constexpr std::int64_t kTileFromDevice = std::int64_t{1} << 20;

}  // namespace

ShardWriter::ShardWriter(EngineContext& context, const shard::Param& param, Before before)
    : ctx_(context), param_(param), before_(before) {
  if (!param.layout().is_encoded()) {
    return;
  }
  stored_.emplace(param);
  if (before == Before::kKept && !stored_->bytes().empty()) {
    param.updated().wait();
    if (param.is_on_nvme()) {
      ctx_.tiers.loader().read(param, stored_->bytes().data());
    } else {
      param.start_read(0, param.layout().stored_numel(), stored_->bytes().data()).wait();
    }
  }
}

std::int64_t ShardWriter::tile(std::int64_t numel) const {
  const std::int64_t step =
      param_.layout().is_encoded() ? param_.layout().format().step() : shard::kShardStep;
  return std::max(step, numel / step * step);
}

void ShardWriter::write(std::int64_t begin, std::int64_t numel, const void* elements) {
  const DType dtype = param_.layout().dtype();
  if (!stored_) {
    put(begin, numel, dtype, elements);
    return;
  }
  const auto* from = static_cast<const std::byte*>(elements);
  device::Device& device = ctx_.runtime.device();
  const bool is_on_host = !device.is_discrete();  // else where they are is not known
  const std::int64_t most = is_on_host ? numel : tile(kTileFromDevice);
  std::vector<std::byte> tile;
  for (std::int64_t at = 0; at < numel; at += most) {
    const std::int64_t count = std::min(most, numel - at);
    const std::byte* values = from + static_cast<std::size_t>(at) * bytes_of(dtype);
    if (!is_on_host) {
      tile.resize(static_cast<std::size_t>(count) * bytes_of(dtype));
      device::Stream& stream = device.stream(device::StreamKind::kWrite);
      stream.wait(device.stream(device::StreamKind::kCompute).record());
      device.start_copy(tile.data(), values, tile.size(), stream).wait();
      values = tile.data();
    }
    if (before_ == Before::kKept) {
      stored_->update(begin + at, count, values);
    } else {
      stored_->encode(begin + at, count, values);
    }
  }
}

void ShardWriter::finish() {
  if (stored_) {
    if (before_ == Before::kReplaced) {
      ctx_.stored_report.set(param_.id(), stored_->change());
    }
    put(0, param_.layout().stored_numel(), param_.layout().stored_dtype(), stored_->bytes().data());
  }
}

void ShardWriter::put(std::int64_t begin, std::int64_t numel, DType dtype, const void* words) {
  device::Device& device = ctx_.runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kWrite);
  const std::size_t bytes = static_cast<std::size_t>(numel) * bytes_of(dtype);
  // What is written may be the work of the compute stream.
  stream.wait(device.stream(device::StreamKind::kCompute).record());
  if (param_.is_on_nvme()) {
    std::vector<std::byte> host;
    if (device.is_discrete()) {  // where it is is not known
      host.resize(bytes);
      device.start_copy(host.data(), words, bytes, stream).wait();
      words = host.data();
    }
    ctx_.tiers.write(param_, begin, numel, words);
    return;
  }
  device
      .start_copy(param_.shard() + static_cast<std::size_t>(begin) * bytes_of(dtype), words, bytes,
                  stream)
      .wait();
}

}  // namespace tessera::engine
