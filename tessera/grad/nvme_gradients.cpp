#include "tessera/grad/nvme_gradients.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/element_loops.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

using device::Pending;

// A quarter of the pool, so that some tiles are read and others written, and no more than keeps a
// disk busy. Beside a discrete device two more are copied.
constexpr std::size_t kTilesPerPool = 4;
constexpr std::size_t kStagedTiles = 2;
constexpr std::size_t kLargestTileBytes = std::size_t{4} << 20;
constexpr std::int64_t kReadStep = tier::kBlockBytes / sizeof(float);  // elements
// In place of a sum of squares, which is never negative: nothing was put here.
constexpr double kNothing = -1;

std::size_t bytes_on_nvme(std::int64_t numel) {
  return tier::whole_blocks(static_cast<std::size_t>(numel) * sizeof(float));
}

std::int64_t tile_numel(std::size_t pool_bytes, bool is_discrete) {
  const std::size_t num_tiles = kTilesPerPool + (is_discrete ? kStagedTiles : 0);
  const std::size_t bytes = std::clamp(pool_bytes / num_tiles, kSmallestPoolBytes,
                                       std::max(kSmallestPoolBytes, kLargestTileBytes));
  return static_cast<std::int64_t>(bytes / kSmallestPoolBytes) * kPieceStep;
}

bool overlap(const ShardPiece& a, const ShardPiece& b) {
  return a.param == b.param && a.begin < b.begin + b.numel && b.begin < a.begin + a.numel;
}

const std::byte* advanced(const std::byte* values, DType dtype, std::int64_t numel) {
  return values + static_cast<std::size_t>(numel) * bytes_of(dtype);
}

}  // namespace

NvmeGradients::NvmeGradients(const ReducerParts& parts)
    : parts_(parts),
      nvme_(parts.nvme),
      tile_numel_(tile_numel(parts.nvme.buffers->capacity_bytes(), parts.device.is_discrete())) {
  TESSERA_INVARIANT(parts_.block_sum_of_squares, "gradients are on NVMe, and nothing sums squares");
  allocate_extents();
  first_block_.push_back(0);
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const shard::Param& param = parts_.params[id];
    const std::int64_t numel = param.placement().gradient == Tier::kNvme && param.trainable()
                                   ? param.layout().shard_numel()
                                   : 0;
    first_block_.push_back(first_block_.back() + num_norm_blocks(numel));
    const std::size_t tile_bytes = bytes_on_nvme(std::min(numel, kPieceStep));
    const std::size_t staged_bytes =
        parts_.device.is_discrete() && numel > 0 ? kStagedTiles * kSmallestPoolBytes : 0;
    const std::size_t least_bytes = tile_bytes + staged_bytes;
    TESSERA_CHECK(least_bytes <= nvme_.buffers->capacity_bytes(), ConfigError,
                  "the gradient of parameter '", param.name(), "' passes through buffers of ",
                  nvme_.buffers->capacity_bytes(), " bytes, and needs ", least_bytes,
                  "; raise the budget of host memory");
  }
  block_memory_ = parts_.device.allocate(
      Tier::kHost, static_cast<std::size_t>(first_block_.back()) * sizeof(double), Role::kGradient);
  clear();
  allocate_staging();
}

NvmeGradients::~NvmeGradients() { clear(); }

void NvmeGradients::allocate_staging() {
  if (parts_.device.is_discrete()) {
    staging_ = nvme_.buffers->acquire(kStagedTiles * static_cast<std::size_t>(tile_numel_) *
                                      sizeof(float));
  }
}

std::byte* NvmeGradients::staging(std::int64_t tile) const {
  const std::size_t turn = static_cast<std::size_t>(tile) % kStagedTiles;
  return staging_.data() + turn * static_cast<std::size_t>(tile_numel_) * sizeof(float);
}

