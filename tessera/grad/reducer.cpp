#include "tessera/grad/reducer.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/grad/element_loops.h"
#include "tessera/grad/gradient_buckets.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/shard_gradients.h"
#include "tessera/grad/used_params.h"

namespace tessera::grad {
namespace {

// Of Reducer::leave(): ranks that fail alike are as far within it; and how often it looks.
constexpr std::chrono::seconds kLeaveLimit{1};
constexpr std::chrono::milliseconds kLeaveLook{1};

BucketLayout plan(const ReducerParts& parts, const ReducerOptions& options) {
  const shard::ParamTable& params = parts.params;
  std::vector<BucketParam> trainable;
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      trainable.push_back({id, params[id].layout().shard_numel(), params[id].dynamic(),
                           params[id].placement().gradient});
    }
  }
  return plan_buckets(trainable, params.num_ranks(), options.bucket_bytes,
                      bytes_of(options.wire_dtype), options.block_numel());
}

std::vector<comm::Group*> hop_groups(const ReducerParts& parts) {
  std::vector<comm::Group*> groups = {parts.hops.inside, parts.hops.across,
                                      parts.dynamic_hops.inside, parts.dynamic_hops.across};
  std::erase(groups, nullptr);
  return groups;
}

}  // namespace

ReducerOptions ReducerOptions::from(const Config& config, DType param_dtype) {
  ReducerOptions options;
  options.bucket_bytes = config.get_bytes("grad.bucket_bytes");
  const std::string& wire = config.get_string("grad.wire_dtype");
  options.wire_dtype = wire == "fp32"   ? DType::kFloat32
                       : wire == "bf16" ? DType::kBFloat16
                       : wire == "fp16" ? DType::kFloat16
                                        : param_dtype;
  if (config.get_bool("quant.gradients")) {
    options.blocks = quant::BlockFormat{static_cast<int>(config.get_int("quant.gradient_bits")),
                                        config.get_int("quant.block_numel")};
    TESSERA_CHECK(
        kPieceStep % options.blocks->block_numel == 0, ConfigError,
        config.shown("quant.block_numel"), " does not divide ", kPieceStep,
        ", at multiples of which gradients are cut (quant.gradients); take a power of two "
        "from 32 to ",
        kPieceStep, ", the default is 128");
  }
  return options;
}

Reducer::Reducer(const ReducerParts& parts, const ReducerOptions& options)
    : params_(parts.params),
      spans_(parts.spans),
      layout_(plan(parts, options)),
      stream_(std::make_unique<GradientStream>(parts)),
      is_added_(static_cast<std::size_t>(parts.params.num_params()), false),
      used_(parts.all_ranks != nullptr ? *parts.all_ranks : parts.group, parts.params.num_params()),
      shards_(std::make_unique<ShardGradients>(*stream_, layout_, options.wire_dtype)),
      buckets_(stream_->sends()
                   ? std::make_unique<GradientBuckets>(*stream_, *shards_, layout_, options)
                   : nullptr) {
  TESSERA_INVARIANT(parts.group.size() == params_.num_ranks(), "a group of ", parts.group.size(),
                    " ranks reduces gradients for ", params_.num_ranks());
  TESSERA_INVARIANT(
      parts.dynamic_group == nullptr || (parts.dynamic_group->size() == parts.group.size() &&
                                         parts.dynamic_group->rank() == parts.group.rank()),
      "dynamic gradients are reduced by rank ", parts.dynamic_group->rank(), " of ",
      parts.dynamic_group->size(), ", others by rank ", parts.group.rank(), " of ",
      parts.group.size());
  TESSERA_INVARIANT((parts.codec != nullptr) == options.blocks.has_value(),
                    "gradients are quantised, and there is no codec, or the other way round");
  check_shards();
  TESSERA_CHECK(is_gradient_dtype(options.wire_dtype), ConfigError, "gradients cannot travel as ",
                to_string(options.wire_dtype), "; use fp32, bf16 or fp16");
}

Reducer::~Reducer() {
  if (std::uncaught_exceptions() > num_exceptions_) {
    leave();
  }
}

void Reducer::check_shards() const {
  const ReducerParts& parts = stream_->parts();
  const std::set<int> shards(parts.shard_of_rank.begin(), parts.shard_of_rank.end());
  const int num_ranks = params_.num_ranks();
  TESSERA_INVARIANT(
      parts.shard_of_rank.empty() ||
          (std::ssize(parts.shard_of_rank) == num_ranks && std::ssize(shards) == num_ranks &&
           *shards.begin() == 0 && *shards.rbegin() == num_ranks - 1),
      "the ", num_ranks, " ranks of a group do not hold one shard each");
  TESSERA_INVARIANT(
      parts.hops.inside == nullptr ||
          parts.hops.inside->rank() * parts.hops.across->size() + parts.hops.across->rank() ==
              params_.rank(),
      "shard ", params_.rank(), " is reduced in two hops by another rank");
  TESSERA_INVARIANT(stream_->shard_of(parts.group.rank()) == params_.rank(), "rank ",
                    parts.group.rank(), " reduces gradients of shard ",
                    stream_->shard_of(parts.group.rank()), ", and holds shard ", params_.rank());
}

