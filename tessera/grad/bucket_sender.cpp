#include "tessera/grad/bucket_sender.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::grad {

using device::Pending;

void append_part(std::vector<ResultPart>& parts, const BucketLayout& layout, const Piece& piece,
                 float* region, bool adds) {
  const auto id = static_cast<std::size_t>(piece.param);
  ResultPart part{nullptr, piece.bucket_offset, piece.numel, adds};
  if (layout.on_nvme[id]) {
    part.nvme = {piece.param, piece.shard_begin, piece.numel};
    parts.push_back(part);
    return;
  }
  part.to = region + layout.region_offset[id] + piece.shard_begin;
  if (!parts.empty() && parts.back().to != nullptr && parts.back().adds == adds &&
      parts.back().to + parts.back().numel == part.to &&
      parts.back().bucket_offset + parts.back().numel == part.bucket_offset) {
    parts.back().numel += part.numel;
  } else {
    parts.push_back(part);
  }
}

BucketSender::BucketSender(GradientStream& stream, comm::Group& group, DType wire_dtype,
                           std::int64_t largest_shard_numel)
    : stream_(stream),
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

void BucketSender::send(const Bucket& bucket, std::vector<ResultPart> parts,
                        const comm::Label& label) {
  comm::CallOptions options;
  options.label = label;
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
  float* output = nullptr;
  if (parts.size() == 1 && parts.front().to != nullptr && !parts.front().adds) {
    output = std::exchange(parts, {}).front().to;
  } else {
    output = scratch();
  }
  if (slot_ != nullptr) {
    slot_->met = std::make_shared<std::atomic<bool>>(false);
    options.met = slot_->met;
  }
  Pending reduced = group_.start_reduce_scatter(input, output, bucket.shard_numel, wire_dtype_,
                                                DType::kFloat32, options);
  if (slot_ != nullptr) {
    slot_->reduced = reduced;
    slot_->parts = std::move(parts);
    slot_ = nullptr;
  }
  in_flight_.push_back(std::move(reduced));
  ReducerStats& stats = stream_.stats();
  ++stats.num_reductions;
  stats.reduced_bytes +=
      static_cast<std::uint64_t>(bucket.shard_numel) * num_ranks() * bytes_of(wire_dtype_);
}

bool BucketSender::waits_for_no_rank() const {
  const Slot& next = slots_[next_slot_];
  return slot_ != nullptr || next.reduced.done() || *next.met;
}

BucketSender::Slot& BucketSender::slot() {
  if (slot_ == nullptr) {
    Slot& next = slots_[next_slot_];
    finish(next);
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

float* BucketSender::scratch() {
  Slot& mine = slot();
  take_scratch(mine);
  return reinterpret_cast<float*>(mine.scratch.data());
}

void BucketSender::take_buffer(Slot& slot) {
  if (slot.buffer.data() == nullptr) {
    const std::size_t bytes =
        static_cast<std::size_t>(largest_shard_numel_) * num_ranks() * bytes_of(wire_dtype_);
    slot.buffer = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::take_scratch(Slot& slot) {
  if (slot.scratch.data() == nullptr) {
    const std::size_t bytes = static_cast<std::size_t>(largest_shard_numel_) * sizeof(float);
    slot.scratch = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
  }
}

void BucketSender::reserve(std::size_t num_slots) {
  for (std::size_t i = 0; i < num_slots; ++i) {
    take_buffer(slots_[i]);
    take_scratch(slots_[i]);
  }
}

void BucketSender::finish(Slot& slot) {
  stream_.wait_for(std::exchange(slot.reduced, {}));
  const auto* results = reinterpret_cast<const float*>(slot.scratch.data());
  for (const ResultPart& part : std::exchange(slot.parts, {})) {
    const float* result = results + part.bucket_offset;
    if (part.to == nullptr) {
      stream_.put_on_nvme(part.nvme, result, DType::kFloat32, part.adds);
    } else if (part.adds) {
      stream_.add(part.to, result, DType::kFloat32, part.numel);
    } else {
      stream_.copy(part.to, DType::kFloat32, result, DType::kFloat32, part.numel);
    }
  }
}

void BucketSender::wait() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    finish(slots_[(next_slot_ + i) % slots_.size()]);
  }
  for (const Pending& reduced : in_flight_) {
    stream_.wait_for(reduced);
  }
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
  for (Slot& slot : slots_) {
    slot.reduced = {};
    slot.parts.clear();
  }
  slot_ = nullptr;
  direct_ = {};
}

}  // namespace tessera::grad
