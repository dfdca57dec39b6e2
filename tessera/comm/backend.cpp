#include "tessera/comm/backend.h"

#include <cstring>
#include <new>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::align_val_t kAlignment{256};

class SoloBackend final : public Backend {
 public:
  explicit SoloBackend(device::Device* device) : device_(device) {}

  std::string_view name() const override { return "solo"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool compares_tags() const override { return true; }  // nobody to differ from
  bool stream_ordered() const override { return true; }
  std::size_t broadcast_sent_bytes(std::size_t, int) const override { return 0; }
  void abort(const std::string&) override {}

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    Pending last;
    for (const GatherBytes& part : parts) {
      last = copy(part.full, part.shard, part.shard_bytes, call);
    }
    return last;
  }

  // REQUIRES says that somebody wants it: this rank.
  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t>,
                          std::byte*, const Call& call) override {
    return start_all_gather(parts, call);
  }

  // What there is lies at its place.
  Pending start_host_gather(std::byte*, std::size_t, const Call&) override { return {}; }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    return copy(pieces.receive, pieces.send, pieces.piece_bytes, call);
  }

  Pending start_broadcast(void*, std::size_t, int, const Call& call) override {
    return call.stream != nullptr ? call.stream->record() : Pending();
  }

  Pending start_reduce(const RankParts& parts, void* out, DType out_dtype, Reduction reduction,
                       device::Stream* stream) override {
    if (parts.dtype == out_dtype) {  // one part: the sum is the part
      Call call;
      call.stream = stream;
      return copy(out, parts.data, parts.numel * bytes_of(out_dtype), call);
    }
    return Backend::start_reduce(parts, out, out_dtype, reduction, stream);
  }

  std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream* stream) override {
    if (device_ == nullptr) {
      return Backend::make_staging(bytes, stream);
    }
    const auto memory =
        std::make_shared<device::Memory>(device_->allocate(Tier::kDevice, bytes, Role::kStaging));
    return {memory, memory->data()};
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    TESSERA_INVARIANT(ranks.size() == 1, "split of a world of one into ", ranks.size(),
                      " ranks: ", name);
    return std::make_unique<SoloBackend>(device_);
  }

 private:
  // In stream order with the data kept alive, or at once.
  Pending copy(void* to, const void* from, std::size_t bytes, const Call& call) {
    if (to == from || bytes == 0) {
      return call.stream != nullptr ? call.stream->record() : Pending();
    }
    if (device_ != nullptr) {
      device::Stream& stream =
          call.stream != nullptr ? *call.stream : device_->stream(device::StreamKind::kCompute);
      return device_->start_copy(to, from, bytes, stream);
    }
    if (call.stream != nullptr) {
      return call.stream->enqueue(
          [to, from, bytes, keep = call.keep_alive] { std::memcpy(to, from, bytes); });
    }
    std::memcpy(to, from, bytes);
    return {};
  }

  device::Device* device_;
};

}  // namespace

Pending Backend::start_gather_to(std::span<const GatherBytes>, std::span<const std::uint8_t>,
                                 std::byte*, const Call&) {
  TESSERA_INVARIANT(false, "backend ", name(), " cannot gather to some ranks only");
  return {};
}

Pending Backend::start_reduce_scatter(const void*, void*, std::size_t, DType, DType, const Call&) {
  TESSERA_INVARIANT(false, "backend ", name(), " does not read its peers' memory");
  return {};
}

Pending Backend::start_all_reduce(void*, std::size_t, DType, Reduction, const Call&) {
  TESSERA_INVARIANT(false, "backend ", name(), " does not read its peers' memory");
  return {};
}

Pending Backend::start_tags(const std::shared_ptr<std::vector<CallTag>>&) {
  TESSERA_INVARIANT(false, "backend ", name(), " compares tags itself");
  return {};
}

Pending Backend::start_host_gather(std::byte*, std::size_t, const Call&) {
  TESSERA_INVARIANT(false, "backend ", name(), " gathers memory of the host as any other");
  return {};
}

Pending Backend::start_words(const std::shared_ptr<std::vector<WordsSlot>>& words) {
  TESSERA_INVARIANT(!stream_ordered(), "backend ", name(),
                    " has no way for words beside its calls");
  Call call;
  call.keep_alive = words;
  const GatherBytes part{&(*words)[static_cast<std::size_t>(rank())], words->data(),
                         sizeof(WordsSlot)};
  return start_all_gather({&part, 1}, call);
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

std::unique_ptr<Backend> make_solo_backend(device::Device* device) {
  return std::make_unique<SoloBackend>(device);
}

}  // namespace tessera::comm
