// The reductions of Group: what travels, and where it is added up.
#include <algorithm>
#include <tuple>

#include "tessera/comm/group.h"

namespace tessera::comm {
namespace {

using detail_group::check_pointer;
using detail_group::checked_bytes;

// A reduce-scatter travels in pieces of this size, so that adding overlaps with the network.
constexpr std::size_t kReduceChunkBytes = std::size_t{4} << 20;

}  // namespace

Pending Group::start_sum(const RankParts& parts, void* output, DType output_dtype,
                         Reduction reduction, const Call& call) {
  return backend_->start_reduce(parts, output, output_dtype, reduction,
                                backend_->stream_ordered() ? call.stream : nullptr);
}

// A local phase that adds up what `parts` gives then; the call goes on when `next` is done, too.
// `copy_at` says where the copy of the sum lies then, if the output's memory is not reached.
void Group::add_sum(QueuedCall& queued, const std::function<RankParts()>& parts, void* output,
                    DType output_dtype, const std::function<std::byte*()>& copy_at,
                    const std::function<Pending()>& next) {
  queued.phases.push_back(
      {false, [=, this, call = queued.call] {
         const RankParts all = parts();
         void* const sum = copy_at ? copy_at() : output;
         Pending added = start_sum(all, sum, output_dtype, Reduction::kSum, call);
         if (copy_at) {
           added = copy(output, sum, all.numel * bytes_of(output_dtype), call.stream);
         }
         return next ? next() : added;
       }});
}

// All-to-all in chunks, all launched at once: while one travels, the one before it is added up.
void Group::add_reduce_scatter(QueuedCall& queued, const void* input, void* output,
                               std::size_t shard_numel, DType dtype, DType output_dtype) {
  const bool chunked = !backend_->stream_ordered();
  const std::size_t chunk_numel =
      chunked ? std::min(shard_numel, kReduceChunkBytes / bytes_of(dtype)) : shard_numel;
  const std::size_t num_chunks = (shard_numel + chunk_numel - 1) / chunk_numel;
  const auto num_ranks = static_cast<std::size_t>(size());
  const std::size_t shard_bytes = shard_numel * bytes_of(dtype);
  // What is received lies first; behind it, where memory is copied, what is sent, and the sum.
  const auto staging =
      add_staging(queued, reduce_scatter_staging_bytes(static_cast<std::int64_t>(shard_numel),
                                                       dtype, size(), call_memory()));
  const std::size_t all_bytes = shard_bytes * num_ranks;

  auto arrivals = std::make_shared<std::vector<Pending>>(num_chunks);
  const auto numel_of = [=](std::size_t chunk) {
    return std::min(chunk_numel, shard_numel - chunk * chunk_numel);
  };
  // Chunks lie behind each other in the staging, each with its parts in rank order.
  const auto parts_of = [=](std::size_t chunk) {
    return staging->data() + chunk * chunk_numel * bytes_of(dtype) * num_ranks;
  };
  queued.phases.push_back({true, [=, this, call = queued.call] {
                             const auto* sent = static_cast<const std::byte*>(input);
                             if (is_copied()) {
                               std::byte* const copied = staging->data() + staging_room(all_bytes);
                               std::ignore = copy(copied, input, all_bytes, call.stream);
                               sent = copied;
                             }
                             for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
                               const std::size_t chunk_bytes = numel_of(chunk) * bytes_of(dtype);
                               const auto* send = sent + chunk * chunk_numel * bytes_of(dtype);
                               (*arrivals)[chunk] = backend_->start_all_to_all(
                                   {send, parts_of(chunk), chunk_bytes, shard_bytes, chunk_bytes},
                                   call);
                             }
                             return arrivals->front();
                           }});
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::function<Pending()> next;
    if (chunk + 1 < num_chunks) {
      next = [arrivals, chunk] { return (*arrivals)[chunk + 1]; };
    }
    const auto parts = [parts_of, chunk, dtype, ranks = size(), numel = numel_of(chunk)] {
      return RankParts{parts_of(chunk), dtype, ranks, numel};
    };
    const std::size_t sum_begin = chunk * chunk_numel * bytes_of(output_dtype);
    std::function<std::byte*()> copy_at;
    if (is_copied()) {
      copy_at = [staging, begin = 2 * staging_room(all_bytes) + sum_begin] {
        return staging->data() + begin;
      };
    }
    add_sum(queued, parts, static_cast<std::byte*>(output) + sum_begin, output_dtype, copy_at,
            next);
  }
}

