#include "tessera/grad/reducer.h"

#include <set>
#include <utility>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/grad/bucket_sink.h"
#include "tessera/grad/element_loops.h"
#include "tessera/grad/gradient_stream.h"
#include "tessera/grad/solo_sink.h"
#include "tessera/grad/used_params.h"

namespace tessera::grad {
namespace {

BucketLayout plan(const ReducerParts& parts, const ReducerOptions& options) {
  const shard::ParamTable& params = parts.params;
  std::vector<BucketParam> trainable;
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      const bool stored = parts.tier != nullptr && parts.tier->stores(id);
      trainable.push_back({id, params[id].layout().shard_numel(), params[id].dynamic(), stored});
    }
  }
  return plan_buckets(trainable, params.num_ranks(), options.bucket_bytes,
                      bytes_of(options.wire_dtype));
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
  return options;
}

class Reducer::Impl {
 public:
  Impl(const ReducerParts& parts, const ReducerOptions& options)
      : params(parts.params),
        spans(parts.spans),
        layout(plan(parts, options)),
        stream(parts),
        has_come(static_cast<std::size_t>(parts.params.num_params()), false),
        used(parts.group, parts.params.num_params()) {
    TESSERA_INVARIANT(parts.group.size() == params.num_ranks(), "a group of ", parts.group.size(),
                      " ranks reduces gradients for ", params.num_ranks());
    TESSERA_INVARIANT(
        parts.dynamic_group == nullptr || (parts.dynamic_group->size() == parts.group.size() &&
                                           parts.dynamic_group->rank() == parts.group.rank()),
        "dynamic gradients are reduced by rank ", parts.dynamic_group->rank(), " of ",
        parts.dynamic_group->size(), ", others by rank ", parts.group.rank(), " of ",
        parts.group.size());
    TESSERA_CHECK(is_gradient_dtype(options.wire_dtype), ConfigError, "gradients cannot travel as ",
                  to_string(options.wire_dtype), "; use fp32, bf16 or fp16");
    if (parts.group.size() == 1) {
      sink = std::make_unique<SoloSink>(stream);
    } else {
      sink = std::make_unique<BucketSink>(stream, layout, options);
    }
  }

  const shard::Param& trainable(int id) const {
    TESSERA_INVARIANT(id >= 0 && id < static_cast<int>(has_come.size()), "parameter ", id,
                      " is not one of the ", has_come.size(), " whose gradients are reduced");
    const shard::Param& param = params[id];
    TESSERA_CHECK(param.trainable(), ConfigError, "parameter '", param.name(),
                  "' is frozen: it has no gradient");
    const auto index = static_cast<std::size_t>(id);
    TESSERA_INVARIANT(index < layout.region_offset.size() &&
                          (layout.region_offset[index] >= 0 || layout.is_stored[index]),
                      "parameter '", param.name(),
                      "' was frozen when the reducer was made; make another");
    return param;
  }

  // That of a stored parameter, when nothing of it is under way.
  StoredGradients& settled_store(int id) {
    const shard::Param& param = trainable(id);
    TESSERA_INVARIANT(layout.is_stored[static_cast<std::size_t>(id)], "the gradient of parameter '",
                      param.name(), "' is in memory; shard_gradient() has it");
    settle(param);
    return *stream.stored();
  }

  void settle(const shard::Param& param) {
    TESSERA_INVARIANT(!in_backward, "the gradient of parameter '", param.name(),
                      "' is asked for inside a backward; finish_backward() comes first");
    wait();
  }

  void wait() {
    if (!is_settled) {
      const SpanScope span(spans, "wait for gradients");
      sink->wait();
      stream.wait_stored();
      is_settled = true;
    }
  }

  void check_list(std::span<const int> ids) const {
    std::set<int> seen;
    for (const int id : ids) {
      const shard::Param& param = trainable(id);
      TESSERA_INVARIANT(layout.is_dynamic[static_cast<std::size_t>(id)], "parameter '",
                        param.name(), "' is reduced in its bucket; only dynamic ones are listed");
      TESSERA_INVARIANT(seen.insert(id).second, "parameter '", param.name(),
                        "' is listed twice for one reduction");
    }
  }

  shard::ParamTable& params;
  Spans& spans;
  const BucketLayout layout;
  GradientStream stream;
  std::vector<bool> has_come;  // by id, in this backward
  UsedParams used;             // since clear()
  bool in_backward = false;
  int num_backwards = 0;
  bool is_settled = true;  // nothing has been started since the last wait
  std::unique_ptr<GradientSink> sink;
};

Reducer::Reducer(const ReducerParts& parts, const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(parts, options)) {}

