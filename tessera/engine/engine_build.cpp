// Building: parameters are sharded as units are made, so that the peak is one unit.

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/optim/reducer_kernels.h"
#include "tessera/optim/update_loops.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {
namespace {

// The whole of a unit's parameters exists for a moment; the books shall show it.
class FullBytes {
 public:
  FullBytes(Ledger& ledger, Tier tier) : ledger_(ledger), tier_(tier) {}
  ~FullBytes() { ledger_.discharge(tier_, Role::kFull, bytes_); }
  FullBytes(const FullBytes&) = delete;
  FullBytes& operator=(const FullBytes&) = delete;
  void add(std::size_t bytes) {
    ledger_.charge(tier_, Role::kFull, bytes);
    bytes_ += bytes;
  }

 private:
  Ledger& ledger_;
  const Tier tier_;
  std::size_t bytes_ = 0;
};

// A model smaller than the buckets of a large one would be reduced in one piece, after backward;
// many small calls would cost more than they hide. Bits do not depend on it.
constexpr std::int64_t kSmallestBucketBytes = std::int64_t{4} << 20;
// More buckets than this in one backward, each below this size, take longer in calls than in bytes.
constexpr std::size_t kManyBuckets = 512;
constexpr std::int64_t kSlowBucketBytes = std::int64_t{1} << 20;

// What module->to(type) does to one of its tensors. Returns the values of before, or nothing if
// they stay.
at::Tensor convert(const at::Tensor& tensor, const std::optional<DType>& dtype) {
  if (!dtype || !tensor.defined() || !tensor.is_leaf() || !tensor.is_floating_point() ||
      tensor.scalar_type() == shard::scalar_type_of(*dtype)) {
    return {};
  }
  const at::NoGradGuard no_grad;
  at::Tensor before = tensor.detach();
  at::Tensor(tensor).set_data(before.to(shard::scalar_type_of(*dtype)));
  return before;
}

Tier device_tier() { return Tier::kDevice; }

}  // namespace