// One encoding and one decoding of every piece. The wires that are received lie first in the
// staging, those that are sent behind them; where the caller's memory is copied they are the
// copies.
void Group::add_encoded_reduce_scatter(QueuedCall& queued, const void* input, void* output,
                                       std::int64_t shard_numel, DType dtype, DType output_dtype,
                                       const Codec& codec) {
  const std::size_t wire_bytes = codec.wire_bytes(shard_numel);
  const auto num_ranks = static_cast<std::size_t>(size());
  const auto staging =
      add_staging(queued, encoded_reduce_scatter_staging_bytes(wire_bytes, size()));
  const auto sent = [staging, begin = staging_room(wire_bytes * num_ranks)] {
    return staging->data() + begin;
  };
  const auto decode = [=, of = &codec, ranks = size()](device::Stream* stream) {
    return of->decode_sum(staging->data(), wire_bytes, ranks, shard_numel, output, output_dtype,
                          stream);
  };
  queued.phases.push_back(
      {true, [=, this, of = &codec, call = queued.call] {
         const std::size_t piece_bytes = static_cast<std::size_t>(shard_numel) * bytes_of(dtype);
         for (std::size_t r = 0; r < num_ranks; ++r) {
           std::ignore = finish_coding(
               of->encode(static_cast<const std::byte*>(input) + r * piece_bytes, dtype,
                          shard_numel, sent() + r * wire_bytes, codec_stream(call.stream)));
         }
         PieceBytes wires{sent(), staging->data(), wire_bytes, wire_bytes, wire_bytes};
         if (is_shared()) {
           wires.use = [decode](device::Stream* stream) { std::ignore = decode(stream); };
         }
         return backend_->start_all_to_all(wires, call);
       }});
  if (!is_shared()) {
    queued.phases.push_back({false, [=, this, call = queued.call] {
                               return finish_coding(decode(codec_stream(call.stream)));
                             }});
  }
}

Pending Group::start_reduce_scatter(const void* input, void* output, std::int64_t shard_numel,
                                    DType dtype, DType output_dtype, const CallOptions& options) {
  const std::size_t bytes = checked_bytes(shard_numel, dtype, size(), "reduce_scatter");
  check_pointer(input, bytes, "reduce_scatter: input");
  check_pointer(output, bytes, "reduce_scatter: output");
  CallTag tag{.shape_hash = hash_bytes(&shard_numel, sizeof(shard_numel), 0),
              .total_bytes = bytes,
              .num_tensors = 1,
              .op = Op::kReduceScatter,
              .dtype = dtype};
  if (options.codec == nullptr) {
    check_reduction(dtype, output_dtype);
  } else {
    detail_group::check_codec(*options.codec, dtype, "reduce_scatter");
    detail_group::check_codec(*options.codec, output_dtype, "reduce_scatter: output");
    const std::string_view codec = options.codec->name();
    tag.shape_hash = hash_bytes(codec.data(), codec.size(), tag.shape_hash);
    tag.total_bytes = options.codec->wire_bytes(shard_numel);
  }
  const std::size_t sent_bytes = tag.total_bytes;
  QueuedCall queued = prepare(tag, options);
  if (bytes > 0 && options.codec != nullptr) {
    add_encoded_reduce_scatter(queued, input, output, shard_numel, dtype, output_dtype,
                               *options.codec);
  } else if (bytes > 0 && size() == 1) {
    const RankParts own{input, dtype, 1, static_cast<std::size_t>(shard_numel)};
    add_sum(queued, [own] { return own; }, output, output_dtype, {}, {});
  } else if (bytes > 0 && is_shared()) {
    queued.phases.push_back({true, [=, this, call = queued.call] {
                               return backend_->start_reduce_scatter(
                                   input, output, static_cast<std::size_t>(shard_numel), dtype,
                                   output_dtype, call);
                             }});
  } else if (bytes > 0) {
    add_reduce_scatter(queued, input, output, static_cast<std::size_t>(shard_numel), dtype,
                       output_dtype);
  }
  return start(std::move(queued), sent_bytes * num_peers());
}

