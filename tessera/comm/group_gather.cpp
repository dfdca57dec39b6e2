// The gathers of Group: what travels by itself, what is packed, and who is told when it is there.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "tessera/comm/group.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using detail_group::checked_bytes;

// One gather: what it moves, and how that gets from its caller's memory to what the network reaches
// and back. Small tensors travel together in one message, a pack: they lie behind each other, in
// every rank's piece alike. The pack lies first in the call's staging; copies of what travels by
// itself, if there are any, lie at the end. The staging is there when the call's phases run. Where
// ranks read each other's memory there is none: small tensors are one call of several parts.
struct GatherCall {
  struct Options {
    const char* what = "";
    std::size_t rank = 0;
    int group_size = 1;
    std::size_t pack_below_bytes = 0;
    bool receives = true;                   // false: `full` may be null
    device::Device* copied_from = nullptr;  // null: the network reaches the caller's memory
    bool is_shared = false;                 // ranks read each other's memory
  };
  struct Part {
    GatherBytes bytes;
    std::size_t tensor = 0;  // which one
  };

  GatherCall(std::span<const Gather> tensors, const Label& label, const Options& with);

  bool is_copied() const { return options.copied_from != nullptr; }
  bool is_packed() const { return !packed.empty() && !options.is_shared; }
  bool moves_nothing() const { return direct.empty() && packed.empty(); }
  // Something must be put in its place once it has arrived.
  bool is_unpacked() const {
    return options.receives && !moves_nothing() && (is_packed() || is_copied());
  }
  std::size_t num_pieces() const {
    return options.receives ? static_cast<std::size_t>(options.group_size) : 1;
  }

  // In the order of the direct parts, the pack or what would be in it behind them; ready to travel.
  std::vector<GatherBytes> written() const {
    std::vector<GatherBytes> parts;
    CallCopies copies(options.copied_from);
    for (std::size_t i = 0; i < direct.size(); ++i) {
      const GatherBytes& part = direct[i].bytes;
      if (is_copied()) {
        parts.push_back(in_staging(copy_of(i), part.shard_bytes));
        copies.add(const_cast<void*>(parts.back().shard), part.shard, part.shard_bytes);
      } else {
        parts.push_back(part);
      }
    }
    if (options.is_shared) {
      for (const Part& part : packed) {
        parts.push_back(part.bytes);
      }
    } else if (!packed.empty()) {
      parts.push_back(in_staging(staging->data(), pack_bytes));
      auto* at = static_cast<std::byte*>(const_cast<void*>(parts.back().shard));
      for (const Part& part : packed) {
        const std::size_t bytes = part.bytes.shard_bytes;
        copies.add(at, part.bytes.shard, bytes);
        // What travels is defined to the last byte, gaps included.
        std::memset(at + bytes, 0, packed_bytes(bytes) - bytes);
        at += packed_bytes(bytes);
      }
    }
    copies.finish();
    return parts;
  }

  // What has arrived, to its place.
  void read_direct(std::size_t i) const {
    CallCopies copies(options.copied_from);
    add_direct(i, copies);
    copies.finish();
  }
  void read_pack() const {
    CallCopies copies(options.copied_from);
    add_pack(copies);
    copies.finish();
  }
  void read() const {
    CallCopies copies(options.copied_from);
    for (std::size_t i = 0; is_copied() && i < direct.size(); ++i) {
      add_direct(i, copies);
    }
    add_pack(copies);
    copies.finish();
  }

  const Options options;
  std::vector<Part> direct;
  std::vector<Part> packed;
  std::vector<std::size_t> empty;  // tensors without elements
  std::shared_ptr<const CallWords> words;
  CallTag tag;
  std::vector<std::size_t> piece_bytes;         // by tensor
  std::size_t pack_bytes = 0;                   // of one rank's pack
  std::size_t sent_bytes = 0;                   // to every rank that receives
  std::shared_ptr<const StagingLease> staging;  // null: none is needed

 private:
  std::byte* copy_of(std::size_t i) const {
    std::byte* at = staging->data() + staging->bytes();
    for (std::size_t later = i; later < direct.size(); ++later) {
      at -= staging_room(direct[later].bytes.shard_bytes * num_pieces());
    }
    return at;
  }

