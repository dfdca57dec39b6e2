#include "tessera/engine/model.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/engine_objects.h"
#include "tessera/engine/shard_writer.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::engine {
namespace {

using coordinator::LeafRule;

// Fires once per backward, when the parameter's gradient is complete.
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(StepDriver& driver, int id) : driver_(driver), id_(id) {}
  void operator()(const at::Tensor& tensor) override { driver_.on_gradient(id_, tensor); }

 private:
  StepDriver& driver_;
  const int id_;
};

// The whole of a unit's parameters exists for a moment; the ledger shall show it.
class FullBytes {
 public:
  explicit FullBytes(Ledger& ledger) : ledger_(ledger) {}
  ~FullBytes() { ledger_.discharge(Tier::kDevice, Role::kFull, bytes_); }
  FullBytes(const FullBytes&) = delete;
  FullBytes& operator=(const FullBytes&) = delete;
  void add(std::size_t bytes) {
    ledger_.charge(Tier::kDevice, Role::kFull, bytes);
    bytes_ += bytes;
  }

 private:
  Ledger& ledger_;
  std::size_t bytes_ = 0;
};

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

// "models::(anonymous namespace)::BlockImpl<float>" is BlockImpl to a person.
std::string short_type(const std::string& type) {
  const std::string name = type.substr(0, type.find('<'));
  const std::size_t space = name.rfind("::");
  return space == std::string::npos ? name : name.substr(space + 2);
}

LeafRule rule_of(const std::string& name) {
  return name.starts_with("*") ? LeafRule::suffix(name.substr(1)) : LeafRule::name(name);
}

bool matches(const std::string& pattern, const std::string& name) {
  return pattern.ends_with("*") ? name.starts_with(pattern.substr(0, pattern.size() - 1))
                                : name == pattern;
}

}  // namespace

Model::Model(EngineObjects& engine, EngineContext& context, RankAgreement& ranks)
    : engine_(engine),
      ctx_(context),
      ranks_(ranks),
      owner_(std::make_shared<const std::string>(context.mesh.mesh().describe())),
      stored_rule_(shard::StoredRule::from(context.runtime.config())) {}

Model::~Model() {
  for (const auto& unit : units_) {
    unit->detach();
  }
  for (const at::Tensor& tensor : tensors_) {
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
  }
}

