// The gathers of Group: what travels by itself, what is packed, and who is told when it is there.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "tessera/comm/group_impl.h"
#include "tessera/comm/staging_bytes.h"

namespace tessera::comm {
namespace {

using detail_group::checked_bytes;

// Tensors that travel as one message: they lie behind each other, in every rank's piece alike.
class Pack {
 public:
  void add(const GatherBytes& part) {
    parts_.push_back(part);
    piece_bytes_ += packed_bytes(part.shard_bytes);
  }

  bool empty() const { return parts_.empty(); }
  std::size_t piece_bytes() const { return piece_bytes_; }

  // What travels is defined to the last byte, gaps included.
  void write(std::byte* piece, CallCopies& copies) const {
    for (const GatherBytes& part : parts_) {
      const std::size_t room = packed_bytes(part.shard_bytes);
      copies.add(piece, part.shard, part.shard_bytes);
      std::memset(piece + part.shard_bytes, 0, room - part.shard_bytes);
      piece += room;
    }
  }

  // `pieces` are those of all ranks, in rank order.
  void read(const std::byte* pieces, std::size_t num_ranks, CallCopies& copies) const {
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      for (const GatherBytes& part : parts_) {
        copies.add(static_cast<std::byte*>(part.full) + rank * part.shard_bytes, pieces,
                   part.shard_bytes);
        pieces += packed_bytes(part.shard_bytes);
      }
    }
  }

 private:
  std::vector<GatherBytes> parts_;
  std::size_t piece_bytes_ = 0;
};

// What a gather moves, between its caller's memory and what the network reaches. The pack lies
// first in the call's staging; copies of what travels by itself, if there are any, lie at the end.
// The staging is there when the call's phases run.
class StagedGather {
 public:
  struct Staged {
    std::shared_ptr<const StagingLease> staging;  // null: none is needed
    device::Device* copied_from = nullptr;        // null: the network reaches the caller's memory
    std::size_t rank = 0;
    std::size_t num_ranks = 0;  // whose pieces are received; 0: this rank only sends
  };

  StagedGather(std::vector<GatherBytes> direct, Pack pack, Staged staged)
      : direct_(std::move(direct)), pack_(std::move(pack)), staged_(std::move(staged)) {}

  bool empty() const { return direct_.empty() && pack_.empty(); }
  // Something must be put in its place once it has come.
  bool is_unpacked() const {
    return staged_.num_ranks > 0 && !empty() && (!pack_.empty() || is_copied());
  }

  // In the order of the parts, the pack behind them; ready to travel.
  std::vector<GatherBytes> written() const {
    std::vector<GatherBytes> parts;
    CallCopies copies(staged_.copied_from);
    for (std::size_t i = 0; i < direct_.size(); ++i) {
      const GatherBytes& part = direct_[i];
      if (is_copied()) {
        parts.push_back(in_staging(copy_of(i), part.shard_bytes));
        copies.add(const_cast<void*>(parts.back().shard), part.shard, part.shard_bytes);
      } else {
        parts.push_back(part);
      }
    }
    if (!pack_.empty()) {
      parts.push_back(in_staging(staged_.staging->data(), pack_.piece_bytes()));
      pack_.write(static_cast<std::byte*>(const_cast<void*>(parts.back().shard)), copies);
    }
    copies.finish();
    return parts;
  }

  // Part i of those that travel by themselves.
  void read_direct(std::size_t i) const {
    CallCopies copies(staged_.copied_from);
    add_direct(i, copies);
    copies.finish();
  }
  void read_pack() const {
    CallCopies copies(staged_.copied_from);
    pack_.read(staged_.staging->data(), staged_.num_ranks, copies);
    copies.finish();
  }
  void read() const {
    CallCopies copies(staged_.copied_from);
    for (std::size_t i = 0; is_copied() && i < direct_.size(); ++i) {
      add_direct(i, copies);
    }
    if (!pack_.empty()) {
      pack_.read(staged_.staging->data(), staged_.num_ranks, copies);
    }
    copies.finish();
  }

 private:
  bool is_copied() const { return staged_.copied_from != nullptr; }
  std::size_t num_pieces() const { return std::max<std::size_t>(staged_.num_ranks, 1); }

  std::byte* copy_of(std::size_t i) const {
    std::byte* at = staged_.staging->data() + staged_.staging->bytes();
    for (std::size_t later = i; later < direct_.size(); ++later) {
      at -= staging_room(direct_[later].shard_bytes * num_pieces());
    }
    return at;
  }

  void add_direct(std::size_t i, CallCopies& copies) const {
    copies.add(direct_[i].full, copy_of(i), direct_[i].shard_bytes * num_pieces());
  }

  // Pieces from all ranks at `pieces`, or, if this rank only sends, its own.
  GatherBytes in_staging(std::byte* pieces, std::size_t piece_bytes) const {
    const bool receives = staged_.num_ranks > 0;
    return {receives ? pieces + staged_.rank * piece_bytes : pieces, receives ? pieces : nullptr,
            piece_bytes};
  }

