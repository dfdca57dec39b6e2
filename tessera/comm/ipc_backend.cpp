#include "tessera/comm/ipc_backend.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tessera/comm/await_ranks.h"
#include "tessera/comm/peer_regions.h"
#include "tessera/comm/rank_sum_cuda.h"
#include "tessera/core/error.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_connections.h"
#include "tessera/device/cuda_shared_heap.h"
#include "tessera/device/cuda_stream.h"

namespace tessera::comm {
namespace {

using device::CudaDeviceScope;
using device::CudaSharedHeap;
using device::CudaStream;

// Ahead of every value that is waited for, in the cyclic comparison of a stream's waits.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;
constexpr std::chrono::seconds kEndLimit{2};

// What one rank tells another, in the order of its stream.
enum Flag : std::uint8_t {
  kReady,    // rounds whose sources may be read
  kRead,     // rounds that it has read
  kFilled,   // its chunks
  kEmptied,  // the other's chunks that it has read
  kNumFlags
};

struct alignas(64) Flags {
  std::array<std::atomic<std::uint32_t>, kNumFlags> values;
  // Per flag, the highest value whose GPU write the peer's CPU has enqueued. A GPU wait may be
  // enqueued only up to this value. See [Note: what a stream may wait for].
  std::array<SharedCounter, kNumFlags> enqueued;
  // Told by its CPU: it has seen that the other aborted, and takes nothing from it any more.
  std::atomic<std::uint32_t> has_noticed_abort;
};

struct ListedRegion {
  std::atomic<std::uint64_t> number;  // written last; 0: none
  cudaIpcMemHandle_t handle;
};

// Of each rank. Behind it: Flags, by the rank that writes them.
struct alignas(64) Plane {
  std::uint64_t heap;          // CudaSharedHeap::id()
  std::uint64_t chunk_region;  // where its chunks are
  std::uint64_t chunk_offset;
  std::atomic<std::uint64_t> version;  // of the list
  // All regions up to this number are listed, or gone. Later ones may be there, in a list that is
  // full too.
  std::atomic<std::uint64_t> complete_up_to;
  std::array<ListedRegion, kMaxListedRegions> regions;

  Flags& flags(std::size_t writer) { return reinterpret_cast<Flags*>(this + 1)[writer]; }
};

// The driver's own: the runtime has no such call, and libcuda is not linked.
using StreamMemOps = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

StreamMemOps find_stream_mem_ops() {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  TESSERA_CUDA_CALL(cudaGetDriverEntryPointByVersion, "cuStreamBatchMemOp", &found, kVersion,
                    cudaEnableDefault, &result);
#else
  static_assert(CUDART_VERSION >= kVersion);
  TESSERA_CUDA_CALL(cudaGetDriverEntryPoint, "cuStreamBatchMemOp", &found, cudaEnableDefault,
                    &result);
#endif
  TESSERA_CHECK(found != nullptr, DeviceError, "the driver has no cuStreamBatchMemOp");
  return reinterpret_cast<StreamMemOps>(found);
}

// A mapping that a GPU reads and writes, too.
class RegisteredMemory {
 public:
  RegisteredMemory(std::byte* data, std::size_t bytes) : data_(data) {
    TESSERA_CUDA_CALL(cudaHostRegister, data, bytes,
                      cudaHostRegisterPortable | cudaHostRegisterMapped);
    void* on_device = nullptr;
    const cudaError_t code = cudaHostGetDevicePointer(&on_device, data, 0);
    if (code != cudaSuccess) {
      cudaHostUnregister(data);
      device::check_cuda("cudaHostGetDevicePointer", code);
    }
    on_device_ = reinterpret_cast<CUdeviceptr>(on_device);
  }
  ~RegisteredMemory() { cudaHostUnregister(data_); }
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  CUdeviceptr address_of(const void* data) const {
    return on_device_ + static_cast<CUdeviceptr>(static_cast<const std::byte*>(data) - data_);
  }

