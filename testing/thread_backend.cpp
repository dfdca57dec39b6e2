#include "testing/thread_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "tessera/core/error.h"
#include "testing/hash_store.h"

namespace tessera::comm {
namespace {

// What one rank brings to a call: where the others may read.
struct Posting {
  CallTag tag;
  std::shared_ptr<const CallWords> words;
  std::vector<const std::byte*> sources;
  std::shared_ptr<const void> keep_alive;
};

// One call of all ranks. Postings are immutable once all have arrived.
struct Exchange {
  explicit Exchange(int size) : postings(static_cast<std::size_t>(size)) {}
  std::vector<Posting> postings;
  int num_arrived = 0;
  int num_copied = 0;   // ranks that are done with the others' memory
  int num_copying = 0;  // ranks that are reading it right now
  std::string failure;  // why it will never complete; empty: it may
};

// A few bytes of each rank beside the calls: of tags, or of words. Each rank brings its array with
// its own element in place; the last to come fills them all.
struct SideExchange {
  struct Guest {
    std::byte* all = nullptr;
    std::shared_ptr<const void> keep_alive;
    std::shared_ptr<device::Completion> filled;
  };
  std::vector<Guest> guests;  // by rank
  int num_arrived = 0;
};

// What the ranks of one group share. The n-th call of each rank belongs to the n-th exchange.
struct Hub {
  Hub(std::string group, std::vector<int> ranks)
      : name(std::move(group)), world_ranks(std::move(ranks)) {}
  int size() const { return static_cast<int>(world_ranks.size()); }

  const std::string name;
  const std::vector<int> world_ranks;
  // Guarded by mutex.
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, std::shared_ptr<Exchange>> exchanges;
  std::map<std::uint64_t, SideExchange> tags;
  std::map<std::uint64_t, SideExchange> words;
  std::map<std::uint64_t, SideExchange> host;
};

constexpr int kNever = -1;  // as many ranks never arrive

using CopyFunction = std::function<void(const std::vector<Posting>&)>;

struct Job {
  std::uint64_t index = 0;  // from 1
  Posting posting;
  CopyFunction copy;
  std::shared_ptr<device::Completion> completion;
  std::shared_ptr<std::atomic<bool>> met;  // may be null
};

}  // namespace

struct ThreadWorld::Shared {
  explicit Shared(const ThreadWorldOptions& world) : options(world) {}

  std::shared_ptr<Hub> hub(const std::string& name, std::vector<int> world_ranks) {
    const std::lock_guard lock(mutex);
    std::shared_ptr<Hub>& found = hubs[name];
    if (!found) {
      found = std::make_shared<Hub>(name, std::move(world_ranks));
    }
    return found;
  }

  const ThreadWorldOptions options;
  const std::shared_ptr<StatusStore> status =
      std::make_shared<StatusStore>(std::make_unique<HashStore>(), options.num_ranks);
  // Guarded by mutex.
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Hub>> hubs;
};

namespace {

// What a stream would do with calls that differ so: everything else is not the network's business.
bool may_meet(const CallTag& a, const CallTag& b) {
  return a.op == b.op && a.dtype == b.dtype && a.root == b.root && a.num_tensors == b.num_tensors &&
         a.total_bytes == b.total_bytes && a.shape_hash == b.shape_hash;
}

// One rank of a group. Work of streams may outlive its backend.
class ThreadRank : public std::enable_shared_from_this<ThreadRank> {
 public:
  ThreadRank(std::shared_ptr<ThreadWorld::Shared> world, std::shared_ptr<Hub> hub, int rank,
             std::optional<ThreadFault> fault)
      : world_(std::move(world)),
        hub_(std::move(hub)),
        rank_(rank),
        fault_(fault),
        random_(world_->options.seed * 7919 + static_cast<std::uint64_t>(world_rank())) {}

