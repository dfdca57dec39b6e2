#include "tessera/shard/stored_shard.h"

#include <algorithm>
#include <cstring>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"

namespace tessera::shard {
namespace {

// What is worth a thread, and small enough to stay in its cache.
constexpr std::int64_t kPieceNumel = std::int64_t{1} << 16;

}  // namespace

void cut_wire(StoredFormat format, const StoredBytes& places, const std::byte* from,
              std::int64_t begin, std::int64_t numel, std::byte* wire) {
  const StoredBytes cut(format, format.rounded_up(numel));
  std::memset(wire, 0, cut.bytes());
  const ByteSpan codes = places.codes(begin, numel);
  const ByteSpan scales = places.scales(begin, numel);
  std::memcpy(wire + cut.codes(0, numel).offset, from + codes.offset, codes.bytes);
  std::memcpy(wire + cut.scales(0, numel).offset, from + scales.offset, scales.bytes);
}

StoredShard::StoredShard(const Param& param)
    : param_(param),
      places_(param.layout().format(), param.layout().shard_numel()),
      bytes_(param.layout().shard_bytes()) {
  TESSERA_INVARIANT(param.layout().is_encoded(), "parameter '", param.name(),
                    "' is stored as its elements");
}

void StoredShard::encode(std::int64_t begin, std::int64_t numel, const void* values) {
  encode_pieces(begin, numel, values, /*keeps_blocks=*/false);
}

void StoredShard::update(std::int64_t begin, std::int64_t numel, const void* values) {
  encode_pieces(begin, numel, values, /*keeps_blocks=*/true);
}

void StoredShard::encode_pieces(std::int64_t begin, std::int64_t numel, const void* values,
                                bool keeps_blocks) {
  const std::int64_t range_numel = param_.range().numel;
  const StoredFormat format = param_.layout().format();
  const std::int64_t step = format.tile(kPieceNumel);
  TESSERA_INVARIANT(begin >= 0 && begin % format.step() == 0 && begin + numel <= range_numel &&
                        (begin + numel == range_numel || numel % format.step() == 0),
                    "elements [", begin, ", +", numel, ") of the shard of parameter '",
                    param_.name(), "', which has ", range_numel, ", are encoded by themselves");
  const std::size_t element = bytes_of(param_.layout().dtype());
  const auto* const from = static_cast<const std::byte*>(values);
  std::vector<EncodingChange> changes(static_cast<std::size_t>((numel + step - 1) / step));
  device::for_each_piece(changes.size(), [&](std::size_t piece) {
    const auto at = static_cast<std::int64_t>(piece) * step;
    changes[piece] = encode_piece(begin + at, std::min(step, numel - at),
                                  from + static_cast<std::size_t>(at) * element, keeps_blocks);
  });
  for (const EncodingChange& each : changes) {
    change_ += each;
  }
}

EncodingChange StoredShard::encode_piece(std::int64_t begin, std::int64_t numel,
                                         const std::byte* values, bool keeps_blocks) {
  const comm::Codec& codec = *param_.host_codec();
  const StoredFormat format = param_.layout().format();
  const DType dtype = param_.layout().dtype();
  const std::size_t element = bytes_of(dtype);
  // Padding is zero, and the wire that of whole steps.
  const std::int64_t padded = format.rounded_up(numel);
  const StoredBytes piece(format, padded);
  std::vector<std::byte> wire(piece.bytes());
  std::vector<std::byte> copy;
  if (padded != numel) {
    copy.resize(static_cast<std::size_t>(padded) * element);
    std::memcpy(copy.data(), values, static_cast<std::size_t>(numel) * element);
    values = copy.data();
  }
  codec.encode(values, dtype, padded, wire.data(), nullptr).wait();
  std::vector<std::byte> before;
  if (keeps_blocks) {
    before.resize(static_cast<std::size_t>(padded) * element);
    decode(begin, padded, before.data());
  }
  const std::size_t block_bytes = static_cast<std::size_t>(format.block_numel) * element;
  for (std::int64_t at = 0; at < padded;) {
    const std::size_t offset = static_cast<std::size_t>(at) * element;
    const bool stays =
        keeps_blocks && std::memcmp(before.data() + offset, values + offset, block_bytes) == 0;
    // As many as go the same way; without anything to compare with all of them.
    const std::int64_t count = keeps_blocks ? format.block_numel : padded;
    if (!stays) {
      const ByteSpan codes = places_.codes(begin + at, count);
      const ByteSpan scales = places_.scales(begin + at, count);
      std::memcpy(bytes_.data() + codes.offset, wire.data() + piece.codes(at, count).offset,
                  codes.bytes);
      std::memcpy(bytes_.data() + scales.offset, wire.data() + piece.scales(at, count).offset,
                  scales.bytes);
    }
    at += count;
  }
  EncodingChange change;
  if (!keeps_blocks) {
    double sums[2];
    codec.measure(values, dtype, padded, wire.data(), sums, false, nullptr).wait();
    change = {sums[0], sums[1]};
  }
  return change;
}

void StoredShard::decode(std::int64_t begin, std::int64_t numel, void* values) const {
  const StoredFormat format = param_.layout().format();
  const DType dtype = param_.layout().dtype();
  const std::size_t element = bytes_of(dtype);
  auto* to = static_cast<std::byte*>(values);
  const std::int64_t step = format.tile(kPieceNumel);
  std::vector<std::byte> wire(StoredBytes(format, step).bytes());
  std::vector<std::byte> elements;
  while (numel > 0) {
    const std::int64_t first = begin / format.block_numel * format.block_numel;
    const std::int64_t count = std::min(step, begin + numel - first);
    cut_wire(format, places_, bytes_.data(), first, count, wire.data());
    elements.resize(static_cast<std::size_t>(format.rounded_up(count)) * element);
    param_.host_codec()
        ->decode(wire.data(), format.rounded_up(count), elements.data(), dtype, nullptr)
        .wait();
    const std::int64_t done = first + count - begin;
    std::memcpy(to, elements.data() + static_cast<std::size_t>(begin - first) * element,
                static_cast<std::size_t>(done) * element);
    to += static_cast<std::size_t>(done) * element;
    begin += done;
    numel -= done;
  }
}

}  // namespace tessera::shard
