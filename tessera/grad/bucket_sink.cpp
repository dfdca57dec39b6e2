#include "tessera/grad/bucket_sink.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::grad {

using device::MemoryKind;
using device::Pending;

namespace {

std::int64_t bytes_of_full(const shard::Param& param, const FullGradient& gradient) {
  return param.layout().numel() * static_cast<std::int64_t>(bytes_of(gradient.dtype));
}

}  // namespace

BucketSink::BucketSink(GradientStream& stream, const BucketLayout& layout, DType wire_dtype)
    : stream_(stream),
      group_(stream.parts().group),
      params_(stream.parts().params),
      layout_(layout),
      wire_dtype_(wire_dtype),
      entries_(static_cast<std::size_t>(params_.num_params())),
      num_missing_(layout.buckets.size()) {
  for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
    const std::vector<Piece>& pieces = layout.buckets[b].pieces;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      entry_of(pieces[p]).pieces.push_back({b, p});
    }
  }
}

BucketSink::~BucketSink() {
  clear();
  stream_.drain();  // copies into buffers, sums into the region
}

void BucketSink::begin_backward(bool is_first) {
  if (!is_first) {
    stream_.check_can_add();
  }
  is_first_ = is_first;
  region_is_zero_ = false;
  current_ = 0;
  next_slot_ = 0;  // so that a model with one bucket takes one buffer
  for (std::size_t b = 0; b < num_missing_.size(); ++b) {
    num_missing_[b] = layout_.buckets[b].pieces.size();
  }
}

void BucketSink::check(const shard::Param& param, const FullGradient& gradient) const {
  stream_.check_convertible(param.name(), gradient.dtype, wire_dtype_);
}

void BucketSink::take(const shard::Param& param, FullGradient gradient) {
  Entry& entry = entries_[static_cast<std::size_t>(param.id())];
  if (entry.pieces.empty()) {
    return;  // no elements
  }
  stream_.order_behind_compute();
  stream_.hold(bytes_of_full(param, gradient));
  entry.gradient = std::move(gradient);
  entry.has_come = true;
  entry.num_not_sent = entry.pieces.size();
  for (const PieceOf& of : entry.pieces) {
    --num_missing_[of.bucket];
    if (of.bucket == current_) {
      put_piece(layout_.buckets[current_].pieces[of.piece]);
    }
  }
  advance();
  stream_.note_held();
}

void BucketSink::advance() {
  while (current_ < num_missing_.size() && num_missing_[current_] == 0) {
    send();
    if (current_ == num_missing_.size()) {
      return;
    }
    for (const Piece& piece : layout_.buckets[current_].pieces) {
      if (entry_of(piece).has_come) {
        put_piece(piece);
      }
    }
  }
}

void BucketSink::finish_backward() {
  while (current_ < num_missing_.size()) {
    if (num_missing_[current_] > 0) {
      for (const Piece& piece : layout_.buckets[current_].pieces) {
        if (!entry_of(piece).has_come) {
          zero_piece(piece);
        }
      }
      num_missing_[current_] = 0;
    }
    advance();
  }
  for (Entry& entry : entries_) {
    entry.has_come = false;
  }
}

bool BucketSink::is_whole_param(const Bucket& bucket) const {
  const Piece& piece = bucket.pieces.front();
  const shard::Layout& layout = param_of(piece).layout();
  return bucket.pieces.size() == 1 && piece.numel == layout.shard_numel() &&
         layout.padded_numel() == layout.numel();
}

void BucketSink::put_piece(const Piece& piece) {
  Entry& entry = entry_of(piece);
  if (entry.gradient.dtype == wire_dtype_ && is_whole_param(layout_.buckets[current_])) {
    direct_ = entry.gradient;
  } else {
    copy_piece(piece, entry.gradient);
  }
  if (--entry.num_not_sent == 0) {
    release(entry, param_of(piece));
  }
}

void BucketSink::release(Entry& entry, const shard::Param& param) {
  entry.num_not_sent = 0;
  stream_.let_go(bytes_of_full(param, entry.gradient));
  stream_.retire(std::move(entry.gradient.owner));
  entry.gradient = {};
}