  void add_direct(std::size_t i, CallCopies& copies) const {
    copies.add(direct[i].bytes.full, copy_of(i), direct[i].bytes.shard_bytes * num_pieces());
  }
  void add_pack(CallCopies& copies) const {
    const std::byte* at = packed.empty() ? nullptr : staging->data();
    for (std::size_t rank = 0; rank < num_pieces(); ++rank) {
      for (const Part& part : packed) {
        const std::size_t bytes = part.bytes.shard_bytes;
        copies.add(static_cast<std::byte*>(part.bytes.full) + rank * bytes, at, bytes);
        at += packed_bytes(bytes);
      }
    }
  }

  // Pieces from all ranks at `pieces`, or, if this rank only sends, its own.
  GatherBytes in_staging(std::byte* pieces, std::size_t bytes) const {
    return {options.receives ? pieces + options.rank * bytes : pieces,
            options.receives ? pieces : nullptr, bytes};
  }
};

GatherCall::GatherCall(std::span<const Gather> tensors, const Label& label, const Options& with)
    : options(with) {
  auto names = std::make_shared<CallWords>(label);
  // All or none: the n-th name must be the n-th tensor's.
  const bool named = std::any_of(tensors.begin(), tensors.end(),
                                 [](const Gather& tensor) { return !tensor.name.empty(); });
  tag.num_tensors = static_cast<std::uint32_t>(tensors.size());
  tag.dtype = tensors.empty() ? DType::kUInt8 : tensors.front().dtype;
  for (const Gather& tensor : tensors) {
    const std::size_t bytes =
        checked_bytes(tensor.shard_numel, tensor.dtype, options.group_size, options.what);
    const bool has_memory =
        tensor.shard != nullptr && (tensor.full != nullptr || !options.receives);
    TESSERA_CHECK(bytes == 0 || has_memory, ConfigError, options.what, ": ",
                  tensor.shard == nullptr ? "shard" : "full", " of tensor ", piece_bytes.size() + 1,
                  " '", tensor.name, "' is null; it has ", bytes, " bytes per rank");
    tag.shape_hash = hash_bytes(&tensor.shard_numel, sizeof(tensor.shard_numel), tag.shape_hash);
    tag.shape_hash = hash_bytes(&tensor.dtype, sizeof(tensor.dtype), tag.shape_hash);
    tag.total_bytes += bytes;
    piece_bytes.push_back(bytes);
    if (named) {
      names->add_tensor(tensor.name);
    }
  }
  const std::vector<bool> is_packed = packed_pieces(piece_bytes, options.pack_below_bytes);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Part part{{tensors[i].shard, tensors[i].full, piece_bytes[i]}, i};
    if (piece_bytes[i] == 0) {
      empty.push_back(i);
    } else if (is_packed[i]) {
      packed.push_back(part);
      pack_bytes += options.is_shared ? piece_bytes[i] : packed_bytes(piece_bytes[i]);
    } else {
      direct.push_back(part);
      sent_bytes += piece_bytes[i];
    }
  }
  sent_bytes += pack_bytes;
  words = std::move(names);
}

}  // namespace