// Also of frozen parameters: the store outlives this, and they may be unfrozen.
void NvmeGradients::allocate_extents() {
  const bool is_first = nvme_.store->bytes() == 0;
  std::uint64_t end = 0;
  for (int id = 0; id < parts_.params.num_params(); ++id) {
    const shard::Param& param = parts_.params[id];
    offsets_.push_back(end);
    if (param.placement().gradient != Tier::kNvme) {
      continue;
    }
    const std::size_t bytes = bytes_on_nvme(param.layout().shard_numel());
    if (is_first) {
      const std::uint64_t offset = nvme_.store->allocate(
          bytes, detail::concat("gradient of parameter '", param.name(), "'"));
      TESSERA_INVARIANT(offset == end, "the gradient of parameter '", param.name(), "' is at ",
                        offset, " on NVMe, not behind those before it");
    }
    end += bytes;
  }
}

std::uint64_t NvmeGradients::offset_of(const ShardPiece& at) const {
  return offsets_[static_cast<std::size_t>(at.param)] +
         static_cast<std::uint64_t>(at.begin) * sizeof(float);
}

std::span<double> NvmeGradients::blocks_of(int id) const {
  const auto i = static_cast<std::size_t>(id);
  return {reinterpret_cast<double*>(block_memory_.data()) + first_block_[i],
          static_cast<std::size_t>(first_block_[i + 1] - first_block_[i])};
}

bool NvmeGradients::is_empty(int id, std::int64_t begin) const {
  return blocks_of(id)[static_cast<std::size_t>(begin / kPieceStep)] == kNothing;
}

ShardPiece NvmeGradients::tile_at(const ShardPiece& piece, std::int64_t offset) const {
  return {piece.param, piece.begin + offset, std::min(tile_numel_, piece.numel - offset)};
}

void NvmeGradients::put(const ShardPiece& piece, const void* values, DType dtype,
                        bool adds) noexcept {
  try {
    throw_failure();
    const std::int64_t shard_numel = parts_.params[piece.param].layout().shard_numel();
    const std::int64_t end = piece.begin + piece.numel;
    TESSERA_INVARIANT(
        piece.begin % kPieceStep == 0 && end <= shard_numel &&
            (end % kPieceStep == 0 || bytes_on_nvme(end) == bytes_on_nvme(shard_numel)),
        "elements [", piece.begin, ", ", end, ") of ", shard_numel, " are put on NVMe");
    if (adds) {
      add(piece, values, dtype);
    } else {
      replace(piece, values, dtype);
    }
  } catch (...) {
    keep_failure(piece.param);
  }
}

void NvmeGradients::get(const ShardPiece& piece, void* to, DType dtype) noexcept {
  try {
    throw_failure();
    read_tiles(piece, [&](const Tile& tile) {
      auto* const at = static_cast<std::byte*>(to) +
                       static_cast<std::size_t>(tile.at.begin - piece.begin) * bytes_of(dtype);
      const auto numel = static_cast<std::size_t>(tile.at.numel);
      std::byte* const staged = staging_.data();
      convert_elements(staged != nullptr ? staged : at, dtype, tile.data(), DType::kFloat32, numel);
      if (staged != nullptr) {
        device::Stream& h2d = parts_.device.stream(device::StreamKind::kRead);
        parts_.device.start_copy(at, staged, numel * bytes_of(dtype), h2d).wait();
      }
    });
  } catch (...) {
    keep_failure(piece.param);
  }
}

NvmeGradients::HostValues::HostValues(NvmeGradients& gradients, const ShardPiece& piece,
                                      const void* values, DType dtype)
    : gradients_(gradients),
      piece_(piece),
      values_(static_cast<const std::byte*>(values)),
      dtype_(dtype) {
  start_copy();
}

NvmeGradients::HostValues::~HostValues() { wait_ignoring_failure(copied_); }

void NvmeGradients::HostValues::start_copy() {
  if (gradients_.staging_.data() == nullptr || num_started_ == piece_.numel) {
    return;
  }
  const ShardPiece tile = gradients_.tile_at(piece_, num_started_);
  device::Device& device = gradients_.parts_.device;
  copied_ = device.start_copy(gradients_.staging(num_started_ / gradients_.tile_numel_),
                              advanced(values_, dtype_, num_started_),
                              static_cast<std::size_t>(tile.numel) * bytes_of(dtype_),
                              device.stream(device::StreamKind::kWrite));
  num_started_ += tile.numel;
}