  std::vector<GatherBytes> direct_;
  Pack pack_;
  Staged staged_;
};

// What is to be moved, and how.
struct Plan {
  std::vector<GatherBytes> direct;
  Pack pack;
  // Which tensors these are.
  std::vector<std::size_t> direct_tensors;
  std::vector<std::size_t> packed_tensors;
  std::vector<std::size_t> empty_tensors;

  std::shared_ptr<const CallWords> words;
  std::uint64_t shape_hash = 0;
  std::vector<std::size_t> piece_bytes;  // by tensor
  std::size_t shard_bytes = 0;           // their sum
  std::size_t sent_bytes = 0;            // to every rank that receives
};

struct PlanOptions {
  const char* what = "";
  int num_ranks = 1;
  std::size_t pack_below_bytes = 0;
  bool receives = true;  // false: `full` may be null
};

Plan make_plan(std::span<const Gather> tensors, const Label& label, const PlanOptions& options) {
  Plan plan;
  auto words = std::make_shared<CallWords>(label);
  // All or none: the n-th name must be the n-th tensor's.
  const bool named = std::any_of(tensors.begin(), tensors.end(),
                                 [](const Gather& tensor) { return !tensor.name.empty(); });
  std::vector<GatherBytes> parts;
  for (const Gather& tensor : tensors) {
    const std::size_t bytes =
        checked_bytes(tensor.shard_numel, tensor.dtype, options.num_ranks, options.what);
    const bool has_memory =
        tensor.shard != nullptr && (tensor.full != nullptr || !options.receives);
    TESSERA_CHECK(bytes == 0 || has_memory, ConfigError, options.what, ": ",
                  tensor.shard == nullptr ? "shard" : "full", " of tensor ", parts.size() + 1, " '",
                  tensor.name, "' is null; it has ", bytes, " bytes per rank");
    plan.shape_hash = hash_bytes(&tensor.shard_numel, sizeof(tensor.shard_numel), plan.shape_hash);
    plan.shape_hash = hash_bytes(&tensor.dtype, sizeof(tensor.dtype), plan.shape_hash);
    plan.piece_bytes.push_back(bytes);
    plan.shard_bytes += bytes;
    if (named) {
      words->add_tensor(tensor.name);
    }
    parts.push_back({tensor.shard, tensor.full, bytes});
  }
  const std::vector<bool> is_packed = packed_pieces(plan.piece_bytes, options.pack_below_bytes);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].shard_bytes == 0) {
      plan.empty_tensors.push_back(i);
    } else if (is_packed[i]) {
      plan.pack.add(parts[i]);
      plan.packed_tensors.push_back(i);
    } else {
      plan.direct.push_back(parts[i]);
      plan.direct_tensors.push_back(i);
      plan.sent_bytes += parts[i].shard_bytes;
    }
  }
  plan.sent_bytes += plan.pack.piece_bytes();
  plan.words = std::move(words);
  return plan;
}

DType first_dtype(std::span<const Gather> tensors) {
  return tensors.empty() ? DType::kUInt8 : tensors[0].dtype;
}

}  // namespace

Pending Group::Impl::start_gather(std::span<const Gather> tensors, const CallOptions& options,
                                  std::vector<Pending>* each) {
  const std::size_t pack_below = backend_->stream_ordered() ? 0 : options_.pack_below_bytes;
  const Plan plan = make_plan(tensors, options.label, {"all_gather", size(), pack_below, true});
  QueuedCall queued = prepare(Op::kAllGather, plan.shape_hash, plan.shard_bytes, tensors.size(),
                              first_dtype(tensors), options, 0, plan.words);
  std::shared_ptr<const StagingLease> staging;
  if (const std::size_t bytes =
          all_gather_staging_bytes(plan.piece_bytes, pack_below, size(), call_memory());
      bytes > 0) {
    staging = add_staging(queued, bytes);
  }
  const auto gather = std::make_shared<const StagedGather>(
      plan.direct, plan.pack,
      StagedGather::Staged{staging, copied_from_, static_cast<std::size_t>(rank()),
                           static_cast<std::size_t>(size())});
  if (each == nullptr) {
    if (!gather->empty()) {
      queued.phases.push_back({true, [impl = this, gather, call = queued.call] {
                                 return impl->backend_->start_all_gather(gather->written(), call);
                               }});
    }
    if (gather->is_unpacked()) {
      queued.phases.push_back({false, [gather] {
                                 gather->read();
                                 return Pending();
                               }});
    }
    return start(std::move(queued), plan.sent_bytes * num_peers());
  }

  // Every part is a call of its own to the backend, and tells its owners when it is there.
  each->resize(tensors.size());
  const auto add_owners = [&](CallPart& part, std::span<const std::size_t> of) {
    for (const std::size_t tensor : of) {
      part.owners.push_back(std::make_shared<device::Completion>());
      (*each)[tensor] = Pending(part.owners.back());
    }
  };
  for (const std::size_t& tensor : plan.direct_tensors) {
    add_owners(queued.parts.emplace_back(), {&tensor, 1});
    if (is_copied()) {
      queued.parts.back().unpack = [gather, i = queued.parts.size() - 1] {
        gather->read_direct(i);
      };
    }
  }
  if (!plan.pack.empty()) {
    add_owners(queued.parts.emplace_back(), plan.packed_tensors);
    queued.parts.back().unpack = [gather] { gather->read_pack(); };
  }
  // A tensor without elements is there when the ranks agree, and the first part tells that they do.
  if (!plan.empty_tensors.empty()) {
    add_owners(queued.parts.empty() ? queued.parts.emplace_back() : queued.parts.front(),
               plan.empty_tensors);
  }
  const auto arrivals = std::make_shared<std::vector<Pending>>(queued.parts.size());
  queued.arrivals = arrivals;
  if (!gather->empty()) {
    queued.phases.push_back({true, [impl = this, gather, arrivals, call = queued.call] {
                               const auto parts = gather->written();
                               for (std::size_t i = 0; i < parts.size(); ++i) {
                                 (*arrivals)[i] =
                                     impl->backend_->start_all_gather({&parts[i], 1}, call);
                               }
                               return Pending();
                             }});
  }
  return start(std::move(queued), plan.sent_bytes * num_peers());
}

