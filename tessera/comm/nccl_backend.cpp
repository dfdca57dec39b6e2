#include "tessera/comm/nccl_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/comm/c10d_store.h"
#include "tessera/comm/tag_channel.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kUInt8:
      return at::kByte;
  }
  return at::kByte;
}

// c10d's own limit, at which it ends the process, lies behind ours: the message with the names is
// the first.
constexpr std::chrono::seconds kNcclSlack{30};

// Every call is work of its stream: c10d starts NCCL behind the current stream, and waiting for
// the Work orders that stream, not the host, behind NCCL. Tags go beside it, over sockets.
class NcclBackend final : public Backend {
 public:
  NcclBackend(std::shared_ptr<Store> store, int rank, int size, int device_index,
              const std::string& name, const GlooOptions& side)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        device_index_(static_cast<c10::DeviceIndex>(device_index)),
        side_(side),
        tags_(store_, rank, size, name, side) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = side.timeout + kNcclSlack;
    try {
      process_group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(
          c10::make_intrusive<c10d::PrefixStore>(name, c10d_store(*store_)), rank, size, options);
      // Else the first call would do it, and block its caller until all ranks have made it.
      const c10::cuda::CUDAGuard guard(device_index_);
      process_group_->eagerConnectSingleDevice(device());
    } catch (const std::exception& error) {
      throw CommError(detail::concat("group '", name, "': rank ", rank, " on GPU ", device_index,
                                     " cannot start NCCL: ", c10d_text(error)));
    }
  }

  // Left to itself, c10d would abort NCCL's kernels and with them what they are writing. But a rank
  // that is failing must not wait for calls that its peers may never join.
  ~NcclBackend() override {
    if (is_aborted_) {
      return;
    }
    try {
      if (std::uncaught_exceptions() > num_exceptions_) {
        abort("");
      } else {
        process_group_->shutdown();
      }
    } catch (const std::exception&) {
      // A call that failed has told whoever waited for it; here nobody is left to tell.
    }
  }
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  std::string_view name() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool stream_ordered() const override { return true; }

  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) override {
    return tags_.start_tags(tags);
  }
  Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words) override {
    return tags_.start_words(words);
  }
  Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) override {
    return tags_.start_host_gather(all, piece_bytes, call);
  }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    return on_stream(call.stream, [&] {
      std::vector<at::Tensor> shards;
      std::vector<at::Tensor> fulls;
      for (const GatherBytes& part : parts) {
        shards.push_back(view(part.shard, part.shard_bytes));
        fulls.push_back(view(part.full, part.shard_bytes * static_cast<std::size_t>(size_)));
      }
      if (parts.empty()) {  // a barrier: everybody sends one byte
        fulls.push_back(at::zeros({size_}, bytes_on_device()));
        shards.push_back(fulls.front().narrow(0, rank_, 1));
      }
      return process_group_->allgather_into_tensor_coalesced(fulls, shards);
    });
  }

  // Grouped sends and receives; c10d leaves out those of zero bytes. A rank's own piece that
  // already lies in its place is left out, too.
  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte*, const Call& call) override {
    return on_stream(call.stream, [&] {
      c10::intrusive_ptr<c10d::Work> last;
      for (const GatherBytes& part : parts) {
        auto* full = static_cast<std::byte*>(part.full);
        std::vector<at::Tensor> inputs;
        std::vector<at::Tensor> outputs;
        for (std::size_t r = 0; r < wants.size(); ++r) {
          const bool own = static_cast<int>(r) == rank_;
          const bool receives = wants[static_cast<std::size_t>(rank_)] != 0;
          const std::byte* slot = receives ? full + r * part.shard_bytes : nullptr;
          const bool in_place = own && slot == part.shard;
          inputs.push_back(view(part.shard, wants[r] != 0 && !in_place ? part.shard_bytes : 0));
          outputs.push_back(receives && !in_place ? view(slot, part.shard_bytes)
                                                  : view(part.shard, 0));
        }
        last = process_group_->alltoall(outputs, inputs);
      }
      return last;
    });
  }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    TESSERA_INVARIANT(pieces.contiguous(), "NCCL was given pieces with gaps");
    return on_stream(call.stream, [&] {
      const std::size_t bytes = pieces.piece_bytes * static_cast<std::size_t>(size_);
      at::Tensor input = view(pieces.send, bytes);
      at::Tensor output = view(pieces.receive, bytes);
      std::vector<std::int64_t> equal_pieces;
      return process_group_->alltoall_base(output, input, equal_pieces, equal_pieces);
    });
  }

  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    return on_stream(call.stream, [&] {
      std::vector<at::Tensor> tensors = {view(data, bytes)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return process_group_->broadcast(tensors, options);
    });
  }

  Pending start_reduce(const RankParts& parts, void* out, DType out_dtype, Reduction reduction,
                       device::Stream* stream) override {
    check_reduction(parts.dtype, out_dtype);
    const Guard guard = guard_of(stream);
    const auto numel = static_cast<std::int64_t>(parts.numel);
    const auto options = at::TensorOptions(scalar_type(parts.dtype)).device(device());
    const at::Tensor all =
        at::from_blob(const_cast<void*>(parts.data), {parts.num_parts, numel}, options);
    const bool half = parts.dtype == DType::kBFloat16 || parts.dtype == DType::kFloat16;
    at::Tensor result = all[0].to(half ? at::kFloat : scalar_type(parts.dtype), false, true);
    for (std::int64_t part = 1; part < parts.num_parts; ++part) {
      const at::Tensor next = half ? all[part].to(at::kFloat) : all[part];
      switch (reduction) {
        case Reduction::kSum:
          result.add_(next);
          break;
        case Reduction::kMax:
          at::maximum_out(result, result, next);
          break;
        case Reduction::kMin:
          at::minimum_out(result, result, next);
          break;
      }
    }
    at::from_blob(out, {numel}, options.dtype(scalar_type(out_dtype))).copy_(result, true);
    return stream != nullptr ? stream->record() : synchronized();
  }

  // From the allocator that knows streams: freed, it is used again only behind this stream's work.
  std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream* stream) override {
    const Guard guard = guard_of(stream);
    auto holder = std::make_shared<at::Tensor>(
        at::empty({static_cast<std::int64_t>(bytes)}, bytes_on_device()));
    return {holder, static_cast<std::byte*>(holder->data_ptr())};
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank_);
    const auto rank = static_cast<int>(own - ranks.begin());
    const auto size = static_cast<int>(ranks.size());
    if (auto backend = share_in_split(store_, rank, size, name, side_)) {
      return backend;
    }
    return std::make_unique<NcclBackend>(store_, rank, size, device_index_, name, side_);
  }

  // NCCL sends along a ring, in which every rank but the last passes the bytes on.
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return (rank_ + size_ - root) % size_ == size_ - 1 ? 0 : bytes;
  }

  void abort(const std::string&) override {
    is_aborted_ = true;
    tags_.abort();
    process_group_->abort();
  }

 private:
  // The stream's device is made current by the guard of the stream.
  using Guard = std::optional<c10::cuda::CUDAStreamGuard>;

  Guard guard_of(device::Stream* stream) const {
    if (stream == nullptr) {
      return Guard(c10::cuda::getDefaultCUDAStream(device_index_));
    }
    return Guard(c10::cuda::getStreamFromExternal(
        static_cast<cudaStream_t>(stream->native_handle()), device_index_));
  }

  template <typename Start>
  Pending on_stream(device::Stream* stream, const Start& start) {
    const Guard guard = guard_of(stream);
    try {
      start()->wait();
    } catch (const std::exception& error) {
      throw CommError(detail::concat("NCCL: ", c10d_text(error)));
    }
    return stream != nullptr ? stream->record() : synchronized();
  }

  // Without a stream to hang it on, a Pending of ours must be done.
  Pending synchronized() const {
    c10::cuda::getDefaultCUDAStream(device_index_).synchronize();
    return {};
  }

  at::Device device() const { return {at::kCUDA, device_index_}; }
  at::TensorOptions bytes_on_device() const {
    return at::TensorOptions(at::kByte).device(device());
  }
  at::Tensor view(const void* data, std::size_t bytes) const {
    return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
                         bytes_on_device());
  }

  const std::shared_ptr<Store> store_;
  const int rank_;
  const int size_;
  const c10::DeviceIndex device_index_;
  const GlooOptions side_;
  const int num_exceptions_ = std::uncaught_exceptions();
  std::atomic<bool> is_aborted_ = false;
  TagChannel tags_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> process_group_;
};

}  // namespace

bool nccl_built() { return true; }

std::string nccl_description() {
  const auto version = torch::cuda::nccl::version();
  return detail::concat(version >> 32, ".", (version >> 16) & 0xffff, ".", version & 0xffff);
}

std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store> store, int rank, int size,
                                           int device_index, const std::string& name,
                                           const GlooOptions& side) {
  return std::make_unique<NcclBackend>(std::move(store), rank, size, device_index, name, side);
}

}  // namespace tessera::comm