 private:
  std::byte* const data_;
  CUdeviceptr on_device_ = 0;
};

std::string failure_text(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

class IpcBackend final : public PeerBackend {
 public:
  IpcBackend(std::shared_ptr<Store> store, std::unique_ptr<PeerMemory> peers, int rank,
             int device_index, std::string name, const IpcOptions& options)
      : PeerBackend(std::move(store), std::move(peers), rank, std::move(name), options),
        device_index_(device_index),
        max_listed_regions_(std::min(options.max_listed_regions, kMaxListedRegions)),
        heap_(CudaSharedHeap::open(device_index)),
        regions_(PeerRegions::open(device_index)),
        mem_ops_(find_stream_mem_ops()),
        default_stream_(make_default_stream()),
        seen_versions_(num_ranks()),
        awaited_(num_ranks()),
        is_released_(num_ranks()) {
    // See [Note: streams that share a connection].
    const std::string too_few = device::why_too_few_cuda_connections();
    TESSERA_CHECK(too_few.empty(), DeviceError, too_few);
    const CudaDeviceScope scope(device_index_);
    int least = 0;
    int greatest = 0;  // the numerically lowest is the most urgent
    TESSERA_CUDA_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
    TESSERA_CUDA_CALL(cudaStreamCreateWithPriority, &stream_.handle, cudaStreamNonBlocking,
                      greatest);
    for (const auto& memory : this->peers().controls) {
      registered_.push_back(std::make_unique<RegisteredMemory>(memory->data(), memory->bytes()));
    }
    load_rank_sums();
    try_flags();
    chunks_ = heap_->allocate(kIpcChunks.bytes, 256);
    TESSERA_CHECK(chunks_ != nullptr, DeviceError, "cuda:", device_index_, " has no ",
                  kIpcChunks.bytes, " bytes left for chunks");
    const CudaSharedHeap::Place place = *heap_->place_of(chunks_, 1);
    at(own_rank()).heap = heap_->id();
    at(own_rank()).chunk_region = place.region;
    at(own_rank()).chunk_offset = place.offset;
    before_posting();
  }

  ~IpcBackend() override {
    join_worker();
    end_watch();
    streams_.clear();
    default_books_->clear_dependencies();
    if (chunks_ != nullptr) {
      heap_->free(chunks_);
    }
  }

  // Once all ranks are made: maps their chunks, and begins.
  void meet_peers() {
    peer_chunks_.resize(num_ranks());
    for_each_peer([this](std::size_t r) {
      peer_chunks_[r] =
          const_cast<std::byte*>(address_of(r, {at(r).chunk_region, at(r).chunk_offset}));
    });
    peer_chunks_[own_rank()] = chunks_;
  }
  void begin() {
    start_worker();
    watch_ = std::thread([this] { keep_watch(); });
  }

  static std::size_t control_bytes(std::size_t size) {
    return PeerBackend::control_bytes(sizeof(Plane) + size * sizeof(Flags));
  }

  std::string_view name() const override { return "ipc"; }
  HeldMemory held_memory() const override { return kIpcChunks; }
  bool stream_ordered() const override { return true; }

  // Peers read it where it lies.
  std::shared_ptr<std::byte> make_staging(std::size_t bytes, device::Stream*) override {
    std::byte* const data = heap_->allocate(bytes, 256);
    TESSERA_CHECK(data != nullptr, DeviceError, "cuda:", device_index_, " has no ", bytes,
                  " bytes left for what calls are staged in");
    return {data, [heap = heap_](std::byte* staging) { heap->free(staging); }};
  }
  Tier staging_tier() const override { return Tier::kDevice; }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank());
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank());
    std::string why_not;
    auto backend = make_ipc_backend(store(), static_cast<int>(own - ranks.begin()),
                                    static_cast<int>(ranks.size()), device_index_, name,
                                    IpcOptions{options(), max_listed_regions_}, why_not);
    TESSERA_CHECK(backend != nullptr, CommError, "group '", name,
                  "': its ranks share memory in group '", group_name(),
                  "', but not here: ", why_not);
    return backend;
  }

 private:
  static constexpr std::size_t kGpuChunkBytes =
      (kIpcChunks.bytes - kSmallAllReduceBytes) / kNumChunks;

  // A call that has been handed to the GPU.
  struct UnderWay {
    std::uint32_t round = 0;  // its last
    CudaStream* stream = nullptr;
    Pending done;
    // Of a call that failed half-way: its owner is told when nothing of it is left.
    std::shared_ptr<device::HandedOver> owner;
    std::exception_ptr failure;
  };

