#include "tessera/comm/shm_backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/comm/peer_memory.h"
#include "tessera/comm/shared_counter.h"
#include "tessera/comm/staging.h"
#include "tessera/core/error.h"
#include "tessera/device/shared_heap.h"

namespace tessera::comm {
namespace {

// Of one of the two chunks that memory outside of the heap passes through: it stays in the cache.
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr std::size_t kNumChunks = 2;
constexpr std::size_t kMaxItems = 256;                 // of one round
constexpr std::uint64_t kChunked = ~std::uint64_t{0};  // instead of an offset

// What a rank brings to a round. Valid from `posted` until all ranks have read.
struct Posting {
  CallTag tag;
  std::uint32_t num_items = 0;
  std::uint32_t words_bytes = 0;
  std::array<std::uint64_t, kMaxItems> offsets{};  // in the rank's heap, or kChunked
  std::array<char, CallWords::kMaxBytes> words{};
};

// What a rank shows the others of its group. Its counters behind it, by rank: how many chunks of
// that rank it has read; then its chunks.
struct Control {
  SharedCounter posted;   // rounds
  SharedCounter read;     // rounds whose sources this rank needs no more
  SharedCounter chunked;  // chunks that it has filled
  std::atomic<std::uint32_t> is_aborted{0};
  std::uint32_t reason_bytes = 0;
  std::array<char, 1024> reason{};
  // Two: a rank may post for the next round while others still look at the last one's words.
  std::array<Posting, 2> postings;

  SharedCounter& consumed(std::size_t source) {
    return reinterpret_cast<SharedCounter*>(this + 1)[source];
  }
  std::byte* chunk(std::size_t size, std::uint32_t number) {
    return reinterpret_cast<std::byte*>(&consumed(size)) + number % kNumChunks * kChunkBytes;
  }
  static std::size_t bytes(std::size_t size) {
    return sizeof(Control) + size * sizeof(SharedCounter) + kNumChunks * kChunkBytes;
  }
};

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

struct Round {
  std::vector<Item> items;
  std::function<void()> finish;  // when all ranks have read; may be empty
};

struct Job {
  Call call;
  std::vector<Round> rounds;
  std::shared_ptr<device::Completion> completion = std::make_shared<device::Completion>();
};

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::shared_ptr<Store> store, std::unique_ptr<PeerMemory> peers, int rank,
             std::string name, ShmOptions options)
      : store_(std::move(store)),
        peers_(std::move(peers)),
        rank_(static_cast<std::size_t>(rank)),
        size_(peers_->sockets.size()),
        name_(std::move(name)),
        options_(std::move(options)),
        num_chunks_(size_),
        worker_([this] { work(); }) {}