const shard::Param& Reducer::trainable(int id) const {
  TESSERA_INVARIANT(id >= 0 && id < static_cast<int>(is_added_.size()), "parameter ", id,
                    " is not one of the ", is_added_.size(), " whose gradients are reduced");
  const shard::Param& param = params_[id];
  TESSERA_CHECK(param.trainable(), ConfigError, "parameter '", param.name(),
                "' is frozen: it has no gradient");
  const auto index = static_cast<std::size_t>(id);
  TESSERA_INVARIANT(index < layout_.home.size() && layout_.home[index], "parameter '", param.name(),
                    "' was frozen when the reducer was made; make another");
  return param;
}

NvmeGradients& Reducer::finished_nvme(int id) {
  const shard::Param& param = trainable(id);
  TESSERA_INVARIANT(is_on_nvme(id), "the gradient of parameter '", param.name(),
                    "' is in memory; shard_gradient() has it");
  finish_sums(param);
  return *stream_->nvme();
}

void Reducer::finish_sums(const shard::Param& param) {
  TESSERA_INVARIANT(!in_backward_, "the gradient of parameter '", param.name(),
                    "' is asked for inside a backward; finish_backward() comes first");
  wait();
}

void Reducer::wait() {
  if (!in_backward_) {
    finish_replica_sums();
  }
  if (!is_finished_) {
    const SpanScope span(spans_, "wait for gradients");
    if (buckets_) {
      buckets_->wait();
    } else {
      stream_->synchronize();
    }
    stream_->wait_nvme();
    is_finished_ = true;
  }
}

void Reducer::check_list(std::span<const int> ids) const {
  std::set<int> seen;
  for (const int id : ids) {
    const shard::Param& param = trainable(id);
    TESSERA_INVARIANT(layout_.is_dynamic[static_cast<std::size_t>(id)], "parameter '", param.name(),
                      "' is reduced in its bucket; only dynamic ones are listed");
    TESSERA_INVARIANT(seen.insert(id).second, "parameter '", param.name(),
                      "' is listed twice for one reduction");
  }
}

void Reducer::begin_backward() {
  if (!in_backward_) {
    if (num_backwards_ > 0) {
      stream_->check_can_add();
    }
    shards_->begin_backward();
    if (buckets_) {
      buckets_->begin_backward(replica_sum_of_backward());
    }
    in_backward_ = true;
    is_finished_ = false;
  }
}

void Reducer::add(const shard::Param& param, FullGradient gradient) {
  const shard::Param& known = trainable(param.id());
  TESSERA_INVARIANT(&known == &param, "parameter '", param.name(), "' belongs to another table");
  TESSERA_INVARIANT(gradient.data != nullptr || param.layout().numel() == 0,
                    "the gradient of parameter '", param.name(), "' has no memory");
  const auto id = static_cast<std::size_t>(param.id());
  TESSERA_CHECK(!is_added_[id], ConfigError, "the gradient of parameter '", param.name(),
                "' has come twice in one backward; finish each backward before the next begins");
  shards_->check(param, gradient.dtype);
  begin_backward();
  if (buckets_) {
    buckets_->take(param, std::move(gradient));
  } else {
    shards_->take(param, std::move(gradient));
  }
  is_added_[id] = true;
  used_.mark(param.id());
}

std::vector<int> Reducer::pending_dynamic() const {
  return buckets_ ? buckets_->pending_dynamic() : std::vector<int>();
}

void Reducer::reduce_dynamic(std::span<const int> ids) {
  check_list(ids);
  begin_backward();
  if (buckets_) {
    buckets_->reduce_dynamic(ids);
  }
  for (const int id : ids) {
    used_.mark(id);  // some rank has listed it, and all know
  }
}

void Reducer::drop_dynamic() {
  if (buckets_) {
    buckets_->drop_dynamic();
  }
}

void Reducer::finish_backward() {
  const std::vector<int> pending = pending_dynamic();
  TESSERA_INVARIANT(pending.empty(), "a backward ends with ", pending.size(),
                    " dynamic gradients that were not reduced, the first of parameter '",
                    params_[pending.front()].name(), "'; reduce_dynamic() comes first");
  begin_backward();
  if (buckets_) {
    buckets_->finish_backward();
  }
  is_total_ = replica_sum_of_backward() != ReplicaSum::kNone;
  used_.finish_backward();
  is_added_.assign(is_added_.size(), false);
  in_backward_ = false;
  ++num_backwards_;
}