  Plane& at(std::size_t rank) const { return *reinterpret_cast<Plane*>(plane(rank)); }
  // What `writer` tells this rank.
  Flags& told_by(std::size_t writer) const { return at(own_rank()).flags(writer); }

  // --- Flags.

  // Collects what a stream is to write and then to wait for.
  class MemOps {
   public:
    explicit MemOps(IpcBackend& backend) : backend_(backend) {}

    void tell(std::size_t rank, Flag flag, std::uint32_t value) {
      Flags& flags = backend_.at(rank).flags(backend_.own_rank());
      CUstreamBatchMemOpParams op{};
      op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      op.writeValue.address = backend_.registered_[rank]->address_of(&flags.values[flag]);
      op.writeValue.value = value;
      writes_.push_back(op);
      told_.push_back({&flags.enqueued[flag], value, rank});
    }
    void await(std::size_t rank, Flag flag, std::uint32_t value) {
      CUstreamBatchMemOpParams op{};
      op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      op.waitValue.address = backend_.registered_[backend_.own_rank()]->address_of(
          &backend_.told_by(rank).values[flag]);
      op.waitValue.value = value;
      op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      waits_.push_back(op);
      awaited_.push_back({&backend_.told_by(rank).enqueued[flag], value, rank});
      backend_.awaited_[rank].values[flag].store(value);
    }
    // Waits, on the CPU, until the peers have enqueued what ends the waits.
    void enqueue() {
      enqueue(writes_);
      for (const Enqueued& each : told_) {
        each.counter->advance(each.value);
      }
      for (const Enqueued& each : awaited_) {
        backend_.PeerBackend::await(*each.counter, each.value, each.rank);
      }
      enqueue(waits_);
    }

   private:
    struct Enqueued {
      SharedCounter* counter;
      std::uint32_t value;
      std::size_t rank;
    };

    void enqueue(std::vector<CUstreamBatchMemOpParams>& ops) {
      if (!ops.empty()) {
        const CUresult code = backend_.mem_ops_(backend_.stream_.handle,
                                                static_cast<unsigned>(ops.size()), ops.data(), 0);
        TESSERA_CHECK(code == CUDA_SUCCESS, DeviceError, "cuStreamBatchMemOp failed with ",
                      static_cast<int>(code));
      }
    }

    IpcBackend& backend_;
    std::vector<CUstreamBatchMemOpParams> writes_;
    std::vector<CUstreamBatchMemOpParams> waits_;
    std::vector<Enqueued> told_;
    std::vector<Enqueued> awaited_;
  };

  // Whether this GPU writes and waits for flags in shared memory is found out by trying.
  void try_flags() {
    Flags& own = told_by(own_rank());
    MemOps ops(*this);
    ops.tell(own_rank(), kReady, 1);
    ops.await(own_rank(), kReady, 1);
    ops.enqueue();
    TESSERA_CUDA_CALL(cudaStreamSynchronize, stream_.handle);
    TESSERA_CHECK(own.values[kReady].load() == 1, DeviceError,
                  "a flag that the GPU wrote is not seen by the CPU");
  }

  // What this rank waits for from `rank` is satisfied: by the CPU, and as often as that rank's GPU
  // may have written since. REQUIRES: what waits has been failed.
  void release(std::size_t rank) {
    for (std::size_t flag = 0; flag < kNumFlags; ++flag) {
      told_by(rank).values.at(flag).store(awaited_[rank].values.at(flag).load() + kFarAhead);
    }
    is_released_[rank] = true;
  }

  static bool has_reached(const std::atomic<std::uint32_t>& flag, std::uint32_t value) {
    return static_cast<std::int32_t>(flag.load() - value) >= 0;
  }

  // --- The data plane.

  Pending record_input(const Call& call) override {
    return call.stream != nullptr ? call.stream->record() : default_stream_->record();
  }

