// Processes of one host that read each other's memory: what shm (host memory) and ipc (memory of
// GPUs) have in common. Who takes part in what is decided here, on the CPU; what moves bytes is
// behind the data plane at the end of this file.
//
// A call is one or more rounds. In a round each rank posts where its sources lie, waits until all
// have, reads what it needs from the others' memory straight to where it belongs (a copy, or a sum
// in rank order), says that it has read, and waits until all have: only then is a source free. So
// an all-gather copies each byte once, and a reduce-scatter adds the peers' pieces where they lie.
//
// Memory that peers cannot map passes through a shared region of each rank, in chunks: two, so that
// one is filled while the other is read.
//
// A posting carries the call's tag and words: they are compared in the first round of a call,
// before anything is read. A few bytes of the host travel in postings themselves: such rounds end
// when they are read, and the data plane has no part in them.
//
// Order: rounds are numbered, and a rank takes part in them in the order of its calls. Two postings
// are enough: who posts for a round has seen all postings of the round before, so all ranks are
// through with the one before that.
//
// Failures: a rank that aborts says so in its control block, one that ends closes its connection;
// whoever waits for it sees that within SharedCounter::kLookInterval. What a rank has posted stays
// readable after its end, so a call that needs nothing more from it succeeds.
//
// Threads: a worker of its own takes part in the rounds; the caller never waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/comm/shared_counter.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"
#include "tessera/device/handed_over.h"

namespace tessera::comm {

// Where a rank is in a round.
enum class RoundPhase : std::uint8_t { kPosting, kPosted, kReading, kRead };

struct PeerBackendOptions {
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};  // for ranks that do not join
  std::shared_ptr<StatusStore> status;                          // may be null
  // Called by the worker when it comes to a phase, and by those of groups that are split off: for
  // tests that hold a rank up there, or end it.
  std::function<void(RoundPhase)> on_phase;
  int pretended_host = 0;  // PeerOptions::pretended_host
};

