#include "tessera/tier/store.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::tier {

void check_store_range(const Store& store, std::uint64_t offset, const void* memory,
                       std::size_t bytes) {
  TESSERA_INVARIANT(offset % kBlockBytes == 0 && bytes % kBlockBytes == 0, "bytes [", offset, ", +",
                    bytes, ") of a store are not whole blocks of ", kBlockBytes);
  TESSERA_INVARIANT(offset <= store.bytes() && bytes <= store.bytes() - offset, "bytes [", offset,
                    ", +", bytes, ") are asked for of a store that has ", store.bytes());
  TESSERA_INVARIANT(reinterpret_cast<std::uintptr_t>(memory) % kBlockBytes == 0, "memory at ",
                    memory, " for bytes [", offset, ", +", bytes, ") of a store is not aligned to ",
                    kBlockBytes);
}

const StoreExtent& extent_at(const std::vector<StoreExtent>& extents, std::uint64_t offset) {
  // The first that ends behind it: empty extents, which hold nothing, are passed over.
  const auto found = std::partition_point(
      extents.begin(), extents.end(),
      [offset](const StoreExtent& extent) { return extent.offset + extent.bytes <= offset; });
  TESSERA_INVARIANT(found != extents.end(), "offset ", offset, " is behind the last extent");
  return *found;
}

std::string names_in(const std::vector<StoreExtent>& extents, std::uint64_t offset,
                     std::size_t bytes) {
  const StoreExtent& first = extent_at(extents, offset);
  const StoreExtent& last = extent_at(extents, offset + bytes - 1);
  return &first == &last ? first.name : detail::concat(first.name, " to ", last.name);
}

}  // namespace tessera::tier