UnitCore* Model::add_unit(const std::string& name, const std::vector<NamedTensor>& unit_params,
                          const UnitOptions& options, const std::string& module_type) {
  const std::string prefix = options.param_prefix.value_or(name + ".");
  FullBytes full(ctx_.runtime.ledger());
  std::vector<at::Tensor> before(unit_params.size());
  std::vector<shard::StoredFormat> formats(unit_params.size());
  ranks_.agree("unit '" + name + "'", [&] {
    ctx_.lifecycle.check_usable();
    TESSERA_CHECK(!ctx_.lifecycle.is_finalized(), ConfigError, "unit '", name,
                  "' is added after the first forward; make all units of a model before it runs");
    TESSERA_CHECK(std::none_of(units_.begin(), units_.end(),
                               [&](const auto& unit) { return unit->name() == name; }),
                  ConfigError, "there are two units '", name,
                  "'; names of units must differ, they are how errors speak of them");
    for (std::size_t i = 0; i < unit_params.size(); ++i) {
      const NamedTensor& each = unit_params[i];
      if (!find(each.tensor)) {
        before[i] = convert(each.tensor, wanted_dtype());
        check_param(prefix + each.name, each.tensor);
        const std::optional<int> bits =
            options.frozen_bits ? std::optional(options.frozen_bits(each.name, each.tensor))
                                : std::nullopt;
        formats[i] = format_of(prefix + each.name, each.tensor, bits);
        full.add(each.tensor.nbytes());
      }
    }
  });
  std::vector<int> ids;
  for (std::size_t i = 0; i < unit_params.size(); ++i) {
    const NamedTensor& each = unit_params[i];
    if (const std::optional<int> tied = find(each.tensor)) {
      ids.push_back(*tied);
      tied_names_[static_cast<std::size_t>(*tied)].push_back(prefix + each.name);
      continue;
    }
    ParamOptions param{options.init ? options.init(each.name) : Init::module()};
    param.format = formats[i];
    if (options.weight_decay_scale) {
      param.weight_decay_scale = options.weight_decay_scale(each.name, each.tensor);
    }
    ids.push_back(add_param({prefix + each.name, each.tensor}, before[i], param));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  warn_of_units_inside(name, ids);
  const coordinator::UnitId id =
      ctx_.coordinator.add_unit(name, ids, traits_of(name, module_type, options.dynamic));
  units_.push_back(std::make_shared<UnitCore>(engine_, id, name));
  for (const int param : ids) {
    units_of_param_[static_cast<std::size_t>(param)].push_back(units_.back().get());
    units_.back()->add_trainable(ctx_.params[param].trainable() ? 1 : 0);
  }
  return units_.back().get();
}

void Model::warn_of_units_inside(const std::string& name, const std::vector<int>& ids) const {
  std::string inside;
  int num_inside = 0;
  for (const auto& unit : units_) {
    const std::vector<int>& theirs = ctx_.coordinator.unit(unit->id()).ids;
    if (!theirs.empty() && std::includes(ids.begin(), ids.end(), theirs.begin(), theirs.end())) {
      inside += detail::concat(num_inside == 0 ? "" : ", ", "'", unit->name(), "'");
      ++num_inside;
    }
  }
  if (num_inside > 1) {  // one may be a tied weight
    ctx_.runtime.logger().warn(
        "unit '", name, "' has all parameters of units ", inside,
        " as its own, since its module registers theirs: it gathers all of them "
        "at once. If it only calls them, make it by engine.function(name, {}, "
        "callable), or call its module without a unit");
  }
}

void Model::add_external(UnitCore& unit, const at::Tensor& tensor) {
  TESSERA_CHECK(!ctx_.lifecycle.is_finalized(), ConfigError, "unit '", unit.name(),
                "' gets an external parameter after the first forward; add it before");
  const std::optional<int> id = find(tensor);
  TESSERA_CHECK(id, ConfigError, "unit '", unit.name(),
                "': the external tensor is no parameter of a unit made so far; make the unit that "
                "owns it first");
  auto& users = units_of_param_[static_cast<std::size_t>(*id)];
  if (std::find(users.begin(), users.end(), &unit) != users.end()) {
    return;
  }
  users.push_back(&unit);
  ctx_.coordinator.add_external(unit.id(), *id);
  unit.add_trainable(ctx_.params[*id].trainable() ? 1 : 0);
}

std::optional<DType> Model::wanted_dtype() const {
  if (const auto given = BuildScope::current().dtype) {
    return given;
  }
  if (!ctx_.runtime.config().is_set("precision")) {
    return std::nullopt;
  }
  const std::string& name = ctx_.runtime.config().get_string("precision");
  return name == "bf16" ? DType::kBFloat16 : name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

void Model::check_param(const std::string& name, const at::Tensor& tensor) const {
  TESSERA_CHECK(tensor.defined(), ConfigError, "parameter '", name,
                "' is not defined; give it a value before its unit is made");
  const std::optional<std::string> owner = shard::owner_of(tensor);
  TESSERA_CHECK(!owner, ConfigError, "parameter '", name,
                "' belongs to another engine, or to one that is gone (", *owner,
                "; this engine: ", *owner_,
                "), and its values are not here; call to_plain() on that engine first, or make the "
                "module anew");
  TESSERA_CHECK(tensor.is_leaf(), ConfigError, "parameter '", name,
                "' is the result of an operation, not a leaf; a parameter must be one");
  TESSERA_CHECK(tensor.is_cuda() == ctx_.runtime.on_cuda(), ConfigError, "parameter '", name,
                "' is on ", tensor.device().str(), ", the engine is on ",
                ctx_.runtime.device().name(), "; make the module there");
  TESSERA_CHECK(!tensor.grad().defined(), ConfigError, "parameter '", name,
                "' has a gradient already; shard a model before it is trained");
  const DType dtype = shard::dtype_of(tensor, name);
  if (ctx_.params.num_params() > 0) {
    const DType first = ctx_.params[0].layout().dtype();
    TESSERA_CHECK(dtype == first, ConfigError, "parameter '", name, "' is ", to_string(dtype),
                  ", parameter '", ctx_.params[0].name(), "' is ", to_string(first),
                  "; the parameters of an engine have one type");
  }
}

shard::StoredFormat Model::format_of(const std::string& name, const at::Tensor& tensor,
                                     std::optional<int> bits) const {
  const bool trainable = tensor.requires_grad();
  if (!bits) {
    return stored_rule_.format_of(name, trainable, tensor.numel(), static_cast<int>(tensor.dim()));
  }
  TESSERA_CHECK(*bits == 0 || *bits == 4 || *bits == 8, ConfigError, "parameter '", name,
                "': frozen_bits = ", *bits, "; integers have 4 or 8 bits, 0 keeps it as it is");
  TESSERA_CHECK(
      *bits == 0 || !trainable, ConfigError, "parameter '", name, "': frozen_bits = ", *bits,
      ", and it is trainable; freeze it by requires_grad_(false) before its unit is made");
  return {*bits, ctx_.runtime.config().get_int("quant.block_numel")};
}

const shard::StoredCodecs& Model::codecs_of(shard::StoredFormat format) {
  shard::StoredCodecs& codecs = codecs_[format.bits];
  if (format.is_encoded() && !codecs.host) {
    codecs.host = quant::make_cpu_block_codec(format.blocks());
    codecs.device = ctx_.runtime.on_cuda()
                        ? std::shared_ptr<const comm::Codec>(
                              quant::make_cuda_block_codec(format.blocks(), ctx_.runtime.device()))
                        : codecs.host;
  }
  return codecs;
}

int Model::add_param(const NamedTensor& given, const at::Tensor& before,
                     const ParamOptions& options) {
  const std::string& name = given.name;
  const at::Tensor& tensor = given.tensor;
  const Init& init = options.init;
  shard::ParamSpec spec;
  spec.name = name;
  spec.numel = tensor.numel();
  spec.dtype = shard::dtype_of(tensor, name);
  spec.trainable = tensor.requires_grad();
  spec.weight_decay_scale = options.weight_decay_scale;
  spec.format = options.format;
  spec.codecs = codecs_of(options.format);
  const shard::Layout layout(spec.numel, ctx_.params.num_ranks(), spec.dtype, spec.format);
  spec.placement = ctx_.tiers.placement_of_next(layout);

  at::Tensor elements;  // the module's own values
  if (init.kind == Init::Kind::kModule) {
    elements = shard::storage_elements(tensor.detach());
  }
  shard::Param& param = ctx_.params.add(spec, shard::bind_tensor(tensor, name, layout, owner_));
  ctx_.tiers.add(param);
  ctx_.stored_report.add_param();
  const shard::ElementRange range = param.range();
  const std::size_t element_bytes = bytes_of(spec.dtype);
  if (init.kind == Init::Kind::kModule) {
    comm::CallOptions call;
    call.label.parameter = name;
    call.stream = &ctx_.runtime.device().stream(device::StreamKind::kCompute);
    // Every rank built the module; rank 0's values count, so that no rank can differ.
    const bool has_precise = before.defined() && before.scalar_type() == at::kFloat;
    if (has_precise) {
      const at::Tensor precise = shard::storage_elements(before);
      ctx_.group.start_broadcast(precise.data_ptr(), spec.numel, DType::kFloat32, 0, call).wait();
      elements = precise.to(tensor.scalar_type());
      if (!layout.is_encoded()) {
        keep_first_master(param, precise);
      }
    } else {
      ctx_.group.start_broadcast(elements.data_ptr(), spec.numel, spec.dtype, 0, call).wait();
    }
    ShardWriter writer(ctx_, param);
    writer.write(0, range.numel,
                 static_cast<const std::byte*>(elements.data_ptr()) +
                     static_cast<std::size_t>(range.begin) * element_bytes);
    writer.finish();
  } else {
    fill_shard(param, init);
  }
  id_of_tensor_.emplace(tensor.unsafeGetTensorImpl(), param.id());
  tensors_.push_back(tensor);
  units_of_param_.emplace_back();
  tied_names_.emplace_back();
  watch_gradient(param.id());
  return param.id();
}

void Model::keep_first_master(shard::Param& param, const at::Tensor& precise) {
  const shard::ElementRange range = param.range();
  const at::Tensor own = precise.narrow(0, range.begin, range.numel).to(at::kCPU).contiguous();
  const std::size_t bytes = static_cast<std::size_t>(param.layout().shard_numel()) * sizeof(float);
  device::Memory master = ctx_.runtime.device().allocate(Tier::kHost, bytes, Role::kOptimizer);
  device::fill_host(master.data(), 0, bytes);
  std::copy_n(own.const_data_ptr<float>(), range.numel, reinterpret_cast<float*>(master.data()));
  param.set_first_master(std::move(master));
}

// By all threads, since a model that has to be sharded has many values. In rounds where the shard
// is on a device, or is encoded, so that no second copy of a large one is ever there. A source has
// long runs: it reads those of files best.
void Model::fill_shard(const shard::Param& param, const Init& init) {
  constexpr std::int64_t kTile = std::int64_t{1} << 16;
  constexpr std::int64_t kRound = 64 * kTile;
  static_assert(kRound % shard::kShardStep == 0, "stores are written in whole steps");
  const DType dtype = param.layout().dtype();
  const shard::ElementRange range = param.range();
  const auto seed = static_cast<std::uint64_t>(ctx_.runtime.config().get_int("seed"));
  ShardWriter writer(ctx_, param);
  const bool in_place = param.is_on_host() && !param.layout().is_encoded();
  const std::int64_t round = in_place ? range.numel : std::min(writer.tile(kRound), range.numel);
  const std::int64_t tile = init.kind == Init::Kind::kSource ? round : kTile;
  std::vector<std::byte> values;
  if (!in_place) {
    values.resize(static_cast<std::size_t>(round) * bytes_of(dtype));
  }
  for (std::int64_t begin = 0; begin < range.numel; begin += round) {
    const std::int64_t numel = std::min(round, range.numel - begin);
    std::byte* const to = in_place ? param.shard() : values.data();
    device::for_each_piece(
        static_cast<std::size_t>((numel + tile - 1) / tile), [&](std::size_t piece) {
          const auto at = static_cast<std::int64_t>(piece) * tile;
          fill_initial(init, seed, param.name(),
                       {range.begin + begin + at, std::min(tile, numel - at)}, dtype,
                       to + static_cast<std::size_t>(at) * bytes_of(dtype));
        });
    if (!in_place) {
      writer.write(begin, numel, to);
    }
  }
  writer.finish();
}

void Model::send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers) {
  ctx_.lifecycle.check_usable();
  const std::optional<DType> dtype = wanted_dtype();
  for (const NamedTensor& buffer : buffers) {
    if (dtype && buffer.tensor.defined() && buffer.tensor.is_floating_point()) {
      at::Tensor(buffer.tensor).set_data(buffer.tensor.to(shard::scalar_type_of(*dtype)));
    }
    if (buffer.tensor.defined() &&
        std::none_of(buffers_.begin(), buffers_.end(),
                     [&](const at::Tensor& known) { return known.is_same(buffer.tensor); })) {
      buffers_.push_back(buffer.tensor);
      buffer_names_.push_back(unit + "." + buffer.name);
    }
    if (!buffer.tensor.defined() || buffer.tensor.numel() == 0 || ctx_.group.size() == 1) {
      continue;
    }
    const std::string name = unit + "." + buffer.name;
    TESSERA_CHECK(buffer.tensor.layout() == at::kStrided, ConfigError, "buffer '", name, "' is ",
                  buffer.tensor.toString(), "; buffers of a unit must be dense");
    // Bytes, whatever the type is, in the logical order.
    const at::NoGradGuard no_grad;
    const at::Device where(ctx_.runtime.on_cuda() ? at::kCUDA : at::kCPU);
    at::Tensor values = buffer.tensor.detach();
    values = (values.device().type() == where.type() ? values : values.to(where)).contiguous();
    comm::CallOptions call;
    call.label.unit = unit;
    call.label.parameter = name;
    call.stream = &ctx_.runtime.device().stream(device::StreamKind::kCompute);
    ctx_.group
        .start_broadcast(values.data_ptr(), static_cast<std::int64_t>(values.nbytes()),
                         DType::kUInt8, 0, call)
        .wait();
    if (values.data_ptr() != buffer.tensor.data_ptr()) {
      at::Tensor(buffer.tensor.detach()).copy_(values);
    }
  }
}

coordinator::UnitTraits Model::traits_of(const std::string& name, const std::string& type,
                                         bool dynamic) const {
  const std::vector<std::string>& patterns = ctx_.runtime.config().get_list("unit.dynamic_names");
  const bool is_named =
      std::any_of(patterns.begin(), patterns.end(),
                  [&](const std::string& pattern) { return matches(pattern, name); });
  return {short_type(type), dynamic || is_named};
}

void Model::set_leaf(const LeafRule& rule, bool is_leaf) {
  ctx_.lifecycle.check_usable();
  TESSERA_CHECK(!ctx_.lifecycle.is_finalized(), ConfigError, describe(rule),
                " is made a leaf, or is one no longer, after the first forward; do it before");
  apply_leaf_options();
  if (is_leaf) {
    ctx_.coordinator.set_leaves(rule);
  } else {
    ctx_.coordinator.clear_leaves(rule);
  }
}

void Model::set_leaf(const std::string& name, bool is_leaf) { set_leaf(rule_of(name), is_leaf); }

std::vector<std::string> Model::leaf_units() {
  apply_leaf_options();
  return ctx_.coordinator.leaves();
}

void Model::apply_leaf_options() {
  if (leaf_options_applied_) {
    return;
  }
  leaf_options_applied_ = true;
  const Config& config = ctx_.runtime.config();
  for (const std::string& name : config.get_list("unit.leaf_names")) {
    ctx_.coordinator.set_leaves(LeafRule::name(name));
  }
  for (const std::string& suffix : config.get_list("unit.leaf_name_suffixes")) {
    ctx_.coordinator.set_leaves(LeafRule::suffix(suffix));
  }
  for (const std::string& type : config.get_list("unit.leaf_types")) {
    ctx_.coordinator.set_leaves(LeafRule::type(type));
  }
  if (const std::int64_t numel = config.get_int("unit.leaf_below_numel"); numel > 0) {
    ctx_.coordinator.set_leaves(LeafRule::numel_below(numel));
  }
}

void Model::finalize_leaves() {
  apply_leaf_options();
  for (const std::string& pattern : ctx_.runtime.config().get_list("unit.dynamic_names")) {
    TESSERA_CHECK(std::any_of(units_.begin(), units_.end(),
                              [&](const auto& unit) { return matches(pattern, unit->name()); }),
                  ConfigError, "unit.dynamic_names has '", pattern, "', which matches none of ",
                  units_.size(), " units; check its spelling");
  }
  check_stored_names();
  // A parameter that a static unit uses, too, is gathered and reduced by all ranks in any case.
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    const auto& users = units_of_param_[static_cast<std::size_t>(id)];
    ctx_.params[id].set_dynamic(std::all_of(users.begin(), users.end(), [&](const auto* unit) {
      return ctx_.coordinator.unit(unit->id()).traits.dynamic;
    }));
  }
  ctx_.coordinator.expand_leaves();
}

