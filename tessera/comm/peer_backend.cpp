#include "tessera/comm/peer_backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tessera/comm/staging.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxItems = 256;                        // of one round
constexpr std::size_t kMaxHostBytes = std::size_t{16} << 10;  // of one rank and round
constexpr std::uint64_t kNoRegion = ~std::uint64_t{0};        // peers cannot map it

// Loads before it do not move behind loads after it.
void fence_loads() {
#if !defined(__SANITIZE_THREAD__)  // g++'s does not know fences
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace

// What a rank posts for a round. Valid from `posted` until all ranks have posted for the next one.
struct PeerBackend::Posting {
  CallTag tag;
  std::uint32_t num_items = 0;
  std::uint32_t words_bytes = 0;
  std::array<Place, kMaxItems> places{};
  std::array<char, CallWords::kMaxBytes> words{};
  std::array<std::byte, kMaxHostBytes> host{};
};

// What a rank shows the others of its group. Behind it is what the data plane needs.
struct PeerBackend::Control {
  SharedCounter posted;  // rounds
  std::atomic<std::uint32_t> is_aborted{0};
  std::uint32_t reason_bytes = 0;
  std::array<char, 1024> reason{};
  std::array<Posting, 2> postings;
};

PeerBackend::PeerBackend(std::shared_ptr<Store> store, std::unique_ptr<PeerMemory> peers, int rank,
                         std::string name, PeerBackendOptions options)
    : store_(std::move(store)),
      peers_(std::move(peers)),
      rank_(static_cast<std::size_t>(rank)),
      size_(peers_->sockets.size()),
      name_(std::move(name)),
      options_(std::move(options)),
      num_chunks_(size_) {}

std::size_t PeerBackend::control_bytes(std::size_t plane_bytes) {
  static_assert(sizeof(Control) % alignof(SharedCounter) == 0);
  return sizeof(Control) + plane_bytes;
}

PeerBackend::Control& PeerBackend::control(std::size_t rank) const {
  return *reinterpret_cast<Control*>(peers_->controls[rank]->data());
}

std::byte* PeerBackend::plane(std::size_t rank) const {
  return peers_->controls[rank]->data() + sizeof(Control);
}

const PeerBackend::Posting& PeerBackend::posting(std::size_t rank) const {
  return control(rank).postings.at(round_ % 2);
}

void PeerBackend::start_worker() {
  worker_ = std::thread([this] { work(); });
}

void PeerBackend::join_worker() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) {
    worker_.join();
  }
}

// --- What calls are made of.

std::vector<PeerBackend::Round> PeerBackend::one_round(Item item) {
  std::vector<Round> rounds(1);
  rounds.front().items.push_back(std::move(item));
  return rounds;
}

PeerBackend::Item PeerBackend::sum_item(const void* input, std::size_t bytes,
                                        std::size_t piece_bytes) {
  Item item;
  item.source = static_cast<const std::byte*>(input);
  item.source_bytes = bytes;
  item.stride = piece_bytes;
  item.bytes = piece_bytes;
  return item;
}

Pending PeerBackend::gather(std::span<const GatherBytes> parts, bool receives, const Call& call) {
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
        if (part.use && begin == 0 && end == part.shard_bytes) {
          for_each_rank([&](std::size_t r) { part.use(r, from[r], use_stream()); });
          return;
        }
        for_each_rank([&](std::size_t r) {
          auto* const to = static_cast<std::byte*>(part.full) + r * part.shard_bytes + begin;
          if (to != from[r]) {  // in place: the piece already lies in its slot
            copy(to, from[r], end - begin);
          }
        });
        if (part.use && end == part.shard_bytes) {
          for_each_rank([&](std::size_t r) {
            part.use(r, static_cast<const std::byte*>(part.full) + r * part.shard_bytes,
                     use_stream());
          });
        }
      };
    }
    rounds.back().items.push_back(std::move(item));
  }
  return start(call, std::move(rounds));
}

Pending PeerBackend::start_all_gather(std::span<const GatherBytes> parts, const Call& call) {
  return gather(parts, true, call);
}

Pending PeerBackend::start_gather_to(std::span<const GatherBytes> parts,
                                     std::span<const std::uint8_t> wants, std::byte*,
                                     const Call& call) {
  return gather(parts, wants[rank_] != 0, call);
}

