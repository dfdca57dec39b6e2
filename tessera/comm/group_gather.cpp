// The gathers of Group: what travels by itself, what is packed, and who is told when it is there.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "tessera/comm/group_impl.h"

namespace tessera::comm {
namespace {

using detail_group::checked_bytes;

constexpr std::size_t kPackAlignment = 16;

std::size_t padded(std::size_t bytes) {
  return (bytes + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
}

// Tensors that travel as one message: they lie behind each other, in every rank's piece alike.
class Pack {
 public:
  void add(const GatherBytes& part) {
    parts_.push_back(part);
    piece_bytes_ += padded(part.shard_bytes);
  }

  bool empty() const { return parts_.empty(); }
  std::size_t piece_bytes() const { return piece_bytes_; }

  // What travels is defined to the last byte, gaps included.
  void write(std::byte* piece) const {
    for (const GatherBytes& part : parts_) {
      const std::size_t room = padded(part.shard_bytes);
      std::memcpy(piece, part.shard, part.shard_bytes);
      std::memset(piece + part.shard_bytes, 0, room - part.shard_bytes);
      piece += room;
    }
  }

  // `pieces` are those of all ranks, in rank order.
  void read(const std::byte* pieces, std::size_t num_ranks) const {
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      for (const GatherBytes& part : parts_) {
        std::memcpy(static_cast<std::byte*>(part.full) + rank * part.shard_bytes, pieces,
                    part.shard_bytes);
        pieces += padded(part.shard_bytes);
      }
    }
  }

 private:
  std::vector<GatherBytes> parts_;
  std::size_t piece_bytes_ = 0;
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
  std::size_t shard_bytes = 0;
  std::size_t sent_bytes = 0;  // to every rank that receives
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
    plan.shard_bytes += bytes;
    if (named) {
      words->add_tensor(tensor.name);
    }
    parts.push_back({tensor.shard, tensor.full, bytes});
  }
  const auto is_small = [&](const GatherBytes& part) {
    return part.shard_bytes > 0 && part.shard_bytes < options.pack_below_bytes;
  };
  // One alone saves nothing by a copy: straight into its place.
  const bool packs = std::count_if(parts.begin(), parts.end(), is_small) > 1;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].shard_bytes == 0) {
      plan.empty_tensors.push_back(i);
    } else if (packs && is_small(parts[i])) {
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
  const auto num_ranks = static_cast<std::size_t>(size());
  std::vector<GatherBytes> parts = plan.direct;
  std::byte* all = nullptr;
  std::byte* own = nullptr;
  std::function<void()> unpack;
  if (!plan.pack.empty()) {
    all = take_staging(queued, plan.pack.piece_bytes() * num_ranks).get();
    own = all + static_cast<std::size_t>(rank()) * plan.pack.piece_bytes();
    parts.push_back({own, all, plan.pack.piece_bytes()});
    unpack = [pack = plan.pack, all, num_ranks] { pack.read(all, num_ranks); };
  }
  const auto write_pack = [pack = plan.pack, own] {
    if (!pack.empty()) {
      pack.write(own);
    }
  };
  if (each == nullptr) {
    if (!parts.empty()) {
      queued.phases.push_back({true, [impl = this, parts, write_pack, call = queued.call] {
                                 write_pack();
                                 return impl->backend_->start_all_gather(parts, call);
                               }});
    }
    if (unpack) {
      queued.phases.push_back({false, [unpack] {
                                 unpack();
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
  }
  if (!plan.pack.empty()) {
    add_owners(queued.parts.emplace_back(), plan.packed_tensors);
    queued.parts.back().unpack = unpack;
  }
  // A tensor without elements is there when the ranks agree, and the first part tells that they do.
  if (!plan.empty_tensors.empty()) {
    add_owners(queued.parts.empty() ? queued.parts.emplace_back() : queued.parts.front(),
               plan.empty_tensors);
  }
  const auto arrivals = std::make_shared<std::vector<Pending>>(queued.parts.size());
  queued.arrivals = arrivals;
  if (!parts.empty()) {
    queued.phases.push_back({true, [impl = this, parts, write_pack, arrivals, call = queued.call] {
                               write_pack();
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

  const auto num_ranks = static_cast<std::size_t>(size());
  const std::size_t piece_bytes = plan.pack.piece_bytes();
  std::vector<GatherBytes> parts = plan.direct;
  std::byte* all = nullptr;
  std::byte* own = nullptr;
  if (!plan.pack.empty()) {
    all = impl->take_staging(queued, receives ? piece_bytes * num_ranks : piece_bytes).get();
    own = receives ? all + own_rank * piece_bytes : all;
    parts.push_back({own, receives ? all : nullptr, piece_bytes});
  }
  std::byte* copies = impl->backend_->gather_to_needs_copies()
                          ? impl->take_staging(queued, num_wanting * plan.sent_bytes).get()
                          : nullptr;
  queued.phases.push_back(
      {true, [impl, parts, wanted, pack = plan.pack, own, copies, call = queued.call] {
         if (!pack.empty()) {
           pack.write(own);
         }
         return impl->backend_->start_gather_to(parts, wanted, copies, call);
       }});
  if (receives && !plan.pack.empty()) {
    queued.phases.push_back({false, [pack = plan.pack, all, num_ranks] {
                               pack.read(all, num_ranks);
                               return Pending();
                             }});
  }
  return impl->start(std::move(queued), plan.sent_bytes * (num_wanting - wanted[own_rank]));
}

}  // namespace tessera::comm
