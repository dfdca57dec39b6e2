#include "tessera/grad/bucket_sink.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {

BucketSink::BucketSink(GradientStream& stream, const BucketLayout& layout,
                       const ReducerOptions& options)
    : stream_(stream),
      params_(stream.parts().params),
      layout_(layout),
      wire_dtype_(options.wire_dtype),
      sender_(stream, stream.parts().group, options.wire_dtype, layout.largest_shard_numel),
      dynamic_(stream, layout, options),
      entries_(static_cast<std::size_t>(params_.num_params())),
      num_missing_(layout.buckets.size()),
      current_(layout.buckets.size()) {
  for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
    const std::vector<Piece>& pieces = layout.buckets[b].pieces;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
      entry_of(pieces[p]).pieces.push_back({b, p});
    }
  }
  if (stream_.parts().is_planned) {
    region();
    sender_.reserve(num_bucket_slots(layout));
    dynamic_.reserve();
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
  is_open_ = false;
  sender_.rewind();
  dynamic_.begin_backward(is_first);
  if (is_first && layout_.region_numel > layout_.bucketed_numel) {
    stream_.zero(
        region() + layout_.bucketed_numel,
        static_cast<std::size_t>(layout_.region_numel - layout_.bucketed_numel) * sizeof(float));
  }
  for (std::size_t b = 0; b < num_missing_.size(); ++b) {
    num_missing_[b] = layout_.buckets[b].pieces.size();
  }
}

void BucketSink::check(const shard::Param& param, const FullGradient& gradient) const {
  stream_.check_convertible(param.name(), gradient.dtype, wire_dtype_);
}

void BucketSink::take(const shard::Param& param, FullGradient gradient) {
  const auto id = static_cast<std::size_t>(param.id());
  if (layout_.is_dynamic[id]) {
    dynamic_.take(param, std::move(gradient));
    return;
  }
  Entry& entry = entries_[id];
  if (entry.pieces.empty()) {
    return;  // no elements
  }
  stream_.order_behind_compute();
  stream_.hold(bytes_of_full(param, gradient));
  entry.gradient = std::move(gradient);
  entry.is_added = true;
  entry.num_not_sent = entry.pieces.size();
  for (const PieceOf& of : entry.pieces) {
    --num_missing_[of.bucket];
    if (is_open_ && of.bucket == current_) {
      put_piece(layout_.buckets[current_].pieces[of.piece]);
    }
  }
  advance(WaitFor::kNetwork);
  stream_.note_held();
}

void BucketSink::advance(WaitFor limit) {
  while (current_ < num_missing_.size()) {
    if (!is_open_) {
      if (limit == WaitFor::kNetwork && !sender_.waits_for_no_rank()) {
        return;
      }
      is_open_ = true;
      for (const Piece& piece : layout_.buckets[current_].pieces) {
        if (entry_of(piece).is_added) {
          put_piece(piece);
        }
      }
    }
    if (num_missing_[current_] > 0) {
      return;
    }
    send();
  }
}

void BucketSink::finish_backward() {
  advance(WaitFor::kRanks);
  while (current_ < num_missing_.size()) {
    for (const Piece& piece : layout_.buckets[current_].pieces) {
      if (!entry_of(piece).is_added) {
        sender_.put_zeros(layout_.buckets[current_], piece);
      }
    }
    num_missing_[current_] = 0;
    advance(WaitFor::kRanks);
  }
  for (Entry& entry : entries_) {
    entry.is_added = false;
  }
}

void BucketSink::put_piece(const Piece& piece) {
  Entry& entry = entry_of(piece);
  sender_.put(layout_.buckets[current_], piece, entry.gradient);
  if (--entry.num_not_sent == 0) {
    release(entry, param_of(piece));
  }
}

void BucketSink::release(Entry& entry, const shard::Param& param) {
  entry.num_not_sent = 0;
  stream_.unhold(bytes_of_full(param, entry.gradient));
  stream_.retire(std::move(entry.gradient.owner));
  entry.gradient = {};
}

void BucketSink::send() {
  const Bucket& bucket = layout_.buckets[current_];
  std::vector<ResultPart> parts;
  for (const Piece& piece : bucket.pieces) {
    append_part(parts, layout_, piece, region(), !is_first_);
  }
  sender_.send(bucket, std::move(parts), {"gradients", param_of(bucket.pieces.front()).name()});
  ++current_;
  is_open_ = false;
}

float* BucketSink::region() {
  const std::size_t bytes = static_cast<std::size_t>(layout_.region_numel) * sizeof(float);
  if (region_.bytes() != bytes) {
    region_ = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
  return reinterpret_cast<float*>(region_.data());
}

void BucketSink::reduce_dynamic(std::span<const int> ids) {
  if (stream_.parts().dynamic_group == nullptr) {
    // In one group, what is full must be before the list on every rank, not only where it could be
    // sent at once. Ranks that share a group so have got the same gradients, and all are here.
    advance(WaitFor::kRanks);
  }
  dynamic_.reduce(ids, region());
  advance(WaitFor::kNetwork);  // a buffer may be free again
}

void BucketSink::wait() {
  sender_.wait();
  dynamic_.wait();
}

ShardGradient BucketSink::shard_gradient(const shard::Param& param, bool is_zero) {
  if (is_zero && !region_is_zero_) {
    stream_.zero(region(), static_cast<std::size_t>(layout_.region_numel) * sizeof(float));
    stream_.synchronize();
    region_is_zero_ = true;
  }
  ShardGradient gradient;
  gradient.data = region() + layout_.region_offset[static_cast<std::size_t>(param.id())];
  gradient.numel = param.range().numel;
  gradient.values = gradient.data;
  return gradient;
}

void BucketSink::clear() noexcept {
  // What is full has been sent by ranks that kept nothing: they would wait for it.
  try {
    advance(WaitFor::kRanks);
  } catch (...) {  // as for what is in flight: the end counts, not what becomes of it
  }
  current_ = num_missing_.size();
  is_open_ = false;
  sender_.clear();
  dynamic_.clear();
  for (Entry& entry : entries_) {
    entry.is_added = false;
    if (entry.num_not_sent > 0) {
      release(entry, params_[static_cast<int>(&entry - entries_.data())]);
    }
  }
}

}  // namespace tessera::grad