void Model::check_stored_names() const {
  for (const std::string& pattern : stored_rule_.names()) {
    const shard::Param* matched = nullptr;
    bool is_stored = false;
    for (int id = 0; id < ctx_.params.num_params(); ++id) {
      const shard::Param& param = ctx_.params[id];
      if (shard::StoredRule::matches(pattern, param.name())) {
        matched = &param;
        is_stored = is_stored || param.layout().is_encoded();
      }
    }
    TESSERA_CHECK(matched != nullptr, ConfigError, "quant.frozen_names has '", pattern,
                  "', which matches none of ", ctx_.params.num_params(),
                  " parameters; check its spelling");
    TESSERA_CHECK(is_stored, ConfigError, "quant.frozen_names has '", pattern,
                  "', which matches no frozen parameter of two dims and ",
                  stored_rule_.format().step(), " elements; parameter '", matched->name(), "' ",
                  matched->trainable() ? "is trainable: freeze it before its unit is made"
                                       : "stays as it is: leave it out");
  }
}

void Model::tell_stored() const {
  const std::string text = ctx_.stored_report.text(ctx_.group, ctx_.params, stored_rule_);
  if (!text.empty() && ctx_.group.rank() == 0) {
    ctx_.runtime.logger().info(text);
  }
}

void Model::finalize_units() {
  ctx_.coordinator.finalize();
  // From here on a leaf uses what is inside it.
  for (const auto& unit : units_) {
    for (const int id : ctx_.coordinator.unit(unit->id()).ids) {
      auto& users = units_of_param_[static_cast<std::size_t>(id)];
      if (std::find(users.begin(), users.end(), unit.get()) == users.end()) {
        users.push_back(unit.get());
        unit->add_trainable(ctx_.params[id].trainable() ? 1 : 0);
      }
    }
  }
}

