#include "tessera/comm/backend.h"

#include <new>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::align_val_t kAlignment{256};

}  // namespace

Pending Backend::start_gather_to(std::span<const GatherBytes>, std::span<const std::uint8_t>,
                                 std::byte*, const Call&) {
  TESSERA_INVARIANT(false, "backend ", name(), " cannot gather to some ranks only");
  return {};
}

Pending Backend::start_tags(const std::shared_ptr<std::vector<CallTag>>&) {
  TESSERA_INVARIANT(false, "backend ", name(), " compares tags itself");
  return {};
}

Pending Backend::start_reduce(const RankParts& parts, void* out, DType out_dtype,
                              Reduction reduction, device::Stream* stream) {
  if (stream != nullptr) {
    return stream->enqueue([=] { reduce_in_rank_order(parts, out, out_dtype, reduction); });
  }
  reduce_in_rank_order(parts, out, out_dtype, reduction);
  return {};
}

std::shared_ptr<std::byte> Backend::make_staging(std::size_t bytes, device::Stream*) {
  auto* data = static_cast<std::byte*>(::operator new(bytes, kAlignment));
  return {data, [](std::byte* staging) { ::operator delete(staging, kAlignment); }};
}

}  // namespace tessera::comm