Pending Group::start_all_gather(std::span<const Gather> tensors, const CallOptions& options) {
  return impl_->start_gather(tensors, options, nullptr);
}

std::vector<Pending> Group::start_all_gathers(std::span<const Gather> tensors,
                                              const CallOptions& options) {
  if (impl_->backend_->stream_ordered()) {
    return std::vector<Pending>(tensors.size(), start_all_gather(tensors, options));
  }
  std::vector<Pending> each;
  std::ignore = impl_->start_gather(tensors, options, &each);
  return each;
}

Pending Group::start_gather_to(std::span<const Gather> tensors, std::span<const std::uint8_t> wants,
                               const CallOptions& options) {
  TESSERA_CHECK(wants.size() == static_cast<std::size_t>(size()), ConfigError,
                "gather_to: wants has ", wants.size(), " entries; group '", name(), "' has ",
                size(), " ranks");
  Impl* impl = impl_.get();
  const auto own_rank = static_cast<std::size_t>(rank());
  const bool receives = wants[own_rank] != 0;
  const std::size_t pack_below =
      impl->backend_->stream_ordered() ? 0 : impl->options_.pack_below_bytes;
  const Plan plan = make_plan(tensors, options.label, {"gather_to", size(), pack_below, receives});
  std::vector<std::uint8_t> wanted(wants.begin(), wants.end());
  std::uint64_t shape = plan.shape_hash;
  std::size_t num_wanting = 0;
  for (std::uint8_t& want : wanted) {
    want = want != 0 ? 1 : 0;
    num_wanting += want;
    shape = hash_bytes(&want, sizeof(want), shape);
  }
  QueuedCall queued = impl->prepare(Op::kGatherTo, shape, plan.shard_bytes, tensors.size(),
                                    first_dtype(tensors), options, 0, plan.words);
  if (num_wanting == 0 || plan.sent_bytes == 0) {
    return impl->start(std::move(queued), 0);
  }

  const auto num_ranks = static_cast<std::size_t>(receives ? size() : 0);
  const bool copies = impl->backend_->gather_to_needs_copies();
  const GatherToStaging needs{size(), static_cast<int>(num_wanting), receives, copies,
                              impl->call_memory()};
  std::shared_ptr<const StagingLease> staging;
  if (const std::size_t bytes = gather_to_staging_bytes(plan.piece_bytes, pack_below, needs);
      bytes > 0) {
    staging = impl->add_staging(queued, bytes);
  }
  // The backend's copies lie behind the pack.
  const std::size_t copies_begin =
      staging_room(plan.pack.piece_bytes() * std::max<std::size_t>(num_ranks, 1));
  const auto gather = std::make_shared<const StagedGather>(
      plan.direct, plan.pack,
      StagedGather::Staged{staging, impl->copied_from_, own_rank, num_ranks});
  queued.phases.push_back(
      {true, [impl, gather, wanted, staging, copies, copies_begin, call = queued.call] {
         return impl->backend_->start_gather_to(
             gather->written(), wanted, copies ? staging->data() + copies_begin : nullptr, call);
       }});
  if (gather->is_unpacked()) {
    queued.phases.push_back({false, [gather] {
                               gather->read();
                               return Pending();
                             }});
  }
  return impl->start(std::move(queued), plan.sent_bytes * (num_wanting - wanted[own_rank]));
}

}  // namespace tessera::comm