  int rank() const { return rank_; }
  int size() const { return hub_->size(); }
  int world_rank() const { return hub_->world_ranks[static_cast<std::size_t>(rank_)]; }
  bool on_streams() const { return world_->options.on_streams; }
  const std::shared_ptr<ThreadWorld::Shared>& world() const { return world_; }
  const std::shared_ptr<Hub>& hub() const { return hub_; }

  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) {
    Pending exchanged = exchange(hub_->tags, num_tags_++, tags->data(), sizeof(CallTag), tags);
    const ThreadWorldOptions& options = world_->options;
    return hub_->name.find(options.late_group) == std::string::npos
               ? exchanged
               : Pending::all({exchanged, options.tags_arrive_after});
  }
  Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words) {
    return exchange(hub_->words, 0, words->data(), sizeof(WordsSlot), words);
  }

  Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) {
    return exchange(hub_->host, num_host_gathers_++, all, piece_bytes, call.keep_alive);
  }

  Pending start(const Call& call, std::vector<const std::byte*> sources, CopyFunction copy) {
    Job job;
    job.posting = Posting{call.tag, call.words, std::move(sources), call.keep_alive};
    job.copy = std::move(copy);
    job.met = on_streams() ? nullptr : call.met;  // whoever compares the tags sets it
    if (on_streams()) {
      {
        const std::lock_guard lock(hub_->mutex);
        job.index = ++num_started_;
      }
      if (call.stream == nullptr) {
        execute(job);
        return {};
      }
      return call.stream->enqueue(
          [self = shared_from_this(), job]() mutable { self->execute(job); });
    }
    auto completion = std::make_shared<device::Completion>();
    {
      const std::lock_guard lock(hub_->mutex);
      job.index = ++num_started_;
      job.completion = completion;
      jobs_.push_back(std::move(job));
    }
    hub_->changed.notify_all();
    return Pending(completion);
  }

  void work() {
    while (true) {
      Job job;
      {
        std::unique_lock lock(hub_->mutex);
        hub_->changed.wait(lock, [this] { return closing_ || !jobs_.empty(); });
        if (jobs_.empty()) {
          return;
        }
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      try {
        execute(job);
        job.completion->succeed();
      } catch (...) {
        job.completion->fail(std::current_exception());
      }
    }
  }

  void close() {
    {
      const std::lock_guard lock(hub_->mutex);
      closing_ = true;
    }
    hub_->changed.notify_all();
  }

  void abort(const std::string& reason) {
    std::unique_lock lock(hub_->mutex);
    if (aborted_.empty()) {
      aborted_ = reason;
    }
    // No peer may go on reading this rank's memory once its owner has been told of the failure.
    for (const auto& [index, exchange] : hub_->exchanges) {
      if (exchange->failure.empty()) {
        exchange->failure = detail::concat("rank ", world_rank(), " aborted: ", reason);
      }
    }
    hub_->changed.notify_all();
    hub_->changed.wait(lock, [&] {
      return std::all_of(hub_->exchanges.begin(), hub_->exchanges.end(),
                         [](const auto& entry) { return entry.second->num_copying == 0; });
    });
  }

 private:
  Pending exchange(std::map<std::uint64_t, SideExchange>& where, std::uint64_t index, void* all,
                   std::size_t bytes, std::shared_ptr<const void> keep_alive) {
    auto filled = std::make_shared<device::Completion>();
    std::vector<SideExchange::Guest> guests;
    {
      const std::lock_guard lock(hub_->mutex);
      SideExchange& entry = where[index];
      entry.guests.resize(static_cast<std::size_t>(size()));
      entry.guests[static_cast<std::size_t>(rank_)] = {static_cast<std::byte*>(all),
                                                       std::move(keep_alive), filled};
      if (++entry.num_arrived < size()) {
        return Pending(filled);
      }
      guests = std::move(entry.guests);
      where.erase(index);
    }
    for (const SideExchange::Guest& to : guests) {
      for (std::size_t from = 0; from < guests.size(); ++from) {
        if (to.all != guests[from].all) {
          std::memcpy(to.all + from * bytes, guests[from].all + from * bytes, bytes);
        }
      }
    }
    for (const SideExchange::Guest& guest : guests) {
      guest.filled->succeed();
    }
    return Pending(filled);
  }

  void execute(Job& job) {
    if (fault_ && job.index >= fault_->call) {
      if (fault_->kind == ThreadFault::Kind::kThrow) {
        throw CommError(
            detail::concat("injected fault in call ", job.index, " of rank ", world_rank()));
      }
      std::unique_lock lock(hub_->mutex);
      hub_->changed.wait(lock, [this] { return closing_ || !aborted_.empty(); });
      throw PeerError(aborted_.empty() ? "the group was closed" : aborted_);
    }
    delay();
    std::unique_lock lock(hub_->mutex);
    throw_if_aborted();
    std::shared_ptr<Exchange>& entry = hub_->exchanges[job.index];
    if (!entry) {
      entry = std::make_shared<Exchange>(size());
    }
    const std::shared_ptr<Exchange> exchange = entry;
    exchange->postings[static_cast<std::size_t>(rank_)] = std::move(job.posting);
    ++exchange->num_arrived;
    hub_->changed.notify_all();
    await(lock, *exchange, exchange->num_arrived);
    if (!on_streams()) {
      compare_tags(*exchange);
    } else if (!all_meet(*exchange)) {
      // As a device would: it stands still until somebody ends it.
      await(lock, *exchange, kNever);
    }
    // All have arrived, but one has aborted since: its memory may be gone (see abort()).
    if (!exchange->failure.empty()) {
      throw PeerError(exchange->failure);
    }
    if (job.met) {
      *job.met = true;
    }

    ++exchange->num_copying;
    lock.unlock();
    delay();
    job.copy(exchange->postings);
    delay();
    lock.lock();
    --exchange->num_copying;
    ++exchange->num_copied;
    hub_->changed.notify_all();
    // Only now is this rank's own memory free: everybody has read it.
    await(lock, *exchange, exchange->num_copied);
    hub_->exchanges.erase(job.index);
    // Others may hold the exchange a little longer; what this call kept goes before it ends.
    const auto kept = std::move(exchange->postings[static_cast<std::size_t>(rank_)].keep_alive);
    lock.unlock();
  }

  void await(std::unique_lock<std::mutex>& lock, const Exchange& exchange, const int& count) {
    hub_->changed.wait(lock, [&] {
      return count == size() || !exchange.failure.empty() || !aborted_.empty() || closing_;
    });
    if (count == size()) {
      return;
    }
    throw_if_aborted();
    throw PeerError(exchange.failure.empty() ? "the group was closed" : exchange.failure);
  }

  static bool all_meet(const Exchange& exchange) {
    const CallTag& first = exchange.postings.front().tag;
    return std::all_of(exchange.postings.begin(), exchange.postings.end(),
                       [&](const Posting& posting) { return may_meet(first, posting.tag); });
  }

  void throw_if_aborted() const {
    if (!aborted_.empty()) {
      throw PeerError(aborted_);
    }
  }

  void compare_tags(const Exchange& exchange) const {
    std::vector<CallTag> tags;
    for (const Posting& posting : exchange.postings) {
      tags.push_back(posting.tag);
    }
    if (tags_agree(tags)) {
      return;
    }
    std::vector<CallWords> words;
    for (const Posting& posting : exchange.postings) {
      words.push_back(posting.words ? *posting.words : CallWords());
    }
    throw MismatchError(*find_mismatch(tags, words, hub_->world_ranks));
  }

  void delay() {
    const std::uint32_t limit_us = world_->options.max_delay_us;
    if (limit_us == 0) {
      return;
    }
    std::uint64_t drawn = 0;
    {
      const std::lock_guard lock(hub_->mutex);
      drawn = random_();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(drawn % limit_us));
  }

  const std::shared_ptr<ThreadWorld::Shared> world_;
  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const std::optional<ThreadFault> fault_;

  // Guarded by hub_->mutex.
  std::mt19937_64 random_;
  std::deque<Job> jobs_;
  std::uint64_t num_started_ = 0;
  bool closing_ = false;
  std::string aborted_;

  std::uint64_t num_tags_ = 0;          // of the thread that starts calls
  std::uint64_t num_host_gathers_ = 0;  // of the thread that compares tags
};