  std::optional<Place> place_of(const void* data, std::size_t bytes) override {
    const auto place = data != nullptr ? heap_->place_of(data, bytes) : std::nullopt;
    // It may have been taken since the list was made; and a list has an end.
    return place && listed_.count(place->region) > 0
               ? std::optional(Place{place->region, place->offset})
               : std::nullopt;
  }

  const std::byte* address_of(std::size_t rank, const Place& place) override {
    Plane& other = at(rank);
    if (const std::uint64_t version = other.version.load(); version != seen_versions_[rank]) {
      const std::uint64_t complete_up_to = other.complete_up_to.load();
      std::set<std::uint64_t> listed;
      for (const ListedRegion& region : other.regions) {
        listed.insert(region.number.load());
      }
      regions_->keep_only(other.heap, listed, complete_up_to);
      seen_versions_[rank] = version;
    }
    if (std::byte* const region = regions_->find(other.heap, place.region)) {
      return region + place.offset;
    }
    const auto listed = std::find_if(
        other.regions.begin(), other.regions.end(),
        [&](const ListedRegion& region) { return region.number.load() == place.region; });
    TESSERA_INVARIANT(listed != other.regions.end(), "rank ", rank, " of group '", group_name(),
                      "' has no region ", place.region);
    return regions_->open_region(other.heap, place.region, listed->handle) + place.offset;
  }

  std::byte* chunk(std::size_t rank, std::uint32_t number) override {
    return peer_chunks_[rank] + number % kNumChunks * kGpuChunkBytes;
  }
  std::size_t chunk_bytes() const override { return kGpuChunkBytes; }
  std::byte* scratch(std::size_t bytes) override {
    TESSERA_INVARIANT(bytes <= kSmallAllReduceBytes, "scratch of ", bytes, " bytes");
    return chunks_ + kNumChunks * kGpuChunkBytes;
  }

  // Keeps the list of regions as it is in the heap. A region stays where it is in it.
  void before_posting() override {
    const std::uint64_t version = heap_->version();
    if (version == listed_version_) {
      return;
    }
    Plane& own = at(own_rank());
    std::vector<CudaSharedHeap::Region> regions = heap_->regions();
    // The group's own chunks, then the oldest, so that a full list is complete up to a late one.
    const auto place_in_list = [&own](const CudaSharedHeap::Region& region) {
      return std::pair(region.number != own.chunk_region, region.number);
    };
    std::sort(regions.begin(), regions.end(), [&](const auto& left, const auto& right) {
      return place_in_list(left) < place_in_list(right);
    });
    std::set<std::uint64_t> present;
    for (const CudaSharedHeap::Region& region : regions) {
      present.insert(region.number);
    }
    for (ListedRegion& entry : own.regions) {
      if (const std::uint64_t number = entry.number.load(); present.count(number) == 0) {
        entry.number.store(0);
        listed_.erase(number);
      }
    }
    const auto end = own.regions.begin() + static_cast<std::ptrdiff_t>(max_listed_regions_);
    auto entry = own.regions.begin();
    std::uint64_t complete_up_to = present.empty() ? 0 : *present.rbegin();
    for (const CudaSharedHeap::Region& region : regions) {
      if (listed_.count(region.number) > 0) {
        continue;
      }
      entry = std::find_if(entry, end,
                           [](const ListedRegion& each) { return each.number.load() == 0; });
      if (entry == end) {
        complete_up_to = region.number - 1;  // peers may use it through another group's list
        break;
      }
      entry->handle = region.handle;
      entry->number.store(region.number);
      listed_.insert(region.number);
    }
    own.complete_up_to.store(complete_up_to);
    own.version.fetch_add(1);
    listed_version_ = version;
  }

