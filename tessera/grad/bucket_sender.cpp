#include "tessera/grad/bucket_sender.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {

using device::Pending;

BucketSender::BucketSender(GradientStream& stream, ShardGradients& shards,
                           BucketReduction reduction, const Options& options)
    : stream_(stream),
      shards_(shards),
      reduction_(std::move(reduction)),
      params_(stream.parts().params),
      options_(options) {}

bool BucketSender::is_whole_param(const Bucket& bucket) const {
  const Piece& piece = bucket.pieces.front();
  const shard::Layout& layout = params_[piece.param].layout();
  return bucket.pieces.size() == 1 && bucket.shard_numel == layout.shard_numel() &&
         layout.padded_numel() == layout.numel() &&
         (reduction_.takes_two_hops() || stream_.shards_are_in_rank_order());
}

void BucketSender::put(const Bucket& bucket, const Piece& piece, const FullGradient& gradient) {
  if (gradient.dtype == options_.wire_dtype && is_whole_param(bucket)) {
    direct_ = gradient;
  } else {
    copy_piece(bucket, piece, gradient);
  }
}

// Each part of the bucket gets the elements of its shard, and zeros where those end.
void BucketSender::copy_piece(const Bucket& bucket, const Piece& piece,
                              const FullGradient& gradient) {
  const shard::Layout& layout = params_[piece.param].layout();
  const std::size_t wire_bytes = bytes_of(options_.wire_dtype);
  const auto* from = static_cast<const std::byte*>(gradient.data);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride = static_cast<std::size_t>(bucket.shard_numel) * wire_bytes;
  for (std::size_t part = 0; part < num_ranks(); ++part, to += stride) {
    const std::int64_t begin = shard_at(part) * layout.shard_numel() + piece.shard_begin;
    const std::int64_t numel = std::clamp<std::int64_t>(layout.numel() - begin, 0, piece.numel);
    if (numel > 0) {
      stream_.copy(to, options_.wire_dtype,
                   from + static_cast<std::size_t>(begin) * bytes_of(gradient.dtype),
                   gradient.dtype, numel);
    }
    stream_.zero(to + static_cast<std::size_t>(numel) * wire_bytes,
                 static_cast<std::size_t>(piece.numel + piece.padding - numel) * wire_bytes);
  }
}

void BucketSender::put_zeros(const Bucket& bucket, const Piece& piece) {
  const std::size_t wire_bytes = bytes_of(options_.wire_dtype);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride = static_cast<std::size_t>(bucket.shard_numel) * wire_bytes;
  for (std::size_t part = 0; part < num_ranks(); ++part, to += stride) {
    stream_.zero(to, static_cast<std::size_t>(piece.numel + piece.padding) * wire_bytes);
  }
}

void BucketSender::send(const Bucket& bucket, const comm::Label& label, ReplicaSum replica_sum) {
  BucketReduction::Call call;
  call.label = label;
  call.stream = &stream_.stream();
  call.shard_numel = bucket.shard_numel;
  const bool is_direct = direct_.data != nullptr;
  call.input = direct_.data;
  if (is_direct) {
    call.keep_alive = std::move(direct_.owner);
  } else {
    // Not kept alive by the call: memory of the device must go back before the device does, and a
    // group may outlive it. Buffers stay until every call has come to its end, see clear().
    call.input = buffer();
  }
  direct_ = {};
  call.output = shards_.target_of(bucket.pieces);
  if (call.output == nullptr) {
    call.output = result();
  }
  if (reduction_.takes_two_hops()) {
    call.partial = partial();
  }
  measure(bucket, call.input);
  auto* const output = static_cast<std::byte*>(call.output);
  BucketReduction::Started started = reduction_.start(std::move(call));
  const Pending& reduced = started.reduced;
  sent_.push_back({.pieces = bucket.pieces,
                   .shard_numel = bucket.shard_numel,
                   .values = output,
                   .dtype = options_.wire_dtype,
                   .reduced = reduced,
                   .met = started.met,
                   .is_on_stream = reduction_.is_stream_ordered(),
                   .replica_sum = replica_sum,
                   .slot = std::exchange(slot_, nullptr)});
  in_flight_.insert(in_flight_.end(), started.calls.begin(), started.calls.end());
  const auto bytes = bucket.shard_numel * reduction_.num_ranks() *
                     static_cast<std::int64_t>(bytes_of(options_.wire_dtype));
  ReducerStats& stats = stream_.stats();
  ++stats.num_reductions;
  stats.reduced_bytes += static_cast<std::uint64_t>(bytes);
  stats.sent_bytes += started.sent_bytes;
  if (is_direct) {
    stream_.count_kept(reduced, started.met, bytes);
  }
  if (replica_sum != ReplicaSum::kNone) {
    // On one stream all ranks must have the calls of both groups in one order: this one.
    if (reduction_.is_stream_ordered() && stream_.parts().replicas->is_stream_ordered()) {
      start_replica_sum(sent_.back());
    } else {
      start_ready_sums();
    }
  }
}

