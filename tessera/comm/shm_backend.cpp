#include "tessera/comm/shm_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/device/shared_heap.h"

namespace tessera::comm {
namespace {

class ShmBackend final : public PeerBackend {
 public:
  ShmBackend(std::shared_ptr<Store> store, std::unique_ptr<PeerMemory> peers, int rank,
             std::string name, ShmOptions options)
      : PeerBackend(std::move(store), std::move(peers), rank, std::move(name), std::move(options)) {
    start_worker();
  }
  ~ShmBackend() override { join_worker(); }

  static std::size_t control_bytes(std::size_t size) {
    return PeerBackend::control_bytes(sizeof(Plane) + size * sizeof(SharedCounter) +
                                      kShmChunks.bytes);
  }

  std::string_view name() const override { return "shm"; }
  HeldMemory held_memory() const override { return kShmChunks; }

  // Peers read it where it lies, while the heap has room.
  std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream* stream) override {
    std::byte* const data = peers().own_heap->allocate(bytes, 256);
    if (data == nullptr) {
      return PeerBackend::make_staging(bytes, stream);
    }
    return {data, [heap = peers().own_heap](std::byte* staging) { heap->free(staging); }};
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    if (ranks.size() == 1) {
      return make_solo_backend();
    }
    const auto own = std::find(ranks.begin(), ranks.end(), rank());
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank());
    std::string why_not;
    auto backend = make_shm_backend(store(), static_cast<int>(own - ranks.begin()),
                                    static_cast<int>(ranks.size()), name, options(), why_not);
    TESSERA_CHECK(backend != nullptr, CommError, "group '", name,
                  "': its ranks share memory in group '", group_name(),
                  "', but not here: ", why_not);
    return backend;
  }

 private:
  static constexpr std::size_t kChunkBytes = kShmChunks.bytes / kNumChunks;

  // Of each rank. Its counters behind it, by rank: how many chunks of that rank it has read; then
  // its chunks.
  struct Plane {
    SharedCounter read;    // rounds whose sources this rank needs no more
    SharedCounter filled;  // chunks

    SharedCounter& emptied(std::size_t source) {
      return reinterpret_cast<SharedCounter*>(this + 1)[source];
    }
  };
  Plane& at(std::size_t rank) const { return *reinterpret_cast<Plane*>(plane(rank)); }

  std::optional<Place> place_of(const void* data, std::size_t bytes) override {
    const auto offset = peers().own_heap->offset_of(data, bytes);
    return offset ? std::optional(Place{0, *offset}) : std::nullopt;
  }
  const std::byte* address_of(std::size_t rank, const Place& place) override {
    return peers().heaps[rank]->data() + place.offset;
  }
  std::byte* chunk(std::size_t rank, std::uint32_t number) override {
    return reinterpret_cast<std::byte*>(&at(rank).emptied(num_ranks())) +
           number % kNumChunks * kChunkBytes;
  }
  std::size_t chunk_bytes() const override { return kChunkBytes; }
  std::byte* scratch(std::size_t bytes) override {
    scratch_.resize(std::max(scratch_.size(), bytes));
    return scratch_.data();
  }

  void close_round(std::uint32_t round) override {
    at(own_rank()).read.advance(round);
    for_each_rank([&](std::size_t r) { await(at(r).read, round, r); });
  }
  void await_emptied(std::uint32_t number) override {
    for_each_peer([&](std::size_t r) {
      await(at(r).emptied(own_rank()), number - static_cast<std::uint32_t>(kNumChunks), r);
    });
  }
  void tell_filled(std::uint32_t number) override { at(own_rank()).filled.advance(number); }
  void await_filled(std::size_t rank, std::uint32_t number) override {
    await(at(rank).filled, number, rank);
  }
  void tell_emptied(std::size_t rank, std::uint32_t number) override {
    at(own_rank()).emptied(rank).advance(number);
  }

  void copy(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void reduce(std::span<const std::byte* const> parts, DType dtype, std::size_t numel, void* out,
              DType out_dtype, Reduction reduction) override {
    reduce_in_rank_order(parts, dtype, numel, out, out_dtype, reduction);
  }

  void finish_call(const Call&, const std::shared_ptr<device::HandedOver>& owner,
                   std::exception_ptr failure) override {
    if (failure) {
      owner->fail(std::move(failure));
    } else {
      owner->hand_over({});
    }
  }

  std::vector<std::byte> scratch_;
};

}  // namespace

std::unique_ptr<Backend> make_shm_backend(std::shared_ptr<Store> store, int rank, int size,
                                          const std::string& name, const ShmOptions& options,
                                          std::string& why_not) {
  PeerOptions peers;
  peers.rank = rank;
  peers.size = size;
  peers.group = name;
  peers.control_bytes = ShmBackend::control_bytes(static_cast<std::size_t>(size));
  peers.timeout = options.timeout;
  peers.status = options.status;
  peers.pretended_host = options.pretended_host;
  std::unique_ptr<PeerMemory> memory = connect_peers(*store, peers, why_not);
  return memory ? std::make_unique<ShmBackend>(std::move(store), std::move(memory), rank, name,
                                               options)
                : nullptr;
}

}  // namespace tessera::comm