class ThreadBackend final : public Backend {
 public:
  explicit ThreadBackend(std::shared_ptr<ThreadRank> rank) : rank_(std::move(rank)) {
    if (!rank_->on_streams()) {
      worker_ = std::thread([rank = rank_] { rank->work(); });
    }
  }

  ~ThreadBackend() override {
    rank_->close();
    if (worker_.joinable()) {
      worker_.join();
    }
  }

  std::string_view name() const override { return "threads"; }
  int rank() const override { return rank_->rank(); }
  int size() const override { return rank_->size(); }
  bool compares_tags() const override { return !rank_->on_streams(); }
  bool stream_ordered() const override { return rank_->on_streams(); }
  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) override {
    return rank_->start_tags(tags);
  }
  Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words) override {
    return rank_->start_words(words);
  }
  Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) override {
    return rank_->start_host_gather(all, piece_bytes, call);
  }

  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return rank() == root ? bytes * static_cast<std::size_t>(size() - 1) : 0;
  }

  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    return gather(parts, true, call);
  }

  Pending start_gather_to(std::span<const GatherBytes> parts, std::span<const std::uint8_t> wants,
                          std::byte*, const Call& call) override {
    return gather(parts, wants[static_cast<std::size_t>(rank())] != 0, call);
  }

  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    return rank_->start(
        call, {static_cast<const std::byte*>(pieces.send)},
        [pieces, rank = static_cast<std::size_t>(rank())](const std::vector<Posting>& postings) {
          auto* receive = static_cast<std::byte*>(pieces.receive);
          for (std::size_t r = 0; r < postings.size(); ++r) {
            std::memcpy(receive + r * pieces.receive_stride,
                        postings[r].sources[0] + rank * pieces.send_stride, pieces.piece_bytes);
          }
        });
  }

  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    const bool receives = root != rank();
    return rank_->start(call, {static_cast<const std::byte*>(data)},
                        [data, bytes, root, receives](const std::vector<Posting>& postings) {
                          if (receives) {
                            std::memcpy(data, postings[static_cast<std::size_t>(root)].sources[0],
                                        bytes);
                          }
                        });
  }

  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    if (ranks.size() == 1) {
      return make_solo_backend();
    }
    std::vector<int> world_ranks;
    for (const int member : ranks) {
      world_ranks.push_back(rank_->hub()->world_ranks[static_cast<std::size_t>(member)]);
    }
    const auto mine = std::find(ranks.begin(), ranks.end(), rank());
    TESSERA_INVARIANT(mine != ranks.end(), "split '", name, "' without its own rank ", rank());
    return std::make_unique<ThreadBackend>(std::make_shared<ThreadRank>(
        rank_->world(), rank_->world()->hub(name, std::move(world_ranks)),
        static_cast<int>(mine - ranks.begin()), std::nullopt));
  }

  void abort(const std::string& reason) override { rank_->abort(reason); }

 private:
  Pending gather(std::span<const GatherBytes> parts, bool receives, const Call& call) {
    std::vector<GatherBytes> mine(parts.begin(), parts.end());
    std::vector<const std::byte*> sources;
    for (const GatherBytes& part : mine) {
      sources.push_back(static_cast<const std::byte*>(part.shard));
    }
    return rank_->start(
        call, std::move(sources), [mine, receives](const std::vector<Posting>& postings) {
          for (std::size_t i = 0; receives && i < mine.size(); ++i) {
            auto* slot = static_cast<std::byte*>(mine[i].full);
            for (const Posting& posting : postings) {
              if (slot != posting.sources[i]) {  // in place: the piece already lies in its slot
                std::memcpy(slot, posting.sources[i], mine[i].shard_bytes);
              }
              slot += mine[i].shard_bytes;
            }
          }
        });
  }

  const std::shared_ptr<ThreadRank> rank_;
  std::thread worker_;  // none where calls are work of streams
};

}  // namespace