// Before the reduction: the stream keeps the order in which the input's memory is read and freed.
void BucketSender::measure(const Bucket& bucket, const void* input) {
  if (options_.quant_error == nullptr) {
    return;
  }
  const std::size_t wire_bytes = bytes_of(options_.wire_dtype);
  const auto* const part = static_cast<const std::byte*>(input) +
                           static_cast<std::size_t>(own_part() * bucket.shard_numel) * wire_bytes;
  for (const Piece& piece : bucket.pieces) {
    options_.quant_error->measure(piece,
                                  part + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes,
                                  options_.wire_dtype);
  }
}

void BucketSender::start_replica_sum(Sent& sent) {
  if (sent.replica_sum == ReplicaSum::kResult) {
    start_all_reduce(sent, sent.reduced);
    return;
  }
  TESSERA_INVARIANT(sent.slot != nullptr, "what is added to gradients at home has no slot");
  while (is_local(sent_.front())) {  // of earlier backwards, which have ended before this one
    put_oldest();
  }
  stream_.wait_for(sent.reduced);
  take_buffer(*sent.slot);
  auto* const total = reinterpret_cast<float*>(sent.slot->buffer.data());
  shards_.load(sent.pieces, total, DType::kFloat32);
  stream_.add(total, sent.values, sent.dtype, sent.shard_numel);
  sent.values = sent.slot->buffer.data();
  sent.dtype = DType::kFloat32;
  sent.replaces = true;
  start_all_reduce(sent, {});
}

void BucketSender::start_all_reduce(Sent& sent, const Pending& ready) {
  comm::Group& replicas = *stream_.parts().replicas;
  comm::CallOptions options;
  options.label = {"gradients of replicas", params_[sent.pieces.front().param].name()};
  options.stream = &stream_.stream();
  options.ready = ready;
  options.met = std::make_shared<std::atomic<bool>>(false);
  sent.reduced = replicas.start_all_reduce(sent.values, sent.shard_numel, sent.dtype,
                                           comm::Reduction::kSum, options);
  sent.met = options.met;
  sent.is_on_stream = replicas.is_stream_ordered();
  sent.replica_sum = ReplicaSum::kNone;
  sent.is_total = true;
  in_flight_.push_back(sent.reduced);
  ReducerStats& stats = stream_.stats();
  ++stats.num_replica_sums;
  stats.replica_bytes += static_cast<std::uint64_t>(sent.shard_numel) * bytes_of(sent.dtype);
}

void BucketSender::start_ready_sums() {
  for (Sent& sent : sent_) {
    if (sent.replica_sum == ReplicaSum::kNone) {
      continue;
    }
    // The call itself waits for a result; this thread does where it adds that to others.
    if (!(sent.replica_sum == ReplicaSum::kResult ? is_met(sent) : is_ready(sent))) {
      return;
    }
    start_replica_sum(sent);
  }
}

void BucketSender::start_replica_sums() {
  for (Sent& sent : sent_) {
    if (sent.replica_sum != ReplicaSum::kNone) {
      start_replica_sum(sent);
    }
  }
}

void BucketSender::sum_home(const Bucket& bucket, DType dtype) {
  Sent sent{.pieces = bucket.pieces,
            .shard_numel = bucket.shard_numel,
            .values = buffer(),
            .dtype = dtype,
            .replaces = true,
            .slot = slot_};
  shards_.load(bucket.pieces, sent.values, dtype);
  start_all_reduce(sent, {});
  slot_ = nullptr;
  sent_.push_back(std::move(sent));
}

