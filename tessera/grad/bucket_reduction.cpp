#include "tessera/grad/bucket_reduction.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {

using device::Pending;

BucketReduction::BucketReduction(comm::Group& group, const ReductionHops& hops,
                                 const comm::Codec* codec, const ReducerOptions& options)
    : group_(group), hops_(hops), codec_(group.size() > 1 ? codec : nullptr), options_(options) {
  TESSERA_INVARIANT((hops.inside == nullptr) == (hops.across == nullptr),
                    "a reduction has one of its two hops");
  TESSERA_INVARIANT(
      !takes_two_hops() || (hops.inside->size() * hops.across->size() == group.size() &&
                            hops.across->size() == options.num_hosts),
      "two hops of ", takes_two_hops() ? hops.inside->size() : 0, " and ",
      takes_two_hops() ? hops.across->size() : 0, " ranks reduce gradients of ", group.size(),
      " ranks on ", options.num_hosts, " hosts");
  TESSERA_INVARIANT(takes_two_hops() || options.num_hosts == 1, "gradients of ", options.num_hosts,
                    " hosts are to be reduced in two hops, and there are no groups for it");
}

bool BucketReduction::is_stream_ordered() const {
  return takes_two_hops() ? hops_.inside->is_stream_ordered() && hops_.across->is_stream_ordered()
                          : group_.is_stream_ordered();
}

std::size_t BucketReduction::partial_bytes(std::int64_t shard_numel) const {
  return takes_two_hops() ? grad::partial_bytes(shard_numel, options_) : 0;
}

BucketReduction::Started BucketReduction::start(Call call) const {
  return takes_two_hops() ? start_two(std::move(call)) : start_one(std::move(call));
}

std::uint64_t BucketReduction::sent_bytes(const comm::Group& group, std::int64_t shard_numel,
                                          DType dtype) const {
  const std::size_t bytes = codec_ != nullptr
                                ? codec_->wire_bytes(shard_numel)
                                : static_cast<std::size_t>(shard_numel) * bytes_of(dtype);
  return static_cast<std::uint64_t>(bytes) * static_cast<std::uint64_t>(group.size() - 1);
}

BucketReduction::Started BucketReduction::start_one(Call call) const {
  comm::CallOptions options;
  options.label = call.label;
  options.stream = call.stream;
  options.keep_alive = std::move(call.keep_alive);
  options.met = std::make_shared<std::atomic<bool>>(false);
  options.codec = codec_;
  Pending reduced = group_.start_reduce_scatter(call.input, call.output, call.shard_numel,
                                                options_.wire_dtype, options_.wire_dtype, options);
  return {
      reduced, options.met, {reduced}, sent_bytes(group_, call.shard_numel, options_.wire_dtype)};
}

BucketReduction::Started BucketReduction::start_two(Call call) const {
  const std::int64_t partial_numel = call.shard_numel * hops_.across->size();
  comm::CallOptions options;
  options.label = call.label;
  options.stream = call.stream;
  options.codec = codec_;
  comm::CallOptions first = options;
  first.keep_alive = std::move(call.keep_alive);
  const Pending inside = hops_.inside->start_reduce_scatter(
      call.input, call.partial, partial_numel, options_.wire_dtype, DType::kFloat32, first);
  options.ready = inside;
  Pending across = hops_.across->start_reduce_scatter(
      call.partial, call.output, call.shard_numel, DType::kFloat32, options_.wire_dtype, options);
  comm::CallOptions word;
  word.label = options.label;
  word.content_hash = static_cast<std::uint64_t>(call.shard_numel);
  word.met = std::make_shared<std::atomic<bool>>(false);
  const Pending started = group_.start_barrier(word);
  return {across,
          word.met,
          {inside, across, started},
          sent_bytes(*hops_.inside, partial_numel, options_.wire_dtype) +
              sent_bytes(*hops_.across, call.shard_numel, DType::kFloat32)};
}

}  // namespace tessera::grad