ThreadWorld::ThreadWorld(const ThreadWorldOptions& options) {
  TESSERA_CHECK(options.num_ranks >= 1, ConfigError, "thread world: num_ranks=", options.num_ranks,
                " must be at least 1");
  shared_ = std::make_shared<Shared>(options);
}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::num_ranks() const { return shared_->options.num_ranks; }

const std::shared_ptr<StatusStore>& ThreadWorld::status() const { return shared_->status; }

std::unique_ptr<Backend> ThreadWorld::make_backend(int rank) {
  const auto& fault = shared_->options.fault;
  const bool faulty = fault && fault->rank == rank;
  if (num_ranks() == 1 && !faulty) {
    return make_solo_backend();
  }
  std::vector<int> ranks(static_cast<std::size_t>(num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<ThreadBackend>(std::make_shared<ThreadRank>(
      shared_, shared_->hub("world", std::move(ranks)), rank, faulty ? fault : std::nullopt));
}

std::vector<std::exception_ptr> run_ranks_collecting(const ThreadWorldOptions& world,
                                                     const GroupOptions& group,
                                                     const std::function<void(Group&)>& body) {
  ThreadWorld threads(world);
  const auto num_ranks = static_cast<std::size_t>(world.num_ranks);
  std::vector<std::exception_ptr> failures(num_ranks);
  std::vector<int> world_ranks(num_ranks);
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupOptions options = group;
      options.status = threads.status();
      Group world_group(threads.make_backend(static_cast<int>(rank)), "world", world_ranks,
                        std::move(options));
      // Posted while the group still lives: its destructor waits for calls in flight, and the
      // others must know before that.
      try {
        body(world_group);
      } catch (const PeerError&) {
        failures[rank] = std::current_exception();  // a consequence: nothing to tell the others
      } catch (const std::exception& error) {
        failures[rank] = std::current_exception();
        threads.status()->post_failure(static_cast<int>(rank), error);
      }
    });
  }
  for (std::thread& thread : ranks) {
    thread.join();
  }
  return failures;
}

void run_ranks(const ThreadWorldOptions& world, const GroupOptions& group,
               const std::function<void(Group&)>& body) {
  std::exception_ptr consequence;
  for (const std::exception_ptr& failure : run_ranks_collecting(world, group, body)) {
    if (!failure) {
      continue;
    }
    try {
      std::rethrow_exception(failure);
    } catch (const PeerError&) {
      consequence = consequence ? consequence : failure;
    }
  }
  if (consequence) {
    std::rethrow_exception(consequence);
  }
}

}  // namespace tessera::comm