const void* NvmeGradients::HostValues::next() {
  const std::int64_t begin = num_given_;
  num_given_ += gradients_.tile_at(piece_, begin).numel;
  if (gradients_.staging_.data() == nullptr) {
    return advanced(values_, dtype_, begin);
  }
  copied_.wait();
  start_copy();  // over the tile before this one
  return gradients_.staging(begin / gradients_.tile_numel_);
}

void NvmeGradients::replace(const ShardPiece& piece, const void* values, DType dtype) {
  HostValues from(*this, piece, values, dtype);
  for (std::int64_t done = 0; done < piece.numel; done += tile_numel_) {
    Tile tile{tile_at(piece, done), {}, {}};
    tile.lease = std::move(*lease_for(tile.at, true));
    wait_for_overlapping(tile.at);
    convert_elements(tile.data(), DType::kFloat32, from.next(), dtype,
                     static_cast<std::size_t>(tile.at.numel));
    start_write(std::move(tile));
  }
}

void NvmeGradients::add(const ShardPiece& piece, const void* values, DType dtype) {
  HostValues from(*this, piece, values, dtype);
  read_tiles(piece, [&](Tile tile) {
    add_elements(tile.data(), from.next(), dtype, static_cast<std::size_t>(tile.at.numel));
    start_write(std::move(tile));
  });
}

void NvmeGradients::read_tiles(const ShardPiece& piece, const std::function<void(Tile)>& use) {
  std::list<Tile> reads;
  std::int64_t num_read = 0;  // elements whose tiles are in `reads`, or behind it
  try {
    while (num_read < piece.numel || !reads.empty()) {
      while (num_read < piece.numel) {
        Tile tile{tile_at(piece, num_read), {}, {}};
        std::optional<tier::Lease> lease = lease_for(tile.at, reads.empty());
        if (!lease) {
          break;
        }
        tile.lease = std::move(*lease);
        num_read += tile.at.numel;
        reads.push_back(std::move(tile));
        start_read(reads.back());
      }
      timed([&] { reads.front().moved.wait(); });
      Tile tile = std::move(reads.front());
      reads.pop_front();
      use(std::move(tile));
    }
  } catch (...) {
    for (const Tile& tile : reads) {  // the disk writes into their leases until then
      try {
        tile.moved.wait();
      } catch (...) {  // the first one counts
      }
    }
    throw;
  }
}

void NvmeGradients::start_read(Tile& tile) {
  if (is_empty(tile.at.param, tile.at.begin)) {
    std::memset(tile.lease.data(), 0, tile.lease.bytes());
    return;
  }
  wait_for_overlapping(tile.at);
  tile.moved = nvme_.store->start_read(offset_of(tile.at), tile.lease.data(), tile.lease.bytes());
  read_bytes_ += tile.lease.bytes();
}

void NvmeGradients::sum_blocks(const Tile& tile) {
  const std::int64_t shard_numel = parts_.params[tile.at.param].range().numel;  // without padding
  const std::span<double> blocks = blocks_of(tile.at.param);
  for (std::int64_t done = 0; done < tile.at.numel; done += kPieceStep) {
    const std::int64_t begin = tile.at.begin + done;
    const std::int64_t numel = std::min(kPieceStep, tile.at.numel - done);
    const std::int64_t real_numel = std::clamp<std::int64_t>(shard_numel - begin, 0, numel);
    blocks[static_cast<std::size_t>(begin / kPieceStep)] =
        real_numel > 0 ? parts_.block_sum_of_squares(tile.data() + done, real_numel) : 0.0;
  }
}

void NvmeGradients::start_write(Tile tile) {
  const std::size_t used_bytes = static_cast<std::size_t>(tile.at.numel) * sizeof(float);
  std::memset(tile.lease.data() + used_bytes, 0, tile.lease.bytes() - used_bytes);
  sum_blocks(tile);
  tile.moved = nvme_.store->start_write(offset_of(tile.at), tile.lease.data(), tile.lease.bytes());
  written_bytes_ += tile.lease.bytes();
  writes_.push_back(std::move(tile));
}