Pending Group::start_all_reduce(void* data, std::int64_t numel, DType dtype, Reduction reduction,
                                const CallOptions& options) {
  const std::size_t bytes = checked_bytes(numel, dtype, size(), "all_reduce");
  check_pointer(data, bytes, "all_reduce");
  const std::uint64_t shape = hash_bytes(&numel, sizeof(numel), 0);
  QueuedCall queued = prepare({.shape_hash = hash_bytes(&reduction, sizeof(reduction), shape),
                               .total_bytes = bytes,
                               .num_tensors = 1,
                               .op = Op::kAllReduce,
                               .dtype = dtype},
                              options);
  if (bytes == 0 || size() == 1) {
    return start(std::move(queued), 0);
  }
  const auto num_ranks = static_cast<std::size_t>(size());
  const bool is_small = bytes * num_ranks <= kSmallAllReduceBytes;
  // Reduce-scatter and all-gather of `num_ranks` equal pieces.
  const std::size_t count = (static_cast<std::size_t>(numel) + num_ranks - 1) / num_ranks;
  const std::size_t piece_bytes = count * bytes_of(dtype);
  const std::size_t sent_bytes = (is_small ? bytes : 2 * piece_bytes) * num_peers();
  if (is_shared()) {
    queued.phases.push_back({true, [=, this, call = queued.call] {
                               return backend_->start_all_reduce(
                                   data, static_cast<std::size_t>(numel), dtype, reduction, call);
                             }});
    return start(std::move(queued), sent_bytes);
  }
  const auto staging =
      add_staging(queued, all_reduce_staging_bytes(numel, dtype, size(), call_memory()));
  if (is_small) {
    // What is gathered lies first in the staging; behind it, where memory is copied, is the sum.
    queued.phases = {
        {true,
         [=, this, call = queued.call] {
           std::byte* const own = staging->data() + bytes * static_cast<std::size_t>(rank());
           if (is_copied()) {
             std::ignore = copy(own, data, bytes, call.stream);
           }
           const GatherBytes part{is_copied() ? own : data, staging->data(), bytes};
           return backend_->start_all_gather({&part, 1}, call);
         }},
        {false, [=, this, call = queued.call] {
           const RankParts parts{staging->data(), dtype, size(), static_cast<std::size_t>(numel)};
           void* const sum = is_copied() ? staging->data() + staging_room(bytes * num_ranks) : data;
           Pending reduced = start_sum(parts, sum, dtype, reduction, call);
           return is_copied() ? copy(data, sum, bytes, call.stream) : reduced;
         }}};
    return start(std::move(queued), sent_bytes);
  }

  // The last pieces are padded with zeros.
  const std::size_t padded_bytes = piece_bytes * num_ranks;
  const std::size_t padding_bytes = padded_bytes - bytes;
  // Received pieces lie first in the staging; behind them is the copy, where there is padding or
  // memory that is not reached.
  const bool has_copy = padding_bytes > 0 || is_copied();
  const auto padded = [=] {
    return has_copy ? staging->data() + staging_room(padded_bytes) : static_cast<std::byte*>(data);
  };
  const auto own = [padded, begin = static_cast<std::size_t>(rank()) * piece_bytes] {
    return padded() + begin;
  };
  queued.phases = {{true,
                    [=, this, call = queued.call] {
                      if (has_copy) {
                        std::ignore = copy(padded(), data, bytes, call.stream);
                        std::ignore = zero(padded() + bytes, padding_bytes, call.stream);
                      }
                      return backend_->start_all_to_all(
                          {padded(), staging->data(), piece_bytes, piece_bytes, piece_bytes}, call);
                    }},
                   {false,
                    [=, this, call = queued.call] {
                      const RankParts parts{staging->data(), dtype, size(), count};
                      return start_sum(parts, own(), dtype, reduction, call);
                    }},
                   {true, [=, this, call = queued.call] {
                      const GatherBytes part{own(), padded(), piece_bytes};
                      return backend_->start_all_gather({&part, 1}, call);
                    }}};
  if (has_copy) {
    queued.phases.push_back({false, [=, this, call = queued.call] {
                               return copy(data, padded(), bytes, call.stream);
                             }});
  }
  return start(std::move(queued), sent_bytes);
}

}  // namespace tessera::comm