// Rank r's part of the bucket gets its elements of the gradient, and zeros where those end.
void BucketSink::copy_piece(const Piece& piece, const FullGradient& gradient) {
  const shard::Layout& layout = param_of(piece).layout();
  const std::size_t wire_bytes = bytes_of(wire_dtype_);
  const auto* from = static_cast<const std::byte*>(gradient.data);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride =
      static_cast<std::size_t>(layout_.buckets[current_].shard_numel) * wire_bytes;
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

void BucketSink::zero_piece(const Piece& piece) {
  const std::size_t wire_bytes = bytes_of(wire_dtype_);
  std::byte* to = buffer() + static_cast<std::size_t>(piece.bucket_offset) * wire_bytes;
  const std::size_t stride =
      static_cast<std::size_t>(layout_.buckets[current_].shard_numel) * wire_bytes;
  for (std::size_t rank = 0; rank < num_ranks(); ++rank, to += stride) {
    stream_.zero(to, static_cast<std::size_t>(piece.numel) * wire_bytes);
  }
}

void BucketSink::send() {
  const Bucket& bucket = layout_.buckets[current_];
  comm::CallOptions options;
  options.label = {"gradients", param_of(bucket.pieces.front()).name()};
  options.stream = &stream_.stream();
  const void* input = direct_.data;
  if (input != nullptr) {
    options.keep_alive = std::move(direct_.owner);
  } else {
    // Not kept alive by the call: memory of the device must go back before the device does, and a
    // group may outlive it. Buffers stay until every call has come to its end, see clear().
    input = buffer();
  }
  direct_ = {};
  float* output = is_first_ ? region() + bucket.region_offset : scratch();
  Pending reduced = group_.start_reduce_scatter(input, output, bucket.shard_numel, wire_dtype_,
                                                DType::kFloat32, options);
  if (slot_ != nullptr) {
    slot_->reduced = reduced;
    slot_->to_add = is_first_ ? nullptr : &bucket;
    slot_ = nullptr;
  }
  in_flight_.push_back(std::move(reduced));
  ++current_;
  ReducerStats& stats = stream_.stats();
  ++stats.num_reductions;
  stats.reduced_bytes +=
      static_cast<std::uint64_t>(bucket.shard_numel) * num_ranks() * bytes_of(wire_dtype_);
}

BucketSink::Slot& BucketSink::slot() {
  if (slot_ == nullptr) {
    Slot& next = slots_[next_slot_];
    settle(next);
    next_slot_ = (next_slot_ + 1) % slots_.size();
    slot_ = &next;
  }
  return *slot_;
}

std::byte* BucketSink::buffer() {
  Slot& mine = slot();
  if (mine.buffer.data() == nullptr) {
    const std::size_t bytes =
        static_cast<std::size_t>(layout_.largest_shard_numel) * num_ranks() * bytes_of(wire_dtype_);
    mine.buffer = stream_.device().allocate(MemoryKind::kDevice, bytes, Role::kGradient);
  }
  return mine.buffer.data();
}

float* BucketSink::scratch() {
  Slot& mine = slot();
  if (mine.scratch.data() == nullptr) {
    mine.scratch = stream_.device().allocate(
        MemoryKind::kDevice, static_cast<std::size_t>(layout_.largest_shard_numel) * sizeof(float),
        Role::kGradient);
  }
  return reinterpret_cast<float*>(mine.scratch.data());
}

void BucketSink::settle(Slot& slot) {
  stream_.wait_for(std::exchange(slot.reduced, {}));
  if (const Bucket* bucket = std::exchange(slot.to_add, nullptr)) {
    stream_.add(region() + bucket->region_offset, slot.scratch.data(), DType::kFloat32,
                bucket->shard_numel);
  }
}

float* BucketSink::region() {
  const std::size_t bytes = static_cast<std::size_t>(layout_.region_numel) * sizeof(float);
  if (region_.bytes() != bytes) {
    region_ = stream_.device().allocate(MemoryKind::kDevice, bytes, Role::kGradient);
  }
  return reinterpret_cast<float*>(region_.data());
}

void BucketSink::wait() {
  for (Slot& slot : slots_) {
    settle(slot);
  }
  for (const Pending& reduced : in_flight_) {
    stream_.wait_for(reduced);
  }
  stream_.synchronize();
  in_flight_.clear();
}

ShardGradient BucketSink::shard_gradient(const shard::Param& param, bool is_zero) {
  if (is_zero && !region_is_zero_) {
    stream_.zero(region(), static_cast<std::size_t>(layout_.region_numel) * sizeof(float));
    stream_.synchronize();
    region_is_zero_ = true;
  }
  return {region() + layout_.region_offset[static_cast<std::size_t>(param.id())],
          param.range().numel};
}

void BucketSink::clear() noexcept {
  for (const Pending& reduced : in_flight_) {
    try {
      reduced.wait();
    } catch (...) {  // the group repeats it to whoever calls it next
    }
  }
  in_flight_.clear();
  for (Slot& slot : slots_) {
    slot.reduced = {};
    slot.to_add = nullptr;
  }
  slot_ = nullptr;
  direct_ = {};
  for (Entry& entry : entries_) {
    entry.has_come = false;
    if (entry.num_not_sent > 0) {
      release(entry, params_[static_cast<int>(&entry - entries_.data())]);
    }
  }
}

}  // namespace tessera::grad
