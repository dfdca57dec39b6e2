#include "tessera/grad/bucket_sender.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::grad {

using device::Pending;

BucketSender::BucketSender(GradientStream& stream, ShardGradients& shards, comm::Group& group,
                           DType wire_dtype, std::int64_t largest_shard_numel)
    : stream_(stream),
      shards_(shards),
      group_(group),
      params_(stream.parts().params),
      wire_dtype_(wire_dtype),
      largest_shard_numel_(largest_shard_numel) {}

bool BucketSender::is_whole_param(const Bucket& bucket) const {
  const Piece& piece = bucket.pieces.front();
  const shard::Layout& layout = params_[piece.param].layout();
  return bucket.pieces.size() == 1 && piece.numel == layout.shard_numel() &&
         layout.padded_numel() == layout.numel();
}

void BucketSender::put(const Bucket& bucket, const Piece& piece, const FullGradient& gradient) {
  if (gradient.dtype == wire_dtype_ && is_whole_param(bucket)) {
    direct_ = gradient;
  } else {
    copy_piece(bucket, piece, gradient);
  }
}

// Rank r's part of the bucket gets its elements of the gradient, and zeros where those end.
void BucketSender::copy_piece(const Bucket& bucket, const Piece& piece,
                              const FullGradient& gradient) {
  const shard::Layout& layout = params_[piece.param].layout();
  const std::size_t wire_bytes = bytes_of(wire_dtype_);
  const auto* from = static_cast<const std::byte*>(gradient.data);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride = static_cast<std::size_t>(bucket.shard_numel) * wire_bytes;
  for (std::size_t rank = 0; rank < num_ranks(); ++rank, to += stride) {
    const std::int64_t begin =
        static_cast<std::int64_t>(rank) * layout.shard_numel() + piece.shard_begin;
    const std::int64_t numel = std::clamp<std::int64_t>(layout.numel() - begin, 0, piece.numel);
    if (numel > 0) {
      stream_.copy(to, wire_dtype_,
                   from + static_cast<std::size_t>(begin) * bytes_of(gradient.dtype),
                   gradient.dtype, numel);
    }
    stream_.zero(to + static_cast<std::size_t>(numel) * wire_bytes,
                 static_cast<std::size_t>(piece.numel - numel) * wire_bytes);
  }
}

void BucketSender::put_zeros(const Bucket& bucket, const Piece& piece) {
  const std::size_t wire_bytes = bytes_of(wire_dtype_);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride = static_cast<std::size_t>(bucket.shard_numel) * wire_bytes;
  for (std::size_t rank = 0; rank < num_ranks(); ++rank, to += stride) {
    stream_.zero(to, static_cast<std::size_t>(piece.numel) * wire_bytes);
  }
}

void BucketSender::send(const Bucket& bucket, const comm::Label& label) {
  comm::CallOptions options;
  options.label = label;
  options.stream = &stream_.stream();
  options.met = std::make_shared<std::atomic<bool>>(false);
  const bool is_direct = direct_.data != nullptr;
  const void* input = direct_.data;
  if (is_direct) {
    options.keep_alive = std::move(direct_.owner);
  } else {
    // Not kept alive by the call: memory of the device must go back before the device does, and a
    // group may outlive it. Buffers stay until every call has come to its end, see clear().
    input = buffer();
  }
  direct_ = {};
  void* output = shards_.target_of(bucket.pieces);
  if (output == nullptr) {
    output = result();
  }
  Pending reduced = group_.start_reduce_scatter(input, output, bucket.shard_numel, wire_dtype_,
                                                wire_dtype_, options);
  sent_.push_back({bucket.pieces, static_cast<const std::byte*>(output), reduced, options.met,
                   std::exchange(slot_, nullptr)});
  in_flight_.push_back(reduced);
  const auto bytes = static_cast<std::int64_t>(bucket.shard_numel) * group_.size() *
                     static_cast<std::int64_t>(bytes_of(wire_dtype_));
  ReducerStats& stats = stream_.stats();
  ++stats.num_reductions;
  stats.reduced_bytes += static_cast<std::uint64_t>(bytes);
  if (is_direct) {
    stream_.count_kept(std::move(reduced), options.met, bytes);
  }
}

bool BucketSender::waits_for_no_rank() const {
  const Slot& next = slots_[next_slot_];
  if (slot_ != nullptr || !next.is_taken) {
    return true;
  }
  const auto sent = std::find_if(sent_.begin(), sent_.end(),
                                 [&](const Sent& each) { return each.slot == &next; });
  return sent->reduced.done() || *sent->met;
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

void BucketSender::take_buffer(Slot& slot) {
  if (slot.buffer.data() == nullptr) {
    const std::size_t bytes =
        static_cast<std::size_t>(largest_shard_numel_) * num_ranks() * bytes_of(wire_dtype_);
    slot.buffer = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::take_result(Slot& slot) {
  if (slot.result.data() == nullptr) {
    const std::size_t bytes =
        static_cast<std::size_t>(largest_shard_numel_) * bytes_of(wire_dtype_);
    slot.result = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::reserve(std::size_t num_slots) {
  for (std::size_t i = 0; i < num_slots; ++i) {
    take_buffer(slots_[i]);
    take_result(slots_[i]);
  }
}

void BucketSender::put_oldest() {
  const Sent sent = std::move(sent_.front());
  sent_.pop_front();
  if (sent.slot != nullptr) {
    sent.slot->is_taken = false;
  }
  stream_.wait_for(sent.reduced);
  Pending used = shards_.put(sent.pieces, sent.result);
  if (sent.slot != nullptr) {
    sent.slot->used = std::move(used);
  }
}

void BucketSender::put_ready() {
  const auto is_ready = [this](const Sent& sent) {
    return sent.reduced.done() || (group_.is_stream_ordered() && *sent.met);
  };
  while (!sent_.empty() && is_ready(sent_.front())) {
    put_oldest();
  }
}

void BucketSender::put_all() {
  while (!sent_.empty()) {
    put_oldest();
  }
}

void BucketSender::wait_reduced() {
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

void BucketSender::clear() noexcept {
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