Pending PeerBackend::start_all_to_all(const PieceBytes& pieces, const Call& call) {
  Item item;
  item.source = static_cast<const std::byte*>(pieces.send);
  item.source_bytes = pieces.send_stride * (size_ - 1) + pieces.piece_bytes;
  item.stride = pieces.send_stride;
  item.bytes = pieces.piece_bytes;
  item.read = [this, pieces](std::size_t begin, std::size_t end,
                             std::span<const std::byte* const> from) {
    for_each_rank([&](std::size_t r) {
      auto* const to = static_cast<std::byte*>(pieces.receive) + r * pieces.receive_stride;
      copy(to + begin, from[r], end - begin);
    });
  };
  std::vector<Round> rounds = one_round(std::move(item));
  if (pieces.use) {
    rounds.front().finish = [this, use = pieces.use] { use(use_stream()); };
  }
  return start(call, std::move(rounds));
}

Pending PeerBackend::start_broadcast(void* data, std::size_t bytes, int root, const Call& call) {
  Item item;
  item.source = rank() == root ? static_cast<const std::byte*>(data) : nullptr;
  item.source_bytes = rank() == root ? bytes : 0;
  item.bytes = bytes;
  item.root = root;
  if (rank() != root) {
    item.read = [this, data, root](std::size_t begin, std::size_t end,
                                   std::span<const std::byte* const> from) {
      copy(static_cast<std::byte*>(data) + begin, from[static_cast<std::size_t>(root)],
           end - begin);
    };
  }
  return start(call, one_round(std::move(item)));
}

Pending PeerBackend::start_reduce_scatter(const void* input, void* output, std::size_t shard_numel,
                                          DType dtype, DType output_dtype, const Call& call) {
  const std::size_t bytes = shard_numel * bytes_of(dtype);
  Item item = sum_item(input, bytes * size_, bytes);
  item.read = [=, this](std::size_t begin, std::size_t end,
                        std::span<const std::byte* const> from) {
    auto* const to =
        static_cast<std::byte*>(output) + begin / bytes_of(dtype) * bytes_of(output_dtype);
    reduce(from, dtype, (end - begin) / bytes_of(dtype), to, output_dtype, Reduction::kSum);
  };
  return start(call, one_round(std::move(item)));
}

// Small: every rank reads and adds all of it, beside its own memory. Else each rank adds its
// piece in place, where no other rank reads, and reads the other sums.
Pending PeerBackend::start_all_reduce(void* data, std::size_t numel, DType dtype,
                                      Reduction reduction, const Call& call) {
  auto* const own = static_cast<std::byte*>(data);
  const std::size_t element = bytes_of(dtype);
  const std::size_t bytes = numel * element;
  std::vector<Round> rounds;
  if (bytes * size_ <= kSmallAllReduceBytes) {
    Item item = sum_item(data, bytes, 0);
    item.bytes = bytes;
    item.read = [=, this](std::size_t begin, std::size_t end,
                          std::span<const std::byte* const> from) {
      reduce(from, dtype, (end - begin) / element, scratch(bytes) + begin, dtype, reduction);
    };
    rounds = one_round(std::move(item));
    rounds.front().finish = [=, this] { copy(own, scratch(bytes), bytes); };
    return start(call, std::move(rounds));
  }
  const std::size_t piece = (numel + size_ - 1) / size_ * element;  // the last ones are shorter
  const auto clipped = [bytes, piece](std::size_t rank, std::size_t end) {
    return std::min(end, bytes - std::min(bytes, rank * piece));
  };
  Item sums = sum_item(data, bytes, piece);
  sums.read = [=, this](std::size_t begin, std::size_t end,
                        std::span<const std::byte* const> from) {
    if (const std::size_t last = clipped(rank_, end); begin < last) {
      reduce(from, dtype, (last - begin) / element, own + rank_ * piece + begin, dtype, reduction);
    }
  };
  Item results;
  results.source = own + std::min(bytes, rank_ * piece);
  results.source_bytes = clipped(rank_, piece);
  results.bytes = piece;
  results.read = [=, this](std::size_t begin, std::size_t end,
                           std::span<const std::byte* const> from) {
    for_each_peer([&](std::size_t r) {
      if (const std::size_t last = clipped(r, end); begin < last) {
        copy(own + r * piece + begin, from[r], last - begin);
      }
    });
  };
  rounds = one_round(std::move(sums));
  rounds.push_back(std::move(one_round(std::move(results)).front()));
  return start(call, std::move(rounds));
}