  ~ShmBackend() override {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  std::string_view name() const override { return "shm"; }
  int rank() const override { return static_cast<int>(rank_); }
  int size() const override { return static_cast<int>(size_); }
  bool compares_tags() const override { return true; }
  bool reads_peers() const override { return true; }

  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return rank() == root ? bytes * (size_ - 1) : 0;
  }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    return gather(parts, true, call);
  }

  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte*, const Call& call) override {
    return gather(parts, wants[rank_] != 0, call);
  }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    Item item;
    item.source = static_cast<const std::byte*>(pieces.send);
    item.source_bytes = pieces.send_stride * (size_ - 1) + pieces.piece_bytes;
    item.stride = pieces.send_stride;
    item.bytes = pieces.piece_bytes;
    item.read = [this, pieces](std::size_t begin, std::size_t end,
                               std::span<const std::byte* const> from) {
      for_each_rank([&](std::size_t r) {
        auto* const to = static_cast<std::byte*>(pieces.receive) + r * pieces.receive_stride;
        std::memcpy(to + begin, from[r], end - begin);
      });
    };
    return start(call, one_round(std::move(item)));
  }

  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    Item item;
    item.source = rank() == root ? static_cast<const std::byte*>(data) : nullptr;
    item.source_bytes = rank() == root ? bytes : 0;
    item.bytes = bytes;
    item.root = root;
    if (rank() != root) {
      item.read = [data, root](std::size_t begin, std::size_t end,
                               std::span<const std::byte* const> from) {
        std::memcpy(static_cast<std::byte*>(data) + begin, from[static_cast<std::size_t>(root)],
                    end - begin);
      };
    }
    return start(call, one_round(std::move(item)));
  }

  Pending start_reduce_scatter(const void* input, void* output, std::size_t shard_numel,
                               DType dtype, DType output_dtype, const Call& call) override {
    const std::size_t bytes = shard_numel * bytes_of(dtype);
    Item item = sum_item(input, bytes * size_, bytes);
    item.read = [=](std::size_t begin, std::size_t end, std::span<const std::byte* const> from) {
      auto* const to =
          static_cast<std::byte*>(output) + begin / bytes_of(dtype) * bytes_of(output_dtype);
      reduce_in_rank_order(from, dtype, (end - begin) / bytes_of(dtype), to, output_dtype,
                           Reduction::kSum);
    };
    return start(call, one_round(std::move(item)));
  }

  // Small: every rank reads and adds all of it, beside its own memory. Else each rank adds its
  // piece in place, where no other rank reads, and reads the other sums.
  Pending start_all_reduce(void* data, std::size_t numel, DType dtype, Reduction reduction,
                           const Call& call) override {
    auto* const own = static_cast<std::byte*>(data);
    const std::size_t element = bytes_of(dtype);
    const std::size_t bytes = numel * element;
    std::vector<Round> rounds;
    if (bytes * size_ <= kSmallAllReduceBytes) {
      const auto sum = std::make_shared<std::vector<std::byte>>(bytes);
      Item item = sum_item(data, bytes, 0);
      item.bytes = bytes;
      item.read = [=](std::size_t begin, std::size_t end, std::span<const std::byte* const> from) {
        reduce_in_rank_order(from, dtype, (end - begin) / element, sum->data() + begin, dtype,
                             reduction);
      };
      rounds = one_round(std::move(item));
      rounds.front().finish = [sum, own] { std::memcpy(own, sum->data(), sum->size()); };
      return start(call, std::move(rounds));
    }
    const std::size_t piece = (numel + size_ - 1) / size_ * element;  // the last ones are shorter
    const auto clipped = [bytes, piece](std::size_t rank, std::size_t end) {
      return std::min(end, bytes - std::min(bytes, rank * piece));
    };
    Item sums = sum_item(data, bytes, piece);
    sums.read = [=, rank = rank_](std::size_t begin, std::size_t end,
                                  std::span<const std::byte* const> from) {
      if (const std::size_t last = clipped(rank, end); begin < last) {
        reduce_in_rank_order(from, dtype, (last - begin) / element, own + rank * piece + begin,
                             dtype, reduction);
      }
    };
    Item results;
    results.source = own + std::min(bytes, rank_ * piece);
    results.source_bytes = clipped(rank_, piece);
    results.bytes = piece;
    results.read = [=, this](std::size_t begin, std::size_t end,
                             std::span<const std::byte* const> from) {
      for_each_rank([&](std::size_t r) {
        if (const std::size_t last = clipped(r, end); r != rank_ && begin < last) {
          std::memcpy(own + r * piece + begin, from[r], last - begin);
        }
      });
    };
    rounds = one_round(std::move(sums));
    rounds.push_back(std::move(one_round(std::move(results)).front()));
    return start(call, std::move(rounds));
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    if (ranks.size() == 1) {
      return make_solo_backend();
    }
    const auto own = std::find(ranks.begin(), ranks.end(), rank());
    TESSERA_INVARIANT(own != ranks.end(), "split '", name, "' without its own rank ", rank_);
    std::string why_not;
    auto backend = make_shm_backend(store_, static_cast<int>(own - ranks.begin()),
                                    static_cast<int>(ranks.size()), name, options_, why_not);
    TESSERA_CHECK(backend != nullptr, CommError, "group '", name,
                  "': its ranks share memory in group '", name_, "', but not here: ", why_not);
    return backend;
  }

  void abort(const std::string& reason) override {
    Control& own = control(rank_);
    std::unique_lock lock(mutex_);
    if (!is_aborted_) {
      own.reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), own.reason.size()));
      std::memcpy(own.reason.data(), reason.data(), own.reason_bytes);
      own.is_aborted.store(1);
      is_aborted_ = true;
    }
    // Nobody here touches the memory of a call once its owner has been told.
    changed_.wait(lock, [this] { return !is_working_; });
  }

 private:
  Control& control(std::size_t rank) const {
    return *reinterpret_cast<Control*>(peers_->controls[rank]->data());
  }
  const Posting& posting(std::size_t rank) const { return control(rank).postings.at(round_ % 2); }

  // Starts with the next one, so that not all read from the same rank at once.
  template <typename Body>
  void for_each_rank(const Body& body) const {
    for (std::size_t i = 1; i <= size_; ++i) {
      body((rank_ + i) % size_);
    }
  }

  static std::vector<Round> one_round(Item item) {
    std::vector<Round> rounds(1);
    rounds.front().items.push_back(std::move(item));
    return rounds;
  }

  static Item sum_item(const void* input, std::size_t bytes, std::size_t piece_bytes) {
    Item item;
    item.source = static_cast<const std::byte*>(input);
    item.source_bytes = bytes;
    item.stride = piece_bytes;
    item.bytes = piece_bytes;
    return item;
  }

  Pending gather(std::span<const GatherBytes> parts, bool receives, const Call& call) {
    std::vector<Round> rounds(1);
    for (const GatherBytes& part : parts) {
      if (rounds.back().items.size() == kMaxItems) {
        rounds.emplace_back();
      }
      Item item;
      item.source = static_cast<const std::byte*>(part.shard);
      item.source_bytes = part.shard_bytes;
      item.bytes = part.shard_bytes;
      if (receives) {
        item.read = [this, part](std::size_t begin, std::size_t end,
                                 std::span<const std::byte* const> from) {
          for_each_rank([&](std::size_t r) {
            auto* const to = static_cast<std::byte*>(part.full) + r * part.shard_bytes + begin;
            if (to != from[r]) {  // in place: the piece already lies in its slot
              std::memcpy(to, from[r], end - begin);
            }
          });
        };
      }
      rounds.back().items.push_back(std::move(item));
    }
    return start(call, std::move(rounds));
  }

  Pending start(const Call& call, std::vector<Round> rounds) {
    Job job;
    job.call = call;
    job.rounds = std::move(rounds);
    Pending pending(job.completion);
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
    return pending;
  }

  void work() {
    std::exception_ptr failure;  // of the first job that failed, and so of all behind it
    while (true) {
      Job job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
        if (jobs_.empty()) {
          return;
        }
        job = std::move(jobs_.front());
        jobs_.pop_front();
        is_working_ = true;
      }
      try {
        if (!failure) {
          run(job);
        }
      } catch (...) {
        failure = std::current_exception();
      }
      job.rounds.clear();
      job.call.keep_alive.reset();
      {
        const std::lock_guard lock(mutex_);
        is_working_ = false;
      }
      changed_.notify_all();
      if (failure) {
        job.completion->fail(failure);
      } else {
        job.completion->succeed();
      }
    }
  }

  void run(const Job& job) {
    for (const Round& round : job.rounds) {
      const bool is_first = &round == &job.rounds.front();
      enter(ShmPhase::kPosting);
      post(job.call, round, is_first);
      enter(ShmPhase::kPosted);
      for_each_rank([this](std::size_t r) { await(control(r).posted, round_, r); });
      if (is_first) {
        compare_tags(job.call);
        if (job.call.met) {
          *job.call.met = true;
        }
      }
      enter(ShmPhase::kReading);
      for (std::size_t i = 0; i < round.items.size(); ++i) {
        run(round.items[i], i);
      }
      // What was read from a rank that has failed meanwhile may be anything.
      for_each_rank([this](std::size_t r) { check_not_aborted(r); });
      enter(ShmPhase::kRead);
      control(rank_).read.advance(round_);
      for_each_rank([this](std::size_t r) { await(control(r).read, round_, r); });
      if (round.finish) {
        round.finish();
      }
    }
  }

  void post(const Call& call, const Round& round, bool is_first) {
    Posting& own = control(rank_).postings.at(++round_ % 2);
    own.tag = call.tag;
    own.words_bytes = 0;
    if (is_first && call.words) {
      const std::string& words = call.words->bytes();
      own.words_bytes = static_cast<std::uint32_t>(std::min(words.size(), own.words.size()));
      std::memcpy(own.words.data(), words.data(), own.words_bytes);
    }
    own.num_items = static_cast<std::uint32_t>(round.items.size());
    for (std::size_t i = 0; i < round.items.size(); ++i) {
      const Item& item = round.items[i];
      const auto offset = peers_->own_heap->offset_of(item.source, item.source_bytes);
      own.offsets.at(i) = offset ? *offset : kChunked;
    }
    control(rank_).posted.advance(round_);
  }

  void compare_tags(const Call& call) const {
    std::vector<CallTag> tags;
    for (std::size_t r = 0; r < size_; ++r) {
      tags.push_back(posting(r).tag);
    }
    if (tags_agree(tags)) {
      return;
    }
    std::vector<CallWords> words;
    for (std::size_t r = 0; r < size_; ++r) {
      words.push_back(
          CallWords::from_bytes(std::string(posting(r).words.data(), posting(r).words_bytes)));
    }
    throw MismatchError(*find_mismatch(tags, words, call.world_ranks));
  }

  // All ranks see the same postings, so all take the same chunks, in lockstep.
  void run(const Item& item, std::size_t index) {
    const auto is_source = [&](std::size_t r) {
      return item.root < 0 || r == static_cast<std::size_t>(item.root);
    };
    const auto is_chunked = [&](std::size_t r) {
      return is_source(r) && posting(r).offsets.at(index) == kChunked;
    };
    bool any_is_chunked = false;
    for (std::size_t r = 0; r < size_; ++r) {
      any_is_chunked = any_is_chunked || is_chunked(r);
    }
    // Of each receiver, if they read different bytes; whole cache lines, and so whole elements.
    const std::size_t slot = item.stride > 0 ? kChunkBytes / size_ / 64 * 64 : kChunkBytes;
    const std::size_t step = any_is_chunked ? slot : item.bytes;
    std::vector<const std::byte*> from(size_);
    for (std::size_t begin = 0; begin < item.bytes; begin += step) {
      const std::size_t end = std::min(item.bytes, begin + step);
      if (is_chunked(rank_)) {
        fill_chunk(item, begin, end, slot);
      }
      for (std::size_t r = 0; r < size_; ++r) {
        from[r] = nullptr;
        if (!is_source(r)) {
          continue;
        }
        const std::size_t at = rank_ * item.stride + begin;
        if (r == rank_) {
          from[r] = item.source + std::min(at, item.source_bytes);
        } else if (is_chunked(r)) {
          await(control(r).chunked, ++num_chunks_[r], r);
          from[r] = control(r).chunk(size_, num_chunks_[r]) + (item.stride > 0 ? rank_ * slot : 0);
        } else {
          from[r] = peers_->heaps[r]->data() + posting(r).offsets.at(index) + at;
        }
      }
      if (item.read) {
        item.read(begin, end, from);
      }
      for (std::size_t r = 0; r < size_; ++r) {
        if (r != rank_ && is_chunked(r)) {
          control(rank_).consumed(r).advance(num_chunks_[r]);
        }
      }
    }
  }

  void fill_chunk(const Item& item, std::size_t begin, std::size_t end, std::size_t slot) {
    const std::uint32_t number = ++num_chunks_[rank_];
    for_each_rank([&](std::size_t r) {
      if (r != rank_) {  // has read what lay there before
        await(control(r).consumed(rank_), number - static_cast<std::uint32_t>(kNumChunks), r);
      }
    });
    std::byte* const chunk = control(rank_).chunk(size_, number);
    for (std::size_t r = 0; r < (item.stride > 0 ? size_ : 1); ++r) {
      const std::size_t first = std::min(item.source_bytes, r * item.stride + begin);
      const std::size_t last = std::min(item.source_bytes, r * item.stride + end);
      if (first < last) {
        std::memcpy(chunk + r * slot, item.source + first, last - first);
      }
    }
    control(rank_).chunked.advance(number);
  }

  void await(SharedCounter& counter, std::uint32_t value, std::size_t rank) const {
    counter.wait(value, [&] {
      TESSERA_CHECK(!is_aborted_, PeerError, "the group was aborted");
      check_not_aborted(rank);
      // What it said before its end counts.
      TESSERA_CHECK(!peers_->has_ended(static_cast<int>(rank)) || counter.has_reached(value),
                    PeerError, "rank ", rank, " of group '", name_, "' has ended");
    });
  }

  void check_not_aborted(std::size_t rank) const {
    const Control& other = control(rank);
    if (other.is_aborted.load() != 0) {
      throw PeerError(detail::concat("rank ", rank, " of group '", name_, "' aborted: ",
                                     std::string(other.reason.data(), other.reason_bytes)));
    }
  }

  void enter(ShmPhase phase) const {
    if (options_.on_phase) {
      options_.on_phase(phase);
    }
  }

  const std::shared_ptr<Store> store_;
  const std::unique_ptr<PeerMemory> peers_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::string name_;
  const ShmOptions options_;
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

}  // namespace

std::unique_ptr<Backend> make_shm_backend(std::shared_ptr<Store> store, int rank, int size,
                                          const std::string& name, const ShmOptions& options,
                                          std::string& why_not) {
  PeerOptions peers;
  peers.rank = rank;
  peers.size = size;
  peers.group = name;
  peers.control_bytes = Control::bytes(static_cast<std::size_t>(size));
  peers.timeout = options.timeout;
  peers.status = options.status;
  std::unique_ptr<PeerMemory> memory = connect_peers(*store, peers, why_not);
  return memory ? std::make_unique<ShmBackend>(std::move(store), std::move(memory), rank, name,
                                               options)
                : nullptr;
}

}  // namespace tessera::comm