class PeerBackend : public Backend {
 public:
  int rank() const override { return static_cast<int>(rank_); }
  int size() const override { return static_cast<int>(size_); }
  bool compares_tags() const override { return true; }
  bool reads_peers() const override { return true; }
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return rank() == root ? bytes * (size_ - 1) : 0;
  }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override;
  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte* copies, const Call& call) override;
  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override;
  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override;
  Pending start_reduce_scatter(const void* input, void* output, std::size_t shard_numel,
                               DType dtype, DType output_dtype, const Call& call) override;
  Pending start_all_reduce(void* data, std::size_t numel, DType dtype, Reduction reduction,
                           const Call& call) override;
  Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) override;
  void abort(const std::string& reason) override;

 protected:
  static constexpr std::size_t kNumChunks = 2;

  PeerBackend(std::shared_ptr<Store> store, std::unique_ptr<PeerMemory> peers, int rank,
              std::string name, PeerBackendOptions options);
  // What the control block of a rank takes, with `plane_bytes` for the data plane.
  static std::size_t control_bytes(std::size_t plane_bytes);
  // That of the data plane: zeroed before its first use, and aligned to a cache line.
  std::byte* plane(std::size_t rank) const;

  // The worker uses the data plane: an implementation starts it when it is complete, and joins it
  // before it goes.
  void start_worker();
  void join_worker();

  std::size_t num_ranks() const { return size_; }
  std::size_t own_rank() const { return rank_; }
  const std::string& group_name() const { return name_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const PeerBackendOptions& options() const { return options_; }
  const PeerMemory& peers() const { return *peers_; }
  bool is_aborted() const { return is_aborted_; }

  // Starts with the next one, so that not all read from the same rank at once.
  template <typename Body>
  void for_each_rank(const Body& body) const {
    for (std::size_t i = 1; i <= size_; ++i) {
      body((rank_ + i) % size_);
    }
  }
  template <typename Body>
  void for_each_peer(const Body& body) const {
    for_each_rank([&](std::size_t r) {
      if (r != rank_) {
        body(r);
      }
    });
  }

  // Waits on the CPU for what `rank` counts.
  void await(SharedCounter& counter, std::uint32_t value, std::size_t rank);
  // What there is to say of a rank that aborted or ended; null: it takes part.
  std::exception_ptr abort_of(std::size_t rank) const;
  std::exception_ptr end_of(std::size_t rank) const;
  // Tells the others that this rank takes part no more. The first reason counts.
  void post_abort(const std::string& reason);

  // --- The data plane. All but the first are called by the worker. On a stream these enqueue.

  // Where a source lies that peers read in place.
  struct Place {
    std::uint64_t region = 0;
    std::uint64_t offset = 0;
  };

  // What the call has to wait for before its sources are read; by the caller's thread.
  virtual Pending record_input(const Call& /*call*/) { return {}; }
  virtual std::optional<Place> place_of(const void* data, std::size_t bytes) = 0;
  // In the memory of another rank, as this process maps it.
  virtual const std::byte* address_of(std::size_t rank, const Place& place) = 0;
  virtual std::byte* chunk(std::size_t rank, std::uint32_t number) = 0;
  virtual std::size_t chunk_bytes() const = 0;
  // For a small all-reduce; until the end of the call.
  virtual std::byte* scratch(std::size_t bytes) = 0;

  // Ahead of what a rank posts.
  virtual void before_posting() {}
  // All have posted: behind this, all sources of the round may be read.
  virtual void open_round(std::uint32_t /*round*/, const Call& /*call*/, const Pending& /*input*/) {
  }
  // Says that this rank has read its sources; behind this, all have.
  virtual void close_round(std::uint32_t round) = 0;
  // Chunks are numbered by their owner.
  // `await_emptied(n)`: chunk n may be overwritten. `tell_filled(n)`: peers may read it.
  virtual void await_emptied(std::uint32_t number) = 0;
  virtual void tell_filled(std::uint32_t number) = 0;
  virtual void await_filled(std::size_t rank, std::uint32_t number) = 0;
  virtual void tell_emptied(std::size_t rank, std::uint32_t number) = 0;

  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  // Where the rest is done that callers bring (PieceBytes::use); null: on the worker's thread.
  virtual device::Stream* use_stream() { return nullptr; }
  virtual void reduce(std::span<const std::byte* const> parts, DType dtype, std::size_t numel,
                      void* out, DType out_dtype, Reduction reduction) = 0;

  // The call has been taken part in: tells its owner when it ends. `failure`: null, or why it ended
  // early; its memory must not be touched any more when the owner hears of that.
  virtual void finish_call(const Call& call, const std::shared_ptr<device::HandedOver>& owner,
                           std::exception_ptr failure) = 0;
  // Calls are under way that check_peers() has to be called for, every
  // SharedCounter::kLookInterval.
  virtual bool is_under_way() { return false; }
  // Returns the failure of a peer that calls under way still need, null if there is none: so all
  // later calls fail. No lock is held.
  virtual std::exception_ptr check_peers() { return nullptr; }
  // The group was aborted: by the thread that does it, whatever the worker is held up by.
  virtual void end_what_is_under_way(const std::string& /*reason*/) {}

 private:
  struct Posting;
  struct Control;
  // One piece of memory that ranks read from each other in a round.
  struct Item {
    const std::byte* source = nullptr;  // this rank's; null: it gives nothing
    std::size_t source_bytes = 0;
    std::size_t stride = 0;  // receiver r reads from r * stride on; 0: all read the same
    std::size_t bytes = 0;   // at most, for each receiver; the same on all ranks
    int root = -1;           // whose memory is read; -1: that of all
    // Reads bytes [begin, end) of what each rank has for this one; null: it reads nothing.
    std::function<void(std::size_t begin, std::size_t end, std::span<const std::byte* const> from)>
        read;
  };
  // Bytes [begin, end) of what ranks post for each other: of pieces in rank order.
  struct HostPart {
    std::byte* all = nullptr;
    std::size_t piece_bytes = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  struct Round {
    std::vector<Item> items;
    std::function<void()> finish;  // when all ranks have read; may be empty
    std::optional<HostPart> host;  // in place of items
  };
  struct Job {
    Call call;
    Pending input;
    std::vector<Round> rounds;
    std::shared_ptr<device::HandedOver> owner = std::make_shared<device::HandedOver>();
  };

  Control& control(std::size_t rank) const;
  const Posting& posting(std::size_t rank) const;
  static std::vector<Round> one_round(Item item);
  static Item sum_item(const void* input, std::size_t bytes, std::size_t piece_bytes);
  Pending gather(std::span<const GatherBytes> parts, bool receives, const Call& call);
  Pending start(const Call& call, std::vector<Round> rounds);

  void work();
  void run(const Job& job);
  void run(const Item& item, std::size_t index);
  void read(const HostPart& part);
  void post(const Call& call, const Round& round, bool is_first);
  void compare_tags(const Call& call) const;
  void fill_chunk(const Item& item, std::size_t begin, std::size_t end, std::size_t slot);
  void enter(RoundPhase phase) const {
    if (options_.on_phase) {
      options_.on_phase(phase);
    }
  }

  const std::shared_ptr<Store> store_;
  const std::unique_ptr<PeerMemory> peers_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::string name_;
  const PeerBackendOptions options_;
  std::atomic<bool> is_aborted_{false};

  // The worker's own.
  std::uint32_t round_ = 0;
  std::vector<std::uint32_t> num_chunks_;  // by source: filled, or read, so far

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_working_ = false;
  bool is_closing_ = false;

  std::thread worker_;
};

}  // namespace tessera::comm