ReplicaSum Reducer::replica_sum_of_backward() const {
  const ReplicaSums& sums = stream_->replica_sums();
  if (sums.num_replicas == 1) {
    return ReplicaSum::kNone;
  }
  if (is_total_ || sums.num_micro_batches == 1) {
    return ReplicaSum::kResult;
  }
  return num_backwards_ + 1 == sums.num_micro_batches ? ReplicaSum::kTotal : ReplicaSum::kNone;
}

void Reducer::finish_replica_sums() {
  TESSERA_INVARIANT(!in_backward_, "gradients are summed over replicas inside a backward");
  if (stream_->sends() && stream_->replica_sums().num_replicas > 1 && num_backwards_ > 0 &&
      !is_total_) {
    buckets_->sum_over_replicas();
    is_total_ = true;
    is_finished_ = false;
  }
}

bool Reducer::has_gradient(int id) { return used_.is_used(trainable(id).id()); }

ShardGradient Reducer::shard_gradient(int id) {
  const shard::Param& param = trainable(id);
  finish_sums(param);
  if (is_on_nvme(id)) {
    ShardGradient gradient;
    gradient.numel = param.range().numel;
    return gradient;
  }
  return shards_->finished_gradient(param);
}

bool Reducer::is_ordered() const {
  const ReducerParts& parts = stream_->parts();
  return stream_->is_discrete() && !stream_->leaves_device() && parts.group.is_stream_ordered() &&
         (parts.replicas == nullptr || parts.replicas->is_stream_ordered()) &&
         (parts.dynamic_group == nullptr || parts.dynamic_group->is_stream_ordered()) &&
         std::ranges::all_of(hop_groups(parts), &comm::Group::is_stream_ordered);
}

void Reducer::wait_agreed() {
  const ReducerParts& parts = stream_->parts();
  parts.group.wait_agreed();
  if (parts.dynamic_group != nullptr) {
    parts.dynamic_group->wait_agreed();
  }
  for (comm::Group* const hop : hop_groups(parts)) {
    hop->wait_agreed();
  }
  if (parts.replicas != nullptr) {
    parts.replicas->wait_agreed();
  }
}

void Reducer::wait_reduced() {
  if (buckets_) {
    buckets_->wait_reduced();
  }
}

ShardGradient Reducer::ordered_gradient(int id) {
  const shard::Param& param = trainable(id);
  TESSERA_INVARIANT(is_ordered() && !in_backward_, "the gradient of parameter '", param.name(),
                    "' is not ordered by the reduce stream alone");
  finish_replica_sums();
  if (buckets_) {
    buckets_->put_all();
  }
  return shards_->gradient(param);
}

bool Reducer::is_on_nvme(int id) const {
  const auto index = static_cast<std::size_t>(id);
  return index < layout_.home.size() && layout_.home[index] == Tier::kNvme;
}

device::Pending Reducer::start_read(int id, std::int64_t begin, std::int64_t numel, float* to) {
  return finished_nvme(id).start_read(id, begin, numel, to);
}

void Reducer::free_gradient(int id) { shards_->free_gradient(trainable(id)); }

std::optional<double> Reducer::sum_of_squares(int id) {
  if (is_on_nvme(id)) {
    return finished_nvme(id).sum_of_squares(id);
  }
  const shard::Param& param = trainable(id);
  finish_sums(param);
  return shards_->sum_of_squares(param);
}

void Reducer::clear() {
  if (buckets_) {
    buckets_->clear();
  }
  shards_->clear();
  stream_->clear_nvme();
  used_.clear();
  is_added_.assign(is_added_.size(), false);
  in_backward_ = false;
  num_backwards_ = 0;
  is_total_ = false;
  is_finished_ = true;
}

bool Reducer::is_under_way() {
  return (buckets_ && buckets_->is_under_way()) || used_.is_under_way();
}

void Reducer::leave() noexcept {
  const auto end = std::chrono::steady_clock::now() + kLeaveLimit;
  while (is_under_way()) {
    if (std::chrono::steady_clock::now() >= end) {
      const ReducerParts& parts = stream_->parts();
      std::vector<comm::Group*> groups = hop_groups(parts);
      groups.insert(groups.end(),
                    {&parts.group, parts.all_ranks, parts.dynamic_group, parts.replicas});
      for (comm::Group* const group : groups) {
        if (group != nullptr) {
          group->abort(
              "this rank has failed, and leaves reductions of gradients that other ranks have not "
              "started");
        }
      }
      return;
    }
    std::this_thread::sleep_for(kLeaveLook);
  }
}

ReducerStats Reducer::take_stats() {
  ReducerStats stats = stream_->take_stats();
  if (buckets_) {
    stats.quant_error = buckets_->take_quant_error();
  }
  return stats;
}

}  // namespace tessera::grad