Reducer::~Reducer() = default;

void Reducer::begin_backward() {
  if (!impl_->in_backward) {
    impl_->sink->begin_backward(impl_->num_backwards == 0);
    impl_->in_backward = true;
    impl_->is_settled = false;
  }
}

void Reducer::add(const shard::Param& param, FullGradient gradient) {
  const shard::Param& known = impl_->trainable(param.id());
  TESSERA_INVARIANT(&known == &param, "parameter '", param.name(), "' belongs to another table");
  TESSERA_INVARIANT(gradient.data != nullptr || param.layout().numel() == 0,
                    "the gradient of parameter '", param.name(), "' has no memory");
  const auto id = static_cast<std::size_t>(param.id());
  TESSERA_CHECK(!impl_->has_come[id], ConfigError, "the gradient of parameter '", param.name(),
                "' has come twice in one backward; finish each backward before the next begins");
  impl_->sink->check(param, gradient);
  begin_backward();
  impl_->sink->take(param, std::move(gradient));
  impl_->has_come[id] = true;
  impl_->used.mark(param.id());
}

std::vector<int> Reducer::pending_dynamic() const { return impl_->sink->pending_dynamic(); }

void Reducer::reduce_dynamic(std::span<const int> ids) {
  impl_->check_list(ids);
  begin_backward();
  impl_->sink->reduce_dynamic(ids);
  for (const int id : ids) {
    impl_->used.mark(id);  // some rank has listed it, and all know
  }
}

void Reducer::drop_dynamic() { impl_->sink->drop_dynamic(); }

void Reducer::finish_backward() {
  const std::vector<int> pending = pending_dynamic();
  TESSERA_INVARIANT(pending.empty(), "a backward ends with ", pending.size(),
                    " dynamic gradients that were not reduced, the first of parameter '",
                    impl_->params[pending.front()].name(), "'; reduce_dynamic() comes first");
  begin_backward();
  impl_->sink->finish_backward();
  impl_->used.finish_backward();
  impl_->has_come.assign(impl_->has_come.size(), false);
  impl_->in_backward = false;
  ++impl_->num_backwards;
}

bool Reducer::has_gradient(int id) { return impl_->used.is_used(impl_->trainable(id).id()); }

bool Reducer::in_backward() const { return impl_->in_backward; }
int Reducer::num_backwards() const { return impl_->num_backwards; }
const BucketLayout& Reducer::layout() const { return impl_->layout; }

ShardGradient Reducer::shard_gradient(int id) {
  const shard::Param& param = impl_->trainable(id);
  impl_->settle(param);
  if (is_stored(id)) {
    ShardGradient gradient;
    gradient.numel = param.range().numel;
    return gradient;
  }
  return impl_->sink->shard_gradient(param, impl_->num_backwards == 0);
}

bool Reducer::is_ordered() const {
  const ReducerParts& parts = impl_->stream.parts();
  return parts.group.size() == 1 && impl_->stream.is_discrete() && parts.tier == nullptr &&
         parts.leaves_to_host == nullptr;
}

ShardGradient Reducer::ordered_gradient(int id) {
  const shard::Param& param = impl_->trainable(id);
  TESSERA_INVARIANT(is_ordered() && !impl_->in_backward, "the gradient of parameter '",
                    param.name(), "' is not ordered by the reduce stream alone");
  return impl_->sink->ordered_gradient(param);
}

void Reducer::wait() { impl_->wait(); }

bool Reducer::is_stored(int id) const {
  const auto index = static_cast<std::size_t>(id);
  return index < impl_->layout.is_stored.size() && impl_->layout.is_stored[index];
}

device::Pending Reducer::start_read(int id, std::int64_t begin, std::int64_t numel, float* to) {
  return impl_->settled_store(id).start_read(id, begin, numel, to);
}

void Reducer::let_go(int id) { impl_->sink->let_go(impl_->trainable(id)); }

std::optional<double> Reducer::sum_of_squares(int id) {
  if (is_stored(id)) {
    return impl_->settled_store(id).sum_of_squares(id);
  }
  const shard::Param& param = impl_->trainable(id);
  impl_->settle(param);
  return impl_->sink->sum_of_squares(param);
}

void Reducer::clear() {
  impl_->sink->clear();
  impl_->stream.clear_stored();
  impl_->used.clear();
  impl_->has_come.assign(impl_->has_come.size(), false);
  impl_->in_backward = false;
  impl_->num_backwards = 0;
  impl_->is_settled = true;
}

ReducerStats Reducer::take_stats() { return impl_->stream.take_stats(); }

}  // namespace tessera::grad
