#include "tessera/comm/gloo_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/c10d_gloo.h"
#include "tessera/comm/ipc_backend.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// From this size on bytes go straight to their place, in one operation per rank; below it the
// number of operations decides.
constexpr std::size_t kDirectBytes = 32 * 1024;

class GlooBackend final : public Backend {
 public:
  using GlooDevices = std::vector<GlooDevice>;

  GlooBackend(const GlooPeers& peers, GlooDevices devices, const GlooOptions& options)
      : peers_(joined(peers, options)),
        devices_(std::move(devices)),
        rank_(peers.rank),
        size_(peers.size),
        options_(options),
        data_(peers, devices_, options.num_threads, options),
        // Tags have connections of their own: they overtake data, and Gloo matches the calls of one
        // process group by their order.
        tags_(tag_peers(peers), {devices_.front()}, 1, options) {}

  std::string_view name() const override { return "gloo"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    std::vector<Pending> works;
    for (const GatherBytes& part : parts) {
      if (part.shard_bytes < kDirectBytes) {
        at::Tensor shard = view(part.shard, part.shard_bytes, call);
        at::Tensor full = view(part.full, part.shard_bytes * static_cast<std::size_t>(size_), call);
        works.push_back(start([&] { return data_.group()._allgather_base(full, shard); }));
      } else {
        gather_by_broadcasts(part, call, works);
      }
    }
    return works.size() == 1 ? works.front() : Pending::all(std::move(works));
  }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    if (pieces.contiguous() && pieces.piece_bytes < kDirectBytes) {
      const std::size_t bytes = pieces.piece_bytes * static_cast<std::size_t>(size_);
      at::Tensor input = view(pieces.send, bytes, call);
      at::Tensor output = view(pieces.receive, bytes, call);
      std::vector<std::int64_t> equal_pieces;
      return start(
          [&] { return data_.group().alltoall_base(output, input, equal_pieces, equal_pieces); });
    }
    // A scatter from every rank sends the same bytes, and takes pieces wherever they lie.
    std::vector<Pending> works;
    const auto* send = static_cast<const std::byte*>(pieces.send);
    auto* receive = static_cast<std::byte*>(pieces.receive);
    for (int root = 0; root < size_; ++root) {
      std::vector<at::Tensor> output = {
          view(receive + static_cast<std::size_t>(root) * pieces.receive_stride, pieces.piece_bytes,
               call)};
      std::vector<std::vector<at::Tensor>> input;
      if (root == rank_) {
        input.emplace_back();
        for (int to = 0; to < size_; ++to) {
          input[0].push_back(view(send + static_cast<std::size_t>(to) * pieces.send_stride,
                                  pieces.piece_bytes, call));
        }
      }
      c10d::ScatterOptions options;
      options.rootRank = root;
      works.push_back(start([&] { return data_.group().scatter(output, input, options); }));
    }
    return Pending::all(std::move(works));
  }

  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    std::vector<at::Tensor> tensors = {view(data, bytes, call)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return start([&] { return data_.group().broadcast(tensors, options); });
  }

  // An all-to-all in which the pieces for ranks that want nothing are empty. Gloo wants the pieces
  // for different ranks behind each other, hence the copies.
  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte* copies, const Call& call) override {
    const bool receives = wants[static_cast<std::size_t>(rank_)] != 0;
    std::vector<Pending> works;
    for (const GatherBytes& part : parts) {
      const auto piece = static_cast<std::int64_t>(part.shard_bytes);
      std::vector<std::int64_t> sent;
      std::byte* const first_copy = copies;
      for (const std::uint8_t wanted : wants) {
        sent.push_back(wanted != 0 ? piece : 0);
        if (wanted != 0) {
          std::memcpy(copies, part.shard, part.shard_bytes);
          copies += part.shard_bytes;
        }
      }
      std::vector<std::int64_t> received(sent.size(), receives ? piece : 0);
      at::Tensor input = view(first_copy, static_cast<std::size_t>(copies - first_copy), call);
      at::Tensor output =
          receives ? view(part.full, part.shard_bytes * static_cast<std::size_t>(size_), call)
                   : view(first_copy, 0, call);
      works.push_back(
          start([&] { return data_.group().alltoall_base(output, input, received, sent); }));
    }
    return Pending::all(std::move(works));
  }

  bool gather_to_needs_copies() const override { return true; }

  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) override {
    return tags_.start_gather(tags->data(), sizeof(CallTag), tags);
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    if (ranks.size() == 1) {
      return make_solo_backend();
    }
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank_);
    const auto rank = static_cast<int>(own - ranks.begin());
    const auto size = static_cast<int>(ranks.size());
    if (auto backend = share_in_split(peers_.store, rank, size, name, options_)) {
      return backend;
    }
    return std::make_unique<GlooBackend>(GlooPeers{peers_.store, rank, size, name}, devices_,
                                         options_);
  }

  // Gloo sends along a binomial tree: in round i the first 2^i ranks (counted from the root) send
  // to the next 2^i.
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    const int from_root = (rank_ + size_ - root) % size_;
    std::size_t num_sends = 0;
    for (int step = 1; step < size_; step *= 2) {
      num_sends += from_root < step && from_root + step < size_ ? 1 : 0;
    }
    return num_sends * bytes;
  }

  void abort(const std::string&) override {
    data_.abandon();
    tags_.abandon();
  }

 private:
  // c10d gathers through a flat copy that it allocates per call. A broadcast from every rank sends
  // the same bytes straight into their place, at up to three times the speed.
  void gather_by_broadcasts(const GatherBytes& part, const Call& call,
                            std::vector<Pending>& works) {
    auto* full = static_cast<std::byte*>(part.full);
    std::byte* own = full + static_cast<std::size_t>(rank_) * part.shard_bytes;
    if (own != part.shard) {
      std::memcpy(own, part.shard, part.shard_bytes);
    }
    for (int root = 0; root < size_; ++root) {
      void* slot = full + static_cast<std::size_t>(root) * part.shard_bytes;
      works.push_back(start_broadcast(slot, part.shard_bytes, root, call));
    }
  }

  static at::Tensor view(const void* data, std::size_t bytes, const Call& call) {
    return GlooLink::view(data, bytes, call.keep_alive);
  }
  template <typename Operation>
  static Pending start(const Operation& operation) {
    return GlooLink::start(operation);
  }

  const GlooPeers peers_;
  const GlooDevices devices_;
  const int rank_;
  const int size_;
  const GlooOptions options_;
  GlooLink data_;
  GlooLink tags_;
};

}  // namespace

std::unique_ptr<Backend> share_in_split(const std::shared_ptr<Store>& store, int rank, int size,
                                        const std::string& name, const GlooOptions& options) {
  if (!options.tries_sharing_in_splits) {
    return nullptr;
  }
  const PeerBackendOptions peers{options.timeout, options.status, {}, options.pretended_host};
  std::string why_not;
  return options.cuda_device < 0 ? make_shm_backend(store, rank, size, name, peers, why_not)
                                 : make_ipc_backend(store, rank, size, options.cuda_device, name,
                                                    IpcOptions{peers}, why_not);
}

std::unique_ptr<Backend> make_gloo_backend(std::shared_ptr<Store> store, int rank, int size,
                                           const std::string& name, const GlooOptions& options) {
  return std::make_unique<GlooBackend>(GlooPeers{std::move(store), rank, size, name},
                                       make_gloo_devices(options, options.num_devices), options);
}

}  // namespace tessera::comm
