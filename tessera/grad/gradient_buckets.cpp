#include "tessera/grad/gradient_buckets.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

std::unique_ptr<QuantError> make_quant_error(GradientStream& stream, const BucketLayout& layout,
                                             const ReducerOptions& options) {
  const std::int64_t largest = std::max(layout.largest_shard_numel, layout.largest_dynamic_numel);
  return stream.parts().codec == nullptr || stream.parts().group.size() == 1
             ? nullptr
             : std::make_unique<QuantError>(stream, *stream.parts().codec,
                                            quant_scratch_bytes(largest, options));
}

}  // namespace

GradientBuckets::GradientBuckets(GradientStream& stream, ShardGradients& shards,
                                 const BucketLayout& layout, const ReducerOptions& options)
    : stream_(stream),
      params_(stream.parts().params),
      layout_(layout),
      quant_error_(make_quant_error(stream, layout, options)),
      sender_(
          stream, shards,
          BucketReduction(stream.parts().group, stream.parts().hops, stream.parts().codec, options),
          {options.wire_dtype, layout.largest_shard_numel, stream.replica_sums().has_totals(),
           quant_error_.get()}),
      dynamic_(stream, shards, layout, options, quant_error_.get()),
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
    sender_.reserve(num_bucket_slots(layout));
    dynamic_.reserve();
    if (quant_error_) {
      quant_error_->reserve();
    }
  }
}

GradientBuckets::~GradientBuckets() {
  clear();
  stream_.drain();  // copies into buffers, sums into the region
}

void GradientBuckets::begin_backward(ReplicaSum replica_sum) {
  replica_sum_ = replica_sum;
  current_ = 0;
  is_open_ = false;
  sender_.rewind();
  for (std::size_t b = 0; b < num_missing_.size(); ++b) {
    num_missing_[b] = layout_.buckets[b].pieces.size();
  }
}

void GradientBuckets::take(const shard::Param& param, FullGradient gradient) {
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

void GradientBuckets::advance(WaitFor limit) {
  sender_.put_ready();
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

void GradientBuckets::finish_backward() {
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
  if (replica_sum_ != ReplicaSum::kNone) {
    sender_.start_replica_sums();
    dynamic_.sum_over_replicas();
  }
}

void GradientBuckets::sum_over_replicas() {
  sender_.put_all();
  sender_.rewind();
  for (const Bucket& bucket : layout_.buckets) {
    sender_.sum_home(bucket, DType::kFloat32);
  }
  dynamic_.sum_over_replicas();
}

void GradientBuckets::put_piece(const Piece& piece) {
  Entry& entry = entry_of(piece);
  sender_.put(layout_.buckets[current_], piece, entry.gradient);
  if (--entry.num_not_sent == 0) {
    release(entry, param_of(piece));
  }
}

void GradientBuckets::release(Entry& entry, const shard::Param& param) {
  entry.num_not_sent = 0;
  const std::int64_t bytes = bytes_of_full(param, entry.gradient);
  stream_.unhold(bytes);
  stream_.retire(std::move(entry.gradient.owner), {}, bytes);
  entry.gradient = {};
}

void GradientBuckets::send() {
  const Bucket& bucket = layout_.buckets[current_];
  sender_.send(bucket, {"gradients", param_of(bucket.pieces.front()).name()}, replica_sum_);
  ++current_;
  is_open_ = false;
}

void GradientBuckets::reduce_dynamic(std::span<const int> ids) {
  if (stream_.parts().dynamic_group == nullptr) {
    // In one group, what is full must be before the list on every rank, not only where it could be
    // sent at once. Ranks that share a group so have got the same gradients, and all are here.
    advance(WaitFor::kRanks);
  }
  dynamic_.reduce(ids);
  advance(WaitFor::kNetwork);  // a buffer may be free again
}

void GradientBuckets::wait() {
  sender_.wait();
  dynamic_.wait();
}

void GradientBuckets::put_all() {
  sender_.put_all();
  dynamic_.put_all();
}

void GradientBuckets::wait_reduced() {
  sender_.wait_reduced();
  dynamic_.wait_reduced();
}

QuantErrorStats GradientBuckets::take_quant_error() {
  return quant_error_ ? quant_error_->take() : QuantErrorStats();
}

bool GradientBuckets::is_under_way() noexcept {
  try {
    advance(WaitFor::kNetwork);
  } catch (...) {  // the group has failed, and what is in flight with it
  }
  return sender_.is_under_way() || dynamic_.is_under_way();
}

void GradientBuckets::clear() noexcept {
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