bool BucketSender::waits_for_no_rank() {
  const Slot& next = slots_[next_slot_];
  if (slot_ != nullptr || !next.is_taken) {
    return true;
  }
  for (Sent& sent : sent_) {
    if (!is_met(sent)) {
      return false;
    }
    if (sent.replica_sum != ReplicaSum::kNone) {
      start_replica_sum(sent);
    }
    if (sent.slot == &next) {
      return is_met(sent);
    }
  }
  return true;
}

BucketSender::Slot& BucketSender::slot() {
  if (slot_ == nullptr) {
    Slot& next = slots_[next_slot_];
    while (next.is_taken) {
      put_oldest();
    }
    stream_.wait_for(std::exchange(next.used, {}));
    next.is_taken = true;
    next_slot_ = (next_slot_ + 1) % slots_.size();
    slot_ = &next;
  }
  return *slot_;
}

std::byte* BucketSender::buffer() {
  Slot& mine = slot();
  take_buffer(mine);
  return mine.buffer.data();
}

std::byte* BucketSender::result() {
  Slot& mine = slot();
  take_result(mine);
  return mine.result.data();
}

std::byte* BucketSender::partial() {
  Slot& mine = slot();
  take_partial(mine);
  return mine.partial.data();
}

void BucketSender::take_buffer(Slot& slot) {
  if (slot.buffer.data() == nullptr) {
    const std::size_t bytes =
        bucket_buffer_bytes(options_.largest_shard_numel, reduction_.num_ranks(),
                            options_.wire_dtype, options_.has_totals);
    slot.buffer = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::take_result(Slot& slot) {
  if (slot.result.data() == nullptr) {
    const std::size_t bytes =
        static_cast<std::size_t>(options_.largest_shard_numel) * bytes_of(options_.wire_dtype);
    slot.result = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::take_partial(Slot& slot) {
  const std::size_t bytes = reduction_.partial_bytes(options_.largest_shard_numel);
  if (slot.partial.data() == nullptr && bytes > 0) {
    slot.partial = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::reserve(std::size_t num_slots) {
  for (std::size_t i = 0; i < num_slots; ++i) {
    take_buffer(slots_[i]);
    take_result(slots_[i]);
    take_partial(slots_[i]);
  }
}

void BucketSender::put_oldest() {
  if (sent_.front().replica_sum != ReplicaSum::kNone) {
    start_replica_sum(sent_.front());
  }
  const Sent sent = std::move(sent_.front());
  sent_.pop_front();
  if (sent.slot != nullptr) {
    sent.slot->is_taken = false;
  }
  stream_.wait_for(sent.reduced);
  Pending used = put_values(sent);
  if (sent.slot != nullptr) {
    sent.slot->used = std::move(used);
  }
}

Pending BucketSender::put_values(const Sent& sent) {
  if (sent.replaces && sent.dtype == DType::kFloat32) {
    return shards_.replace(sent.pieces, reinterpret_cast<const float*>(sent.values));
  }
  for (const Piece& piece : sent.pieces) {
    if (sent.replaces && piece.shard_begin == 0) {
      shards_.restart(piece.param);
    }
  }
  return shards_.put(sent.pieces, sent.values);
}

void BucketSender::put_ready() {
  start_ready_sums();
  while (!sent_.empty() && sent_.front().replica_sum == ReplicaSum::kNone &&
         is_ready(sent_.front())) {
    put_oldest();
  }
}

void BucketSender::put_all() {
  while (!sent_.empty()) {
    put_oldest();
  }
}

void BucketSender::wait_reduced() {
  start_replica_sums();
  for (const Pending& reduced : in_flight_) {
    reduced.wait();
  }
  in_flight_.clear();
}

void BucketSender::wait() {
  put_all();
  stream_.synchronize();
  // A stream may have the numbers before the ranks have agreed on the call that reduced them.
  stream_.wait_on_host(in_flight_);
  in_flight_.clear();
}

bool BucketSender::is_under_way() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const Pending& each) { return !each.done(); });
}

void BucketSender::clear() noexcept {
  try {
    start_replica_sums();  // other replicas may have started theirs
  } catch (...) {          // as below
  }
  for (const Pending& reduced : in_flight_) {
    try {
      reduced.wait();
    } catch (...) {  // the group repeats it to whoever calls it next
    }
  }
  in_flight_.clear();
  sent_.clear();
  for (Slot& slot : slots_) {
    slot.is_taken = false;
  }
  slot_ = nullptr;
  direct_ = {};
}

}  // namespace tessera::grad