Pending PeerBackend::start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) {
  std::vector<Round> rounds;
  std::size_t begin = 0;
  do {  // of no bytes, too: it is a call
    const std::size_t end = std::min(piece_bytes, begin + kMaxHostBytes);
    rounds.emplace_back().host = HostPart{all, piece_bytes, begin, end};
    begin = end;
  } while (begin < piece_bytes);
  return start(call, std::move(rounds));
}

// --- The worker.

Pending PeerBackend::start(const Call& call, std::vector<Round> rounds) {
  Job job;
  job.call = call;
  job.input = record_input(call);
  job.rounds = std::move(rounds);
  Pending pending(job.owner);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
  return pending;
}

void PeerBackend::work() {
  std::exception_ptr failure;  // of the first call that failed, and so of all behind it
  const auto check_all = [&] {
    if (std::exception_ptr found = check_peers(); found && !failure) {
      failure = found;
    }
  };
  auto last_check = std::chrono::steady_clock::now();
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      while (jobs_.empty()) {
        lock.unlock();  // a data plane may have to wait for its device
        const bool must_check = is_under_way();
        lock.lock();
        if (!must_check) {
          if (is_closing_ && jobs_.empty()) {
            return;
          }
          changed_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
          continue;
        }
        const auto interval = is_closing_ || is_aborted_ ? std::chrono::milliseconds(1)
                                                         : SharedCounter::kLookInterval;
        if (!changed_.wait_for(lock, interval, [this] { return !jobs_.empty(); })) {
          lock.unlock();
          check_all();
          lock.lock();
        }
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
      is_working_ = true;
      // abort() waits for the job that is worked on, and for none behind it: their owners may have
      // freed their memory.
      if (is_aborted_ && !failure) {
        failure =
            std::make_exception_ptr(PeerError(detail::concat("group '", name_, "' was aborted")));
      }
    }
    if (const auto now = std::chrono::steady_clock::now();
        now - last_check >= SharedCounter::kLookInterval) {
      last_check = now;
      check_all();
    }
    std::exception_ptr own_failure = failure;
    try {
      if (!failure) {
        run(job);
      }
    } catch (...) {
      failure = own_failure = std::current_exception();
    }
    job.rounds.clear();
    job.call.keep_alive.reset();
    {
      const std::lock_guard lock(mutex_);
      is_working_ = false;
    }
    changed_.notify_all();
    finish_call(job.call, job.owner, own_failure);
  }
}

void PeerBackend::run(const Job& job) {
  for (const Round& round : job.rounds) {
    const bool is_first = &round == &job.rounds.front();
    enter(RoundPhase::kPosting);
    post(job.call, round, is_first);
    enter(RoundPhase::kPosted);
    for_each_rank([this](std::size_t r) { await(control(r).posted, round_, r); });
    if (is_first) {
      compare_tags(job.call);
      if (job.call.met) {
        *job.call.met = true;
      }
    }
    if (!round.host) {
      open_round(round_, job.call, is_first ? job.input : Pending());
    }
    enter(RoundPhase::kReading);
    for (std::size_t i = 0; i < round.items.size(); ++i) {
      run(round.items[i], i);
    }
    if (round.host) {
      read(*round.host);
    }
    // What was read from a rank that has failed meanwhile may be anything. As in a seqlock, the
    // plain loads of its memory come before the load of its flag.
    fence_loads();
    for_each_rank([this](std::size_t r) {
      if (const std::exception_ptr aborted = abort_of(r)) {
        std::rethrow_exception(aborted);
      }
    });
    enter(RoundPhase::kRead);
    if (!round.host) {
      close_round(round_);
    }
    if (round.finish) {
      round.finish();
    }
  }
}

void PeerBackend::post(const Call& call, const Round& round, bool is_first) {
  before_posting();
  Posting& own = control(rank_).postings.at(++round_ % 2);
  own.tag = call.tag;
  own.words_bytes = 0;
  if (is_first && call.words) {
    const std::string& words = call.words->bytes();
    own.words_bytes = static_cast<std::uint32_t>(std::min(words.size(), own.words.size()));
    std::memcpy(own.words.data(), words.data(), own.words_bytes);
  }
  if (round.host) {
    const HostPart& part = *round.host;
    std::memcpy(own.host.data(), part.all + rank_ * part.piece_bytes + part.begin,
                part.end - part.begin);
  }
  own.num_items = static_cast<std::uint32_t>(round.items.size());
  for (std::size_t i = 0; i < round.items.size(); ++i) {
    const Item& item = round.items[i];
    own.places.at(i) = place_of(item.source, item.source_bytes).value_or(Place{kNoRegion, 0});
  }
  control(rank_).posted.advance(round_);
}

