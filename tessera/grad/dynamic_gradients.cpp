#include "tessera/grad/dynamic_gradients.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

BucketReduction reduction_of(const ReducerParts& parts, const ReducerOptions& options) {
  return parts.dynamic_group != nullptr
             ? BucketReduction(*parts.dynamic_group, parts.dynamic_hops, parts.codec, options)
             : BucketReduction(parts.group, parts.hops, parts.codec, options);
}

}  // namespace

DynamicGradients::DynamicGradients(GradientStream& stream, ShardGradients& shards,
                                   const BucketLayout& layout, const ReducerOptions& options,
                                   QuantError* quant_error)
    : stream_(stream),
      shards_(shards),
      params_(stream.parts().params),
      layout_(layout),
      options_(options),
      sender_(stream, shards, reduction_of(stream.parts(), options),
              {options.wire_dtype, layout.largest_dynamic_numel,
               stream.replica_sums().has_dynamic_totals(), quant_error}),
      num_lists_(static_cast<std::size_t>(params_.num_params()), 0),
      is_local_(num_lists_.size(), false) {}

void DynamicGradients::reserve() { sender_.reserve(num_dynamic_slots(layout_)); }

void DynamicGradients::take(const shard::Param& param, FullGradient gradient) {
  if (param.layout().numel() == 0) {
    return;
  }
  stream_.order_behind_compute();
  stream_.hold(bytes_of_full(param, gradient));
  pending_.insert_or_assign(param.id(), std::move(gradient));
  stream_.note_held();
}

std::vector<int> DynamicGradients::pending() const {
  std::vector<int> ids;
  ids.reserve(pending_.size());
  for (const auto& entry : pending_) {
    ids.push_back(entry.first);
  }
  return ids;
}

void DynamicGradients::reduce(std::span<const int> ids) {
  sender_.put_ready();
  const auto was_reduced = [this](int id) { return num_lists_[static_cast<std::size_t>(id)] > 0; };
  if (std::any_of(ids.begin(), ids.end(), was_reduced)) {
    stream_.check_can_add();
  }
  begin_after_total(ids);
  std::vector<BucketParam> list;
  list.reserve(ids.size());
  for (const int id : ids) {
    list.push_back({id, params_[id].layout().shard_numel(), false,
                    *layout_.home[static_cast<std::size_t>(id)]});
  }
  const BucketLayout plan = plan_buckets(list, params_.num_ranks(), options_.bucket_bytes,
                                         bytes_of(options_.wire_dtype), options_.block_numel());
  for (const Bucket& bucket : plan.buckets) {
    for (const Piece& piece : bucket.pieces) {
      put_piece(bucket, piece);
    }
    send(bucket);
  }
  for (const int id : ids) {
    ++num_lists_[static_cast<std::size_t>(id)];
    is_local_[static_cast<std::size_t>(id)] = stream_.parts().replicas != nullptr;
  }
}

void DynamicGradients::put_piece(const Bucket& bucket, const Piece& piece) {
  const auto found = pending_.find(piece.param);
  if (found == pending_.end()) {
    sender_.put_zeros(bucket, piece);
    return;
  }
  sender_.put(bucket, piece, found->second);
  if (piece.shard_begin + piece.numel == params_[piece.param].layout().shard_numel()) {
    FullGradient gradient = std::move(found->second);
    pending_.erase(found);
    release(piece.param, std::move(gradient));
  }
}

void DynamicGradients::send(const Bucket& bucket) {
  std::string names = params_[bucket.pieces.front().param].name();
  if (bucket.pieces.size() > 1) {
    names += " and " + std::to_string(bucket.pieces.size() - 1) + " more";
  }
  sender_.send(bucket, {"dynamic gradients", names});
}

void DynamicGradients::release(int id, FullGradient gradient) {
  const std::int64_t bytes = bytes_of_full(params_[id], gradient);
  stream_.unhold(bytes);
  stream_.retire(std::move(gradient.owner), {}, bytes);
}

void DynamicGradients::begin_after_total(std::span<const int> ids) {
  if (stream_.parts().replicas == nullptr) {
    return;
  }
  for (const int id : ids) {
    const auto i = static_cast<std::size_t>(id);
    if (num_lists_[i] > 0 && !is_local_[i]) {
      sender_.put_all();  // with the total, which all replicas have started
      if (stream_.parts().replicas->rank() > 0) {
        shards_.restart(id);
      }
    }
  }
}

void DynamicGradients::sum_over_replicas() {
  sender_.put_all();
  // Neighbours of one type travel together.
  std::vector<BucketParam> params;
  for (int id = static_cast<int>(is_local_.size()) - 1; id >= 0; --id) {  // as they are planned
    if (is_local_[static_cast<std::size_t>(id)]) {
      params.push_back({id, params_[id].layout().shard_numel(), false,
                        *layout_.home[static_cast<std::size_t>(id)]});
    }
  }
  while (!params.empty()) {
    const bool single = is_single(params.back().id);
    auto begin = params.end();
    while (begin != params.begin() && is_single(std::prev(begin)->id) == single) {
      --begin;
    }
    start_totals({begin, params.end()}, single ? options_.wire_dtype : DType::kFloat32);
    params.erase(begin, params.end());
  }
  is_local_.assign(is_local_.size(), false);
}

void DynamicGradients::start_totals(std::span<const BucketParam> params, DType dtype) {
  const BucketLayout plan = plan_buckets(params, params_.num_ranks(), options_.bucket_bytes,
                                         bytes_of(options_.wire_dtype), options_.block_numel());
  for (const Bucket& bucket : plan.buckets) {
    sender_.sum_home(bucket, dtype);
  }
}

void DynamicGradients::drop() noexcept {
  for (auto& [id, gradient] : pending_) {
    release(id, std::move(gradient));
  }
  pending_.clear();
}

void DynamicGradients::clear() noexcept {
  sender_.clear();
  drop();
  num_lists_.assign(num_lists_.size(), 0);
  is_local_.assign(is_local_.size(), false);
}

}  // namespace tessera::grad