  void open_round(std::uint32_t round, const Call& call, const Pending& input) override {
    // For good: it is the worker's thread, and the driver's calls need a current device.
    TESSERA_CUDA_CALL(cudaSetDevice, device_index_);
    CudaStream& stream = stream_for(call);
    stream.wait(input);
    {
      const std::lock_guard lock(under_way_mutex_);
      stream_of_current_call_ = &stream;
      enqueued_round_ = round;
    }
    is_to_watch_.notify_all();
    MemOps ops(*this);
    for_each_peer([&](std::size_t r) { ops.tell(r, kReady, round); });
    for_each_peer([&](std::size_t r) { ops.await(r, kReady, round); });
    ops.enqueue();
  }
  void close_round(std::uint32_t round) override {
    MemOps ops(*this);
    for_each_peer([&](std::size_t r) { ops.tell(r, kRead, round); });
    for_each_peer([&](std::size_t r) { ops.await(r, kRead, round); });
    ops.enqueue();
  }
  void await_emptied(std::uint32_t number) override {
    MemOps ops(*this);
    for_each_peer([&](std::size_t r) {
      ops.await(r, kEmptied, number - static_cast<std::uint32_t>(kNumChunks));
    });
    ops.enqueue();
  }
  void tell_filled(std::uint32_t number) override {
    MemOps ops(*this);
    for_each_peer([&](std::size_t r) { ops.tell(r, kFilled, number); });
    ops.enqueue();
  }
  void await_filled(std::size_t rank, std::uint32_t number) override {
    MemOps ops(*this);
    ops.await(rank, kFilled, number);
    ops.enqueue();
  }
  void tell_emptied(std::size_t rank, std::uint32_t number) override {
    MemOps ops(*this);
    ops.tell(rank, kEmptied, number);
    ops.enqueue();
  }

  void copy(void* to, const void* from, std::size_t bytes) override {
    TESSERA_CUDA_CALL(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDefault, stream_.handle);
  }
  device::Stream* use_stream() override { return stream_of_current_call_; }
  void reduce(std::span<const std::byte* const> parts, DType dtype, std::size_t numel, void* out,
              DType out_dtype, Reduction reduction) override {
    launch_rank_sum(parts, dtype, numel, out, out_dtype, reduction, stream_.handle);
  }

  // Streams of the device that a call belongs to can be ordered behind this one.
  CudaStream& stream_for(const Call& call) {
    const CudaStream* given = default_stream_.get();
    if (call.stream != nullptr) {
      given = dynamic_cast<const CudaStream*>(call.stream);
      TESSERA_INVARIANT(given != nullptr, "a call of backend ipc on a stream that is not CUDA's");
    }
    const std::lock_guard lock(under_way_mutex_);
    auto& stream = streams_[given->books()];
    if (stream == nullptr) {
      stream = given->make_sibling(stream_.handle);
    }
    return *stream;
  }

  // CUDA's own: calls without a stream are ordered behind it.
  std::unique_ptr<CudaStream> make_default_stream() const {
    device::CudaStreamOptions options;
    options.device_index = device_index_;
    options.pool = std::make_shared<device::CudaEventPool>(
        device_index_, cudaEventDisableTiming | cudaEventBlockingSync);
    options.books = default_books_;
    return std::make_unique<CudaStream>(std::move(options));
  }

  void finish_call(const Call&, const std::shared_ptr<device::HandedOver>& owner,
                   std::exception_ptr failure) override {
    if (stream_of_current_call_ == nullptr) {  // nothing was enqueued
      if (failure) {
        post_abort(failure_text(failure));  // this rank takes part no more: nobody waits for it
        owner->fail(std::move(failure));
      } else {
        owner->hand_over({});
      }
      return;
    }
    UnderWay call;
    call.stream = stream_of_current_call_;
    call.done = stream_of_current_call_->record();
    const Pending done = call.done;
    {
      const std::lock_guard lock(under_way_mutex_);
      stream_of_current_call_ = nullptr;
      call.round = enqueued_round_;
      if (!failure) {
        failure = given_up_;  // its waits have been released
      }
      if (failure) {
        call.stream->fail(call.done, failure);
        call.owner = owner;
        call.failure = failure;
      }
      under_way_.push_back(std::move(call));
    }
    is_to_watch_.notify_all();
    if (failure) {
      post_abort(failure_text(failure));
    } else {
      owner->hand_over(done);
    }
    drop_ended();
  }

  // --- Calls that are under way, and peers that are not any more.

  bool is_under_way() override {
    drop_ended();
    const std::lock_guard lock(under_way_mutex_);
    return !under_way_.empty();
  }