planner::ModelShapes Model::shapes() const {
  planner::ModelShapes model;
  model.dtype = ctx_.params[0].layout().dtype();
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    const shard::Param& param = ctx_.params[id];
    model.params.push_back({param.name(), param.layout().numel(), param.trainable(),
                            param.dynamic(), static_cast<int>(tensor(id).dim()),
                            param.layout().format()});
  }
  for (const auto& unit : units_) {
    model.units.push_back(ctx_.coordinator.unit(unit->id()).ids);
    model.unit_names.push_back(unit->name());
  }
  return model;
}

std::int64_t Model::trainable_bytes() const {
  std::int64_t bytes = 0;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    if (ctx_.params[id].trainable()) {
      bytes += static_cast<std::int64_t>(ctx_.params[id].layout().full_bytes());
    }
  }
  return bytes;
}

std::optional<int> Model::find(const at::Tensor& tensor) const {
  const auto known = id_of_tensor_.find(tensor.unsafeGetTensorImpl());
  return known == id_of_tensor_.end() ? std::nullopt : std::optional<int>(known->second);
}

int Model::id_of(const at::Tensor& tensor) const {
  const std::optional<int> id = find(tensor);
  TESSERA_CHECK(id, ConfigError, "a tensor of ", tensor.toString(), " with sizes ", tensor.sizes(),
                " is no parameter of this engine; give one that a unit of it owns");
  return *id;
}