std::optional<tier::Lease> NvmeGradients::lease_for(const ShardPiece& tile, bool needed) {
  const std::size_t bytes = bytes_on_nvme(tile.numel);
  while (true) {
    reap();
    std::optional<tier::Lease> lease = nvme_.buffers->try_acquire(bytes);
    if (lease || !needed) {
      return lease;
    }
    if (writes_.empty()) {
      timed([&] { lease = nvme_.buffers->acquire(bytes); });
      return lease;
    }
    finish(writes_.begin());
  }
}

void NvmeGradients::wait_for_overlapping(const ShardPiece& tile) {
  for (auto write = writes_.begin(); write != writes_.end();) {
    const auto next = std::next(write);
    if (overlap(write->at, tile)) {
      finish(write);
    }
    write = next;
  }
  throw_failure();
}

void NvmeGradients::reap() {
  for (auto write = writes_.begin(); write != writes_.end();) {
    const auto next = std::next(write);
    if (write->moved.done()) {
      finish(write);
    }
    write = next;
  }
  throw_failure();
}

void NvmeGradients::finish(std::list<Tile>::iterator write) noexcept {
  try {
    timed([&] { write->moved.wait(); });
  } catch (...) {
    keep_failure(write->at.param);
  }
  writes_.erase(write);
}

// Beside a discrete device nobody waits for this thread here.
void NvmeGradients::timed(const std::function<void()>& wait) {
  const std::int64_t start_ns = parts_.clock.now_ns();
  wait();
  waited_ns_ += parts_.device.is_discrete() ? 0 : parts_.clock.now_ns() - start_ns;
}

void NvmeGradients::throw_failure() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

// A store names the extent; what does not say whose gradient it was gets the name here.
void NvmeGradients::keep_failure(int id) noexcept {
  if (failure_) {
    return;
  }
  try {
    const std::string name = detail::concat("parameter '", parts_.params[id].name(), "'");
    const auto named = [&](const Error& error) {
      const std::string what = error.what();
      return what.find(name) != std::string::npos
                 ? what
                 : detail::concat("the gradient of ", name, ": ", what);
    };
    try {
      throw;
    } catch (const IoError& error) {
      failure_ = std::make_exception_ptr(IoError(named(error)));
    } catch (const CorruptError& error) {
      failure_ = std::make_exception_ptr(CorruptError(named(error)));
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void NvmeGradients::wait() {
  while (!writes_.empty()) {
    finish(writes_.begin());
  }
  throw_failure();
}

void NvmeGradients::clear() noexcept {
  while (!writes_.empty()) {
    finish(writes_.begin());
  }
  failure_ = nullptr;
  auto* blocks = reinterpret_cast<double*>(block_memory_.data());
  std::fill_n(blocks, first_block_.back(), kNothing);
}

double NvmeGradients::sum_of_squares(int id) const {
  double total = 0;
  for (const double sum : blocks_of(id)) {
    total += sum == kNothing ? 0.0 : sum;
  }
  return total;
}

Pending NvmeGradients::start_read(int id, std::int64_t begin, std::int64_t numel, float* to) {
  const shard::Param& param = parts_.params[id];
  TESSERA_INVARIANT(begin >= 0 && begin % kReadStep == 0 && numel >= 0 &&
                        begin + numel <= param.layout().shard_numel(),
                    "elements [", begin, ", +", numel, ") of the gradient of parameter '",
                    param.name(), "', whose shard has ", param.layout().shard_numel());
  if (numel == 0) {
    return {};
  }
  auto* memory = reinterpret_cast<std::byte*>(to);
  const std::size_t bytes = bytes_on_nvme(numel);
  if (is_empty(id, begin)) {
    std::memset(memory, 0, bytes);
    return {};
  }
  read_bytes_ += bytes;
  return nvme_.store->start_read(offset_of({id, begin, numel}), memory, bytes);
}

void NvmeGradients::take_stats(ReducerStats& stats) {
  stats.nvme_read_bytes += read_bytes_.exchange(0);
  stats.nvme_written_bytes += written_bytes_.exchange(0);
  stats.exposed_wait_s += static_cast<double>(waited_ns_.exchange(0)) * 1e-9;
}

}  // namespace tessera::grad