  // By the worker alone. No lock is held while CUDA is asked.
  void drop_ended() {
    while (true) {
      Pending oldest;
      {
        const std::lock_guard lock(under_way_mutex_);
        if (under_way_.empty()) {
          return;
        }
        oldest = under_way_.front().done;
      }
      if (!oldest.done()) {
        return;
      }
      UnderWay ended;
      {
        const std::lock_guard lock(under_way_mutex_);
        ended = std::move(under_way_.front());
        under_way_.pop_front();
      }
      if (ended.owner != nullptr) {
        ended.owner->fail(ended.failure);
      }
    }
  }

  // Calls that have not heard enough from `rank` fail, and all behind them; then no stream waits
  // for it.
  // REQUIRES: under_way_mutex_ is held.
  bool fail_calls_needing(std::size_t rank, const std::exception_ptr& why) {
    const auto needs_it = [&](std::uint32_t round) {
      return !has_reached(told_by(rank).values[kRead], round);
    };
    const auto first = std::find_if(under_way_.begin(), under_way_.end(),
                                    [&](const UnderWay& call) { return needs_it(call.round); });
    for (auto call = first; call != under_way_.end(); ++call) {
      call->stream->fail(call->done, why);
    }
    const bool is_needed = first != under_way_.end() ||
                           (stream_of_current_call_ != nullptr && needs_it(enqueued_round_));
    if (!is_needed && !is_released_[rank]) {
      return false;
    }
    if (!given_up_) {
      given_up_ = why;  // of the call that is being enqueued, too
    }
    release(rank);
    return true;
  }

  // By any thread: calls nothing of CUDA, nor waits for whoever does.
  std::exception_ptr check_peers() override {
    std::exception_ptr failure;
    {
      const std::lock_guard lock(under_way_mutex_);
      for_each_peer([&](std::size_t r) {
        if (aborted_) {  // before this call was under way
          fail_calls_needing(r, aborted_);
        }
        const std::exception_ptr aborted = abort_of(r);
        const std::exception_ptr ended = end_of(r);
        if (!aborted && !ended) {
          return;
        }
        if (fail_calls_needing(r, ended ? ended : aborted) && !failure) {
          failure = ended ? ended : aborted;
        }
        if (aborted && stream_of_current_call_ == nullptr) {
          at(r).flags(own_rank()).has_noticed_abort.store(1);
        }
      });
    }
    if (failure) {
      post_abort(failure_text(failure));
    }
    return failure;
  }

  // See [Note: what a stream may wait for].
  void keep_watch() {
    std::unique_lock lock(under_way_mutex_);
    while (!is_watch_ending_) {
      if (stream_of_current_call_ == nullptr && under_way_.empty()) {
        is_to_watch_.wait(lock);
        continue;
      }
      is_to_watch_.wait_for(lock, SharedCounter::kLookInterval);
      lock.unlock();
      check_peers();
      lock.lock();
    }
  }
  void end_watch() {
    {
      const std::lock_guard lock(under_way_mutex_);
      is_watch_ending_ = true;
    }
    is_to_watch_.notify_all();
    if (watch_.joinable()) {
      watch_.join();
    }
  }

  // Peers that still read from this rank notice first, since its memory is not theirs to read once
  // its streams go on; a peer that does not notice in time is given up all the same.
  void end_what_is_under_way(const std::string& reason) override {
    const auto limit = std::chrono::steady_clock::now() + kEndLimit;
    const auto is_early = [&] { return std::chrono::steady_clock::now() < limit; };
    const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    for_each_peer([&](std::size_t r) {
      while (is_early() && !abort_of(r) && !end_of(r) && told_by(r).has_noticed_abort.load() == 0 &&
             waits_for(r)) {
        nap();
      }
    });
    do {
      {
        const std::lock_guard lock(under_way_mutex_);
        if (!aborted_) {
          aborted_ = std::make_exception_ptr(CommError(reason));
        }
        for_each_peer([&](std::size_t r) { fail_calls_needing(r, aborted_); });
        if (stream_of_current_call_ == nullptr && under_way_.empty()) {
          return;
        }
      }
      nap();
    } while (is_early());
  }

  bool waits_for(std::size_t rank) {
    const std::lock_guard lock(under_way_mutex_);
    const bool is_enqueuing = stream_of_current_call_ != nullptr;
    return (is_enqueuing || !under_way_.empty()) &&
           !has_reached(told_by(rank).values[kRead],
                        is_enqueuing ? enqueued_round_ : under_way_.back().round);
  }