Pending Group::start_gather(std::span<const Gather> tensors, const CallOptions& options,
                            std::vector<Pending>* each) {
  const auto gather = std::make_shared<GatherCall>(
      tensors, options.label,
      GatherCall::Options{"all_gather", static_cast<std::size_t>(rank()), size(),
                          pack_below_bytes(), true, copied_from_, is_shared()});
  gather->tag.op = Op::kAllGather;
  QueuedCall queued = prepare(gather->tag, options, gather->words);
  if (const std::size_t bytes =
          all_gather_staging_bytes(gather->piece_bytes, pack_below_bytes(), size(), call_memory());
      bytes > 0) {
    gather->staging = add_staging(queued, bytes);
  }
  const std::size_t payload_bytes = gather->sent_bytes * num_peers();
  if (each == nullptr) {
    if (!gather->moves_nothing()) {
      queued.phases.push_back({true, [this, gather, call = queued.call] {
                                 return backend_->start_all_gather(gather->written(), call);
                               }});
    }
    if (gather->is_unpacked()) {
      queued.phases.push_back({false, [gather] {
                                 gather->read();
                                 return Pending();
                               }});
    }
    return start(std::move(queued), payload_bytes);
  }

  // Every part is a call of its own to the backend, and tells its owners when it is there.
  each->resize(tensors.size());
  const auto add_owner = [&](CallPart& part, std::size_t tensor) {
    part.owners.push_back(std::make_shared<device::Completion>());
    (*each)[tensor] = Pending(part.owners.back());
  };
  for (std::size_t i = 0; i < gather->direct.size(); ++i) {
    CallPart& part = queued.parts.emplace_back();
    add_owner(part, gather->direct[i].tensor);
    if (is_copied()) {
      part.unpack = [gather, i] { gather->read_direct(i); };
    }
  }
  if (!gather->packed.empty()) {
    CallPart& part = queued.parts.emplace_back();
    for (const GatherCall::Part& packed : gather->packed) {
      add_owner(part, packed.tensor);
    }
    if (gather->is_packed()) {
      part.unpack = [gather] { gather->read_pack(); };
    }
  }
  // A tensor without elements is there when the ranks agree, and the first part tells that they do.
  for (const std::size_t tensor : gather->empty) {
    add_owner(queued.parts.empty() ? queued.parts.emplace_back() : queued.parts.front(), tensor);
  }
  const auto arrivals = std::make_shared<std::vector<Pending>>(queued.parts.size());
  queued.arrivals = arrivals;
  if (!gather->moves_nothing()) {
    queued.phases.push_back({true, [this, gather, arrivals, call = queued.call] {
                               const auto parts = gather->written();
                               const std::span<const GatherBytes> all(parts);
                               const std::size_t num_direct = gather->direct.size();
                               for (std::size_t i = 0; i < num_direct; ++i) {
                                 (*arrivals)[i] =
                                     backend_->start_all_gather(all.subspan(i, 1), call);
                               }
                               if (num_direct < all.size()) {
                                 (*arrivals)[num_direct] =
                                     backend_->start_all_gather(all.subspan(num_direct), call);
                               }
                               return Pending();
                             }});
  }
  return start(std::move(queued), payload_bytes);
}

Pending Group::start_all_gather(std::span<const Gather> tensors, const CallOptions& options) {
  return start_gather(tensors, options, nullptr);
}

std::vector<Pending> Group::start_all_gathers(std::span<const Gather> tensors,
                                              const CallOptions& options) {
  if (backend_->stream_ordered()) {
    return std::vector<Pending>(tensors.size(), start_all_gather(tensors, options));
  }
  std::vector<Pending> each;
  std::ignore = start_gather(tensors, options, &each);
  return each;
}

Pending Group::start_gather_to(std::span<const Gather> tensors, std::span<const std::uint8_t> wants,
                               const CallOptions& options) {
  TESSERA_CHECK(wants.size() == static_cast<std::size_t>(size()), ConfigError,
                "gather_to: wants has ", wants.size(), " entries; group '", name(), "' has ",
                size(), " ranks");
  const auto own_rank = static_cast<std::size_t>(rank());
  const bool receives = wants[own_rank] != 0;
  const auto gather = std::make_shared<GatherCall>(
      tensors, options.label,
      GatherCall::Options{"gather_to", own_rank, size(), pack_below_bytes(), receives, copied_from_,
                          is_shared()});
  std::vector<std::uint8_t> wanted(wants.begin(), wants.end());
  std::size_t num_wanting = 0;
  for (std::uint8_t& want : wanted) {
    want = want != 0 ? 1 : 0;
    num_wanting += want;
    gather->tag.shape_hash = hash_bytes(&want, sizeof(want), gather->tag.shape_hash);
  }
  gather->tag.op = Op::kGatherTo;
  QueuedCall queued = prepare(gather->tag, options, gather->words);
  if (num_wanting == 0 || gather->sent_bytes == 0) {
    return start(std::move(queued), 0);
  }

  const bool copies = backend_->gather_to_needs_copies();
  const GatherToStaging needs{size(), static_cast<int>(num_wanting), receives, copies,
                              call_memory()};
  if (const std::size_t bytes =
          gather_to_staging_bytes(gather->piece_bytes, pack_below_bytes(), needs);
      bytes > 0) {
    gather->staging = add_staging(queued, bytes);
  }
  // The backend's copies lie behind the pack.
  const std::size_t copies_begin = staging_room(gather->pack_bytes * gather->num_pieces());
  queued.phases.push_back({true, [this, gather, wanted, copies, copies_begin, call = queued.call] {
                             return backend_->start_gather_to(
                                 gather->written(), wanted,
                                 copies ? gather->staging->data() + copies_begin : nullptr, call);
                           }});
  if (gather->is_unpacked()) {
    queued.phases.push_back({false, [gather] {
                               gather->read();
                               return Pending();
                             }});
  }
  return start(std::move(queued), gather->sent_bytes * (num_wanting - wanted[own_rank]));
}

}  // namespace tessera::comm