std::vector<int> Model::ids_of(const std::vector<at::Tensor>& wanted) const {
  std::vector<int> ids;
  ids.reserve(wanted.size());
  for (const at::Tensor& tensor : wanted) {
    ids.push_back(id_of(tensor));
  }
  return ids;
}

bool Model::is_used_by(const at::Tensor& param, const UnitCore& unit) const {
  const std::optional<int> id = find(param);
  return id && std::count(users_of(*id).begin(), users_of(*id).end(), &unit) > 0;
}

void Model::watch_gradient(int id) {
  const at::Tensor& tensor = tensors_[static_cast<std::size_t>(id)];
  torch::autograd::impl::set_post_acc_grad_hooks(
      tensor,
      ctx_.params[id].trainable() ? std::make_unique<GradientHook>(engine_.driver, id) : nullptr);
}

void Model::flip_trainable(int id) {
  const bool trainable = !ctx_.params[id].trainable();
  ctx_.params[id].set_trainable(trainable);
  watch_gradient(id);
  for (UnitCore* unit : users_of(id)) {
    unit->add_trainable(trainable ? 1 : -1);
  }
}

void Model::make_plain() {
  for (const at::Tensor& tensor : tensors_) {
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
  }
  for (const auto& unit : units_) {
    unit->set_plain();
  }
}

}  // namespace tessera::engine