// A posting stays until its rank posts for the round after next, for which it waits for this one.
void PeerBackend::read(const HostPart& part) {
  for_each_peer([&](std::size_t r) {
    std::memcpy(part.all + r * part.piece_bytes + part.begin, posting(r).host.data(),
                part.end - part.begin);
  });
}

void PeerBackend::compare_tags(const Call& call) const {
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
void PeerBackend::run(const Item& item, std::size_t index) {
  const auto is_source = [&](std::size_t r) {
    return item.root < 0 || r == static_cast<std::size_t>(item.root);
  };
  const auto is_chunked = [&](std::size_t r) {
    return is_source(r) && posting(r).places.at(index).region == kNoRegion;
  };
  bool any_is_chunked = false;
  for (std::size_t r = 0; r < size_; ++r) {
    any_is_chunked = any_is_chunked || is_chunked(r);
  }
  // Of each receiver, if they read different bytes; whole cache lines, and so whole elements.
  const std::size_t slot = item.stride > 0 ? chunk_bytes() / size_ / 64 * 64 : chunk_bytes();
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
        await_filled(r, ++num_chunks_[r]);
        from[r] = chunk(r, num_chunks_[r]) + (item.stride > 0 ? rank_ * slot : 0);
      } else {
        from[r] = address_of(r, posting(r).places.at(index)) + at;
      }
    }
    if (item.read) {
      item.read(begin, end, from);
    }
    for (std::size_t r = 0; r < size_; ++r) {
      if (r != rank_ && is_chunked(r)) {
        tell_emptied(r, num_chunks_[r]);
      }
    }
  }
}

void PeerBackend::fill_chunk(const Item& item, std::size_t begin, std::size_t end,
                             std::size_t slot) {
  const std::uint32_t number = ++num_chunks_[rank_];
  await_emptied(number);
  std::byte* const to = chunk(rank_, number);
  for (std::size_t r = 0; r < (item.stride > 0 ? size_ : 1); ++r) {
    const std::size_t first = std::min(item.source_bytes, r * item.stride + begin);
    const std::size_t last = std::min(item.source_bytes, r * item.stride + end);
    if (first < last) {
      copy(to + r * slot, item.source + first, last - first);
    }
  }
  tell_filled(number);
}

// --- Those who take part no more.

void PeerBackend::await(SharedCounter& counter, std::uint32_t value, std::size_t rank) {
  counter.wait(value, [&] {
    TESSERA_CHECK(!is_aborted_, PeerError, "group '", name_, "' was aborted");
    for (const std::exception_ptr& failure : {abort_of(rank), end_of(rank), check_peers()}) {
      // What it said before its end counts.
      if (failure && !counter.has_reached(value)) {
        std::rethrow_exception(failure);
      }
    }
  });
}

std::exception_ptr PeerBackend::abort_of(std::size_t rank) const {
  const Control& other = control(rank);
  if (other.is_aborted.load() == 0) {
    return nullptr;
  }
  return std::make_exception_ptr(PeerError(
      detail::concat("rank ", rank, " of group '", name_,
                     "' aborted: ", std::string(other.reason.data(), other.reason_bytes))));
}

std::exception_ptr PeerBackend::end_of(std::size_t rank) const {
  if (!peers_->has_ended(static_cast<int>(rank))) {
    return nullptr;
  }
  return std::make_exception_ptr(
      PeerError(detail::concat("rank ", rank, " of group '", name_, "' has ended")));
}

void PeerBackend::post_abort(const std::string& reason) {
  Control& own = control(rank_);
  const std::lock_guard lock(mutex_);
  if (own.is_aborted.load() == 0) {
    own.reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), own.reason.size()));
    std::memcpy(own.reason.data(), reason.data(), own.reason_bytes);
    own.is_aborted.store(1);
  }
}

void PeerBackend::abort(const std::string& reason) {
  post_abort(reason);
  is_aborted_ = true;
  changed_.notify_all();
  end_what_is_under_way(reason);
  // Nobody here touches the memory of a call once its owner has been told.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !is_working_; });
}

}  // namespace tessera::comm
