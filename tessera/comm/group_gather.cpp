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
//
// Encoded tensors arrive in staging, in the pack or by themselves, and are decoded from there;
// where the caller's memory is copied the device reads the wires in pinned memory, so that wires
// cross the link in place of elements, and no memory of the device holds them. Where ranks read
// each other's memory they are decoded from where they lie, and staging holds what passes through
// chunks. Wires that are kept are copied where they are decoded.
struct GatherCall {
  struct Options {
    const char* what = "";
    std::size_t rank = 0;
    int group_size = 1;
    std::size_t pack_below_bytes = 0;
    bool receives = true;                   // false: `full` may be null
    device::Device* device = nullptr;       // of calls that are work of a stream; null: the host
    device::Device* copied_from = nullptr;  // null: the network reaches the caller's memory
    CallMemory memory = CallMemory::kReached;
  };
  struct Part {
    GatherBytes bytes;
    std::size_t tensor = 0;  // which one
    // Encoded ones.
    const Codec* codec = nullptr;
    DType dtype = DType::kFloat32;
    std::int64_t wire_numel = 0;
    std::size_t num_wires = 1;  // of one rank
    KeptWires kept;
    // Where in the staging all pieces lie, from its end; 0: they travel to their place.
    std::size_t staged_from_end = 0;
  };

  GatherCall(std::span<const Gather> tensors, const Label& label, const Options& with);

  bool is_copied() const { return options.copied_from != nullptr; }
  bool is_shared() const { return options.memory == CallMemory::kShared; }
  bool is_packed() const { return !packed.empty() && !is_shared(); }
  // It does not lie at its place when it has arrived.
  bool is_unpacked(const Part& part) const {
    return options.receives && (is_copied() || (part.codec != nullptr && !is_shared()));
  }
  bool moves_nothing() const { return direct.empty() && packed.empty(); }
  // Something must be put in its place once it has arrived.
  bool is_unpacked() const {
    return options.receives &&
           (is_packed() || std::any_of(direct.begin(), direct.end(),
                                       [&](const Part& part) { return is_unpacked(part); }));
  }
  std::size_t num_pieces() const {
    return options.receives ? static_cast<std::size_t>(options.group_size) : 1;
  }