  struct OwnedStream {
    ~OwnedStream() {
      if (handle != nullptr) {
        cudaStreamDestroy(handle);
      }
    }
    cudaStream_t handle = nullptr;
  };

  const int device_index_;
  const std::size_t max_listed_regions_;
  const std::shared_ptr<CudaSharedHeap> heap_;
  const std::shared_ptr<PeerRegions> regions_;
  const StreamMemOps mem_ops_;
  std::vector<std::unique_ptr<RegisteredMemory>> registered_;  // the control blocks, by rank
  OwnedStream stream_;
  const std::shared_ptr<device::CudaBooks> default_books_ = std::make_shared<device::CudaBooks>();
  const std::unique_ptr<CudaStream> default_stream_;
  std::byte* chunks_ = nullptr;          // in the heap; the scratch behind them
  std::vector<std::byte*> peer_chunks_;  // by rank

  // The worker's own.
  std::set<std::uint64_t> listed_;
  std::uint64_t listed_version_ = 0;
  std::vector<std::uint64_t> seen_versions_;  // of the peers' lists

  std::vector<Flags> awaited_;  // by rank: the last values that were waited for

  std::mutex under_way_mutex_;  // never held around a call into CUDA
  // Guarded by under_way_mutex_.
  std::map<const device::CudaBooks*, std::unique_ptr<CudaStream>> streams_;  // all of stream_
  std::deque<UnderWay> under_way_;
  std::vector<bool> is_released_;
  std::exception_ptr aborted_;   // why; null: not by this rank, or not yet
  std::exception_ptr given_up_;  // why waits were released first; null: none were
  // Written by the worker: of the call that is being handed over.
  CudaStream* stream_of_current_call_ = nullptr;
  std::uint32_t enqueued_round_ = 0;
  bool is_watch_ending_ = false;

  std::condition_variable is_to_watch_;
  std::thread watch_;
};

constexpr const char* kCould = "ok";

// Whether all ranks could take a step. `why_not` says which one could not.
bool agree(Store& store, const PeerOptions& options, const std::string& step,
           const std::string& own, std::string& why_not) {
  const std::vector<std::string> said =
      exchange_at_store(store, options.group, step, options.rank, options.size, own,
                        options.timeout, options.status.get());
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank] != kCould) {
      why_not = detail::concat("rank ", rank, ": ", said[rank]);
      return false;
    }
  }
  return true;
}

template <typename Step>
std::string outcome_of(const Step& step) {
  try {
    step();
    return kCould;
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

bool ipc_built() { return true; }

std::unique_ptr<Backend> make_ipc_backend(std::shared_ptr<Store> store, int rank, int size,
                                          int cuda_device, const std::string& name,
                                          const IpcOptions& options, std::string& why_not) {
  if (size > static_cast<int>(kMaxSummedRanks)) {  // all ranks know it: nobody waits for another
    why_not = detail::concat("backend ipc has at most ", kMaxSummedRanks, " ranks, not ", size);
    return nullptr;
  }
  PeerOptions peers;
  peers.rank = rank;
  peers.size = size;
  peers.group = name;
  peers.control_bytes = IpcBackend::control_bytes(static_cast<std::size_t>(size));
  peers.has_heap = false;
  peers.timeout = options.timeout;
  peers.status = options.status;
  peers.pretended_host = options.pretended_host;
  std::unique_ptr<PeerMemory> memory = connect_peers(*store, peers, why_not);
  if (!memory) {
    return nullptr;
  }
  std::unique_ptr<IpcBackend> backend;
  const std::string made = outcome_of([&] {
    backend =
        std::make_unique<IpcBackend>(store, std::move(memory), rank, cuda_device, name, options);
  });
  if (!agree(*store, peers, "ipc.made", made, why_not)) {
    return nullptr;
  }
  const std::string met = outcome_of([&] { backend->meet_peers(); });
  if (!agree(*store, peers, "ipc.met", met, why_not)) {
    return nullptr;
  }
  backend->begin();
  return backend;
}

}  // namespace tessera::comm