engine::UnitCore* Engine::Impl::add_unit(const std::string& name,
                                         const std::vector<NamedTensor>& unit_params,
                                         const UnitOptions& options,
                                         const std::string& module_type) {
  const std::string prefix = options.param_prefix.value_or(name + ".");
  FullBytes full(runtime.ledger(), device_tier());
  std::vector<at::Tensor> before(unit_params.size());
  agree("unit '" + name + "'", [&] {
    check_usable();
    TESSERA_CHECK(!is_sealed(), ConfigError, "unit '", name,
                  "' is added after the first forward; make all units of a model before it runs");
    TESSERA_CHECK(std::none_of(units_.begin(), units_.end(),
                               [&](const auto& unit) { return unit->name() == name; }),
                  ConfigError, "there are two units '", name,
                  "'; names of units must differ, they are how errors speak of them");
    for (std::size_t i = 0; i < unit_params.size(); ++i) {
      const NamedTensor& each = unit_params[i];
      if (id_of_tensor_.count(each.tensor.unsafeGetTensorImpl()) == 0) {
        before[i] = convert(each.tensor, wanted_dtype());
        check_param(prefix + each.name, each.tensor);
        full.add(each.tensor.nbytes());
      }
    }
  });
  std::vector<int> ids;
  for (std::size_t i = 0; i < unit_params.size(); ++i) {
    const NamedTensor& each = unit_params[i];
    const auto known = id_of_tensor_.find(each.tensor.unsafeGetTensorImpl());
    if (known != id_of_tensor_.end()) {
      ids.push_back(known->second);  // tied
      continue;
    }
    const Init init = options.init ? options.init(each.name) : Init::module();
    const double scale =
        options.weight_decay_scale ? options.weight_decay_scale(each.name, each.tensor) : 1.0;
    ids.push_back(add_param({prefix + each.name, each.tensor}, before[i], init, scale));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  warn_of_units_inside(name, ids);
  const coordinator::UnitId id =
      coordinator_->add_unit(name, ids, traits_of(name, module_type, options.dynamic));
  units_.push_back(std::make_shared<engine::UnitCore>(*this, id, name));
  for (const int param : ids) {
    units_of_param_[static_cast<std::size_t>(param)].push_back(units_.back().get());
    if (params[param].trainable()) {
      units_.back()->add_trainable(1);
    }
  }
  return units_.back().get();
}

void Engine::Impl::warn_of_units_inside(const std::string& name,
                                        const std::vector<int>& ids) const {
  std::string inside;
  int num_inside = 0;
  for (const auto& unit : units_) {
    const std::vector<int>& theirs = coordinator_->unit(unit->id()).ids;
    if (!theirs.empty() && std::includes(ids.begin(), ids.end(), theirs.begin(), theirs.end())) {
      inside += detail::concat(num_inside == 0 ? "" : ", ", "'", unit->name(), "'");
      ++num_inside;
    }
  }
  if (num_inside > 1) {  // one may be a tied weight
    runtime.logger().warn("unit '", name, "' has all parameters of units ", inside,
                          " as its own, since its module registers theirs: it gathers all of them "
                          "at once. If it only calls them, make it by engine.function(name, {}, "
                          "callable), or call its module without a unit");
  }
}

void Engine::Impl::add_external(engine::UnitCore& unit, const at::Tensor& tensor) {
  TESSERA_CHECK(!is_sealed(), ConfigError, "unit '", unit.name(),
                "' gets an external parameter after the first forward; add it before");
  const auto known = id_of_tensor_.find(tensor.unsafeGetTensorImpl());
  TESSERA_CHECK(known != id_of_tensor_.end(), ConfigError, "unit '", unit.name(),
                "': the external tensor is no parameter of a unit made so far; make the unit that "
                "owns it first");
  auto& users = units_of_param_[static_cast<std::size_t>(known->second)];
  if (std::find(users.begin(), users.end(), &unit) != users.end()) {
    return;
  }
  users.push_back(&unit);
  coordinator_->add_external(unit.id(), known->second);
  if (params[known->second].trainable()) {
    unit.add_trainable(1);
  }
}

std::optional<DType> Engine::Impl::wanted_dtype() const {
  if (const auto given = BuildScope::current().dtype) {
    return given;
  }
  if (!runtime.config().is_set("precision")) {
    return std::nullopt;
  }
  const std::string& name = runtime.config().get_string("precision");
  return name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

void Engine::Impl::check_param(const std::string& name, const at::Tensor& tensor) const {
  TESSERA_CHECK(tensor.defined(), ConfigError, "parameter '", name,
                "' is not defined; give it a value before its unit is made");
  TESSERA_CHECK(!shard::is_bound(tensor), ConfigError, "parameter '", name,
                "' belongs to another engine, or to one that is gone, and its values are not here; "
                "call to_plain() on that engine first, or make the module anew");
  TESSERA_CHECK(tensor.is_leaf(), ConfigError, "parameter '", name,
                "' is the result of an operation, not a leaf; a parameter must be one");
  TESSERA_CHECK(tensor.is_cuda() == runtime.on_cuda(), ConfigError, "parameter '", name, "' is on ",
                tensor.device().str(), ", the engine is on ", runtime.device().name(),
                "; make the module there");
  TESSERA_CHECK(!tensor.grad().defined(), ConfigError, "parameter '", name,
                "' has a gradient already; shard a model before it is trained");
  const DType dtype = shard::dtype_of(tensor, name);
  if (params.num_params() > 0) {
    const DType first = params[0].layout().dtype();
    TESSERA_CHECK(dtype == first, ConfigError, "parameter '", name, "' is ", to_string(dtype),
                  ", parameter '", params[0].name(), "' is ", to_string(first),
                  "; the parameters of an engine have one type");
  }
}

int Engine::Impl::add_param(const NamedTensor& given, const at::Tensor& before, const Init& init,
                            double weight_decay_scale) {
  const std::string& name = given.name;
  const at::Tensor& tensor = given.tensor;
  shard::ParamSpec spec;
  spec.name = name;
  spec.numel = tensor.numel();
  spec.dtype = shard::dtype_of(tensor, name);
  spec.trainable = tensor.requires_grad();
  spec.weight_decay_scale = weight_decay_scale;
  const shard::Layout layout(spec.numel, group().size(), spec.dtype);
  spec.placement.parameter = tiers.tier_of_next(layout);

  at::Tensor elements;  // the module's own values
  if (init.kind == Init::Kind::kModule) {
    elements = shard::storage_elements(tensor.detach());
  }
  shard::Param& param = params.add(spec, shard::bind_tensor(tensor, name, layout));
  tiers.add(param);
  const shard::ElementRange range = param.range();
  const std::size_t element_bytes = bytes_of(spec.dtype);
  if (init.kind == Init::Kind::kModule) {
    comm::CallOptions call;
    call.label.parameter = name;
    // Every rank built the module; rank 0's values count, so that no rank can differ.
    const bool has_precise = before.defined() && before.scalar_type() == at::kFloat;
    if (has_precise) {
      const at::Tensor precise = shard::storage_elements(before);
      group().start_broadcast(precise.data_ptr(), spec.numel, DType::kFloat32, 0, call).wait();
      elements = precise.to(tensor.scalar_type());
      const at::Tensor own = precise.narrow(0, range.begin, range.numel).to(at::kCPU).contiguous();
      const std::size_t bytes = static_cast<std::size_t>(layout.shard_numel()) * sizeof(float);
      device::Memory master = runtime.device().allocate(Tier::kHost, bytes, Role::kOptimizer);
      device::fill_host(master.data(), 0, bytes);
      std::copy_n(own.const_data_ptr<float>(), range.numel,
                  reinterpret_cast<float*>(master.data()));
      param.set_first_master(std::move(master));
    } else {
      group().start_broadcast(elements.data_ptr(), spec.numel, spec.dtype, 0, call).wait();
    }
    copy_to_shard(param, static_cast<const std::byte*>(elements.data_ptr()) +
                             static_cast<std::size_t>(range.begin) * element_bytes);
  } else {
    fill_shard(param, init);
  }
  id_of_tensor_.emplace(tensor.unsafeGetTensorImpl(), param.id());
  tensors.push_back(tensor);
  units_of_param_.emplace_back();
  watch_gradient(param.id());
  return param.id();
}

// By all threads, since a model that has to be sharded has many values. In rounds where the shard
// is on a device, so that no second copy of a large one is ever there.
void Engine::Impl::fill_shard(const shard::Param& param, const Init& init) {
  constexpr std::int64_t kTile = std::int64_t{1} << 16;
  constexpr std::int64_t kRound = 64 * kTile;
  static_assert(kRound % shard::kShardStep == 0, "stores are written in whole steps");
  const DType dtype = param.layout().dtype();
  const shard::ElementRange range = param.range();
  const std::int64_t round = param.is_on_host() ? range.numel : std::min(kRound, range.numel);
  std::vector<std::byte> values;
  if (!param.is_on_host()) {
    values.resize(static_cast<std::size_t>(round) * bytes_of(dtype));
  }
  for (std::int64_t begin = 0; begin < range.numel; begin += round) {
    const std::int64_t numel = std::min(round, range.numel - begin);
    std::byte* const to = param.is_on_host() ? param.shard() : values.data();
    device::for_each_piece(
        static_cast<std::size_t>((numel + kTile - 1) / kTile), [&](std::size_t piece) {
          const auto at = static_cast<std::int64_t>(piece) * kTile;
          fill_initial(init, seed_, param.name(),
                       {range.begin + begin + at, std::min(kTile, numel - at)}, dtype,
                       to + static_cast<std::size_t>(at) * bytes_of(dtype));
        });
    if (!param.is_on_host()) {
      copy_to_shard(param, begin, numel, to);
    }
  }
}

void Engine::Impl::copy_to_shard(const shard::Param& param, const void* elements) {
  copy_to_shard(param, 0, param.range().numel, elements);
}

void Engine::Impl::copy_to_shard(const shard::Param& param, std::int64_t begin, std::int64_t numel,
                                 const void* elements) {
  const std::size_t element = bytes_of(param.layout().dtype());
  device::Stream& stream = runtime.device().stream(device::StreamKind::kWrite);
  // The elements may be the work of the compute stream.
  stream.wait(runtime.device().stream(device::StreamKind::kCompute).record());
  if (param.is_on_nvme()) {
    std::vector<std::byte> host;
    if (runtime.device().is_discrete()) {  // where they are is not known
      host.resize(static_cast<std::size_t>(numel) * element);
      runtime.device().start_copy(host.data(), elements, host.size(), stream).wait();
      elements = host.data();
    }
    tiers.write(param, begin, numel, elements);
    return;
  }
  runtime.device()
      .start_copy(param.shard() + static_cast<std::size_t>(begin) * element, elements,
                  static_cast<std::size_t>(numel) * element, stream)
      .wait();
}

std::int64_t Engine::Impl::trainable_bytes() const {
  std::int64_t bytes = 0;
  for (int id = 0; id < params.num_params(); ++id) {
    if (params[id].trainable()) {
      bytes += static_cast<std::int64_t>(params[id].layout().full_bytes());
    }
  }
  return bytes;
}

void Engine::Impl::seal() {
  if (is_sealed()) {
    return;
  }
  TESSERA_CHECK(params.num_params() > 0, ConfigError,
                "the engine has no parameters; make units of modules with parameters first");
  notice_trainable();  // plan and optimizer are made for what is trained
  gathered_.check_no_early_scope();
  const DType dtype = params[0].layout().dtype();
  const auto scale_options = optim::LossScaleOptions::from(runtime.config(), dtype);
  loss_scale_.emplace(scale_options);
  weight_scale_ = dtype == DType::kFloat16 ? 0 : 1;
  if (scale_options.enabled && scale_options.fixed == 0) {
    early_.switch_off();
  }
  settle_units();
  if (tiers.is_planned()) {
    tiers.settle(shapes());
    tiers.reserve_staging(reduce_group());
    coordinator_->set_tier(tiers.coordinator_options());
  }
  seal_units();
  optimizer = tiers.make_optimizer(optim::RuleOptions::from(runtime.config()));
  for (int id = 0; id < params.num_params(); ++id) {
    params[id].set_first_master({});
  }
  if (early_.is_on()) {
    optimizer->expect_early_updates();
    std::vector<std::vector<int>> params_of_unit(coordinator_->num_units());
    for (std::size_t unit = 0; unit < params_of_unit.size(); ++unit) {
      params_of_unit[unit] = coordinator_->unit(static_cast<coordinator::UnitId>(unit)).ids;
    }
    early_.seal(std::move(params_of_unit));
  }
  make_reducer();
  coordinator_->set_dynamic_gradients({[this] { return reducer_->pending_dynamic(); },
                                       [this](std::span<const int> ids) {
                                         finish_update();
                                         reducer_->reduce_dynamic(ids);
                                       }});
}

planner::ModelShapes Engine::Impl::shapes() const {
  planner::ModelShapes model;
  model.dtype = params[0].layout().dtype();
  for (int id = 0; id < params.num_params(); ++id) {
    const shard::Param& param = params[id];
    model.params.push_back(
        {param.name(), param.layout().numel(), param.trainable(), param.dynamic()});
  }
  for (const auto& unit : units_) {
    model.units.push_back(coordinator_->unit(unit->id()).ids);
    model.unit_names.push_back(unit->name());
  }
  return model;
}

void Engine::Impl::make_reducer() {
  grad::ReducerParts parts{reduce_group(), runtime.device(), params, runtime.clock(),
                           runtime.spans()};
  if (runtime.device().is_discrete()) {
    optim::set_reducer_kernels(parts, runtime.kernels());
  } else if (early_.is_on()) {
    // Gradients go before step() asks for the norm. Not by the kernels: a thread of the optimizer
    // may use them meanwhile.
    parts.sum_of_squares = [](const void* values, DType dtype, std::int64_t numel, double* result,
                              device::Stream& stream) {
      return stream.enqueue(
          [=] { *result = optim::sum_of_squares(optim::NormSpan{values, dtype, numel}); });
    };
  }
  if (coordinator_->meets()) {
    // Every call of this group is at a moment on which ranks have agreed.
    parts.dynamic_group = &group();
  }
  grad::ReducerOptions reductions =
      grad::ReducerOptions::from(runtime.config(), params[0].layout().dtype());
  if (!runtime.config().is_set("grad.bucket_bytes")) {
    reductions.bucket_bytes =
        std::clamp(trainable_bytes() / 4, kSmallestBucketBytes, reductions.bucket_bytes);
  }
  if (const planner::Placement* placement = tiers.placement()) {
    reductions.bucket_bytes = placement->bucket_bytes;
    parts.one_backward = runtime.device().is_discrete() && placement->gradients_leave_early;
    if (placement->kept_gradient_bytes > 0) {
      parts.most_kept_bytes = placement->kept_gradient_bytes;
    }
  }
  parts.is_planned = tiers.is_planned();
  parts.nvme = tiers.gradient_tier();
  parts.ledger = tiers.is_planned() ? &runtime.ledger() : nullptr;
  parts.block_sum_of_squares = [](const float* values, std::int64_t numel) {
    return optim::best_loops().block_sum_of_squares(values, numel);
  };
  reducer_.reset();  // before another works with the same group and memory
  reducer_ = std::make_unique<grad::Reducer>(parts, reductions);
  const std::size_t num_buckets = reducer_->layout().buckets.size();
  if (group().size() > 1 && num_buckets > kManyBuckets &&
      reductions.bucket_bytes < kSlowBucketBytes) {
    runtime.logger().once("many buckets", LogLevel::kInfo,
                          runtime.config().shown("grad.bucket_bytes"), " cuts the gradients into ",
                          num_buckets, " reductions per backward; a larger one is faster");
  }
}

}  // namespace tessera