  // In the order of the direct parts, the pack or what would be in it behind them; ready to travel.
  std::vector<GatherBytes> written() const {
    std::vector<GatherBytes> parts;
    CallCopies copies(options.copied_from);
    for (const Part& part : direct) {
      parts.push_back(written(part, copies));
    }
    if (is_shared()) {
      for (const Part& part : packed) {
        parts.push_back(written(part, copies));
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
    std::ignore = copies.finish();
    return parts;
  }

  // What has arrived, to its place.
  void read_direct(std::size_t i) const {
    CallCopies copies(options.copied_from);
    add_direct(direct[i], copies);
    std::ignore = copies.finish();
  }
  void read_pack() const {
    CallCopies copies(options.copied_from);
    add_pack(copies);
    std::ignore = copies.finish();
  }
  // `stream`: Group::codec_stream().
  Pending read(device::Stream* stream) const {
    CallCopies copies(options.copied_from, stream);
    for (const Part& part : direct) {
      if (is_unpacked(part)) {
        add_direct(part, copies);
      }
    }
    add_pack(copies);
    return copies.finish();
  }

  const Options options;
  std::vector<Part> direct;
  std::vector<Part> packed;
  std::vector<std::size_t> empty;  // tensors without elements
  std::shared_ptr<const CallWords> words;
  CallTag tag;
  std::vector<GatherPiece> pieces;              // by tensor
  std::size_t pack_bytes = 0;                   // of one rank's pack
  std::size_t sent_bytes = 0;                   // to every rank that receives
  std::shared_ptr<const StagingLease> staging;  // null: none is needed

 private:
  std::size_t wire_bytes_of(const Gather& tensor) const;

  // Of all pieces of a part that travels by itself. A world of one's wires stay where they are.
  std::byte* arrival_of(const Part& part) const {
    return part.staged_from_end > 0 ? staging->data() + staging->bytes() - part.staged_from_end
                                    : static_cast<std::byte*>(const_cast<void*>(part.bytes.shard));
  }

  GatherBytes written(const Part& part, CallCopies& copies) const {
    if (is_copied()) {
      const GatherBytes copy = in_staging(arrival_of(part), part.bytes.shard_bytes);
      copies.add(const_cast<void*>(copy.shard), part.bytes.shard, part.bytes.shard_bytes);
      return copy;
    }
    GatherBytes bytes = part.bytes;
    if (part.codec != nullptr && options.receives) {
      bytes.full = arrival_of(part);
      bytes.use = [part, device = options.device](std::size_t rank, const std::byte* piece,
                                                  device::Stream* stream) {
        CallCopies decodings(nullptr, stream);
        add_decoding(part, rank, piece, device, decodings);
        std::ignore = decodings.finish();
      };
    }
    return bytes;
  }

  void add_direct(const Part& part, CallCopies& copies) const {
    const std::byte* const arrived = arrival_of(part);
    if (part.codec == nullptr) {
      copies.add(part.bytes.full, arrived, part.bytes.shard_bytes * num_pieces());
      return;
    }
    for (std::size_t rank = 0; rank < num_pieces(); ++rank) {
      add_decoding(part, rank, arrived + rank * part.bytes.shard_bytes, options.device, copies);
    }
  }
  void add_pack(CallCopies& copies) const {
    const std::byte* at = is_packed() ? staging->data() : nullptr;
    for (std::size_t rank = 0; is_packed() && rank < num_pieces(); ++rank) {
      for (const Part& part : packed) {
        const std::size_t bytes = part.bytes.shard_bytes;
        if (part.codec == nullptr) {
          copies.add(static_cast<std::byte*>(part.bytes.full) + rank * bytes, at, bytes);
        } else {
          add_decoding(part, rank, at, options.device, copies);
        }
        at += packed_bytes(bytes);
      }
    }
  }
  // What a rank has sent, into its slot, and where it is kept.
  static void add_decoding(const Part& part, std::size_t rank, const std::byte* wires,
                           device::Device* device, CallCopies& copies) {
    const std::size_t wire_bytes = part.bytes.shard_bytes / part.num_wires;
    const std::size_t decoded_bytes =
        static_cast<std::size_t>(part.wire_numel) * bytes_of(part.dtype);
    auto* to = static_cast<std::byte*>(part.bytes.full) + rank * part.num_wires * decoded_bytes;
    for (std::size_t wire = 0; wire < part.num_wires; ++wire) {
      copies.add_work([&](device::Stream* stream) {
        return part.codec->decode(wires + wire * wire_bytes, part.wire_numel, to, part.dtype,
                                  stream);
      });
      to += decoded_bytes;
    }
    const auto begin = static_cast<std::size_t>(part.kept.first);
    const std::size_t end = begin + static_cast<std::size_t>(part.kept.num);
    const std::size_t first = std::max(rank * part.num_wires, begin);
    const std::size_t last = std::min((rank + 1) * part.num_wires, end);
    if (first < last) {
      std::byte* const kept = part.kept.to + (first - begin) * wire_bytes;
      const std::byte* const from = wires + (first - rank * part.num_wires) * wire_bytes;
      const std::size_t bytes = (last - first) * wire_bytes;
      copies.add_work([&](device::Stream* stream) {
        if (stream != nullptr) {
          return device != nullptr ? device->start_copy(kept, from, bytes, *stream)
                                   : stream->enqueue([=] { std::memcpy(kept, from, bytes); });
        }
        std::memcpy(kept, from, bytes);
        return Pending();
      });
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
    const std::size_t bytes = wire_bytes_of(tensor);
    const bool has_memory =
        tensor.shard != nullptr && (tensor.full != nullptr || !options.receives);
    TESSERA_CHECK(bytes == 0 || has_memory, ConfigError, options.what, ": ",
                  tensor.shard == nullptr ? "shard" : "full", " of tensor ", pieces.size() + 1,
                  " '", tensor.name, "' is null; it has ", bytes, " bytes per rank");
    tag.shape_hash = hash_bytes(&tensor.shard_numel, sizeof(tensor.shard_numel), tag.shape_hash);
    tag.shape_hash = hash_bytes(&tensor.dtype, sizeof(tensor.dtype), tag.shape_hash);
    if (tensor.codec != nullptr) {
      const std::string_view codec = tensor.codec->name();
      tag.shape_hash = hash_bytes(codec.data(), codec.size(), tag.shape_hash);
      tag.shape_hash = hash_bytes(&tensor.wires_per_rank, sizeof(int), tag.shape_hash);
    }
    tag.total_bytes += bytes;
    pieces.push_back({bytes, tensor.codec != nullptr});
    if (named && tensor.codec != nullptr) {
      names->add_tensor(detail::concat(tensor.name, " as ", tensor.codec->name()));
    } else if (named) {
      names->add_tensor(tensor.name);
    }
  }
  std::vector<std::size_t> piece_bytes;
  for (const GatherPiece& piece : pieces) {
    piece_bytes.push_back(piece.wire_bytes);
  }
  const std::vector<bool> is_packed = packed_pieces(piece_bytes, options.pack_below_bytes);
  std::size_t num_staged_bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Gather& tensor = tensors[i];
    Part part{{tensor.shard, tensor.full, piece_bytes[i]},
              i,
              tensor.codec,
              tensor.dtype,
              tensor.shard_numel,
              static_cast<std::size_t>(tensor.wires_per_rank),
              tensor.kept};
    if (piece_bytes[i] == 0) {
      empty.push_back(i);
      continue;
    }
    const bool is_in_pack = is_packed[i] && !is_shared();
    if (!is_in_pack && is_staged_piece(pieces[i], num_pieces(), options.memory)) {
      num_staged_bytes += staging_room(piece_bytes[i] * num_pieces());
      part.staged_from_end = num_staged_bytes;
    }
    if (is_packed[i]) {
      packed.push_back(part);
      pack_bytes += is_shared() ? piece_bytes[i] : packed_bytes(piece_bytes[i]);
    } else {
      direct.push_back(part);
      sent_bytes += piece_bytes[i];
    }
  }
  sent_bytes += pack_bytes;
  words = std::move(names);
}

std::size_t GatherCall::wire_bytes_of(const Gather& tensor) const {
  const KeptWires& kept = tensor.kept;
  const int num_arriving =
      tensor.codec != nullptr && options.receives ? options.group_size * tensor.wires_per_rank : 0;
  TESSERA_CHECK(kept.num == 0 || (kept.to != nullptr && kept.first >= 0 && kept.num > 0 &&
                                  kept.num <= num_arriving - kept.first),
                ConfigError, options.what, ": tensor '", tensor.name, "' keeps ", kept.num,
                " wires from ", kept.first, " on", kept.to == nullptr ? " at null" : "", "; ",
                num_arriving, " arrive");
  if (tensor.codec == nullptr) {
    return checked_bytes(tensor.shard_numel, tensor.dtype, options.group_size, options.what);
  }
  detail_group::check_codec(*tensor.codec, tensor.dtype, options.what);
  TESSERA_CHECK(tensor.wires_per_rank >= 1, ConfigError, options.what, ": tensor '", tensor.name,
                "' has ", tensor.wires_per_rank, " wires per rank; it needs at least one");
  std::ignore = checked_bytes(tensor.shard_numel, tensor.dtype,
                              options.group_size * tensor.wires_per_rank, options.what);
  return tensor.codec->wire_bytes(tensor.shard_numel) *
         static_cast<std::size_t>(tensor.wires_per_rank);
}

}  // namespace

Pending Group::start_gather(std::span<const Gather> tensors, const CallOptions& options,
                            std::vector<Pending>* each) {
  const auto gather = std::make_shared<GatherCall>(
      tensors, options.label,
      GatherCall::Options{"all_gather", static_cast<std::size_t>(rank()), size(),
                          pack_below_bytes(), true, options_.device, copied_from_, call_memory()});
  gather->tag.op = Op::kAllGather;
  QueuedCall queued = prepare(gather->tag, options, gather->words);
  if (const std::size_t bytes =
          all_gather_staging_bytes(gather->pieces, pack_below_bytes(), size(), call_memory());
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
      queued.phases.push_back({false, [this, gather, stream = queued.call.stream] {
                                 return gather->read(codec_stream(stream));
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
    if (gather->is_unpacked(gather->direct[i])) {
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
      GatherCall::Options{"gather_to", own_rank, size(), pack_below_bytes(), receives,
                          options_.device, copied_from_, call_memory()});
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
  if (const std::size_t bytes = gather_to_staging_bytes(gather->pieces, pack_below_bytes(), needs);
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
    queued.phases.push_back({false, [this, gather, stream = queued.call.stream] {
                               return gather->read(codec_stream(stream));
                             }});
  }
  return start(std::move(queued), gather->sent_bytes * (num_wanting - wanted[own_rank]));
}

}  // namespace tessera::comm
