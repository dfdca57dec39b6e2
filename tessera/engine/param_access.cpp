#include "tessera/engine/param_access.h"

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/engine/param_scopes.h"
#include "tessera/engine/shard_writer.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {
namespace engine {
namespace {

constexpr const char* kWhat = "gathered scope";

}  // namespace

ParamAccess::~ParamAccess() {
  for (const auto& state : open_) {
    state->access = nullptr;
  }
  if (resident_) {
    resident_->access = nullptr;
  }
  // Their memory goes; the tensors must not point at it.
  for (const auto& [id, memory] : early_) {
    shard::Param& param = ctx_.params[id];
    param.allow_edits();
    while (param.num_users() > 0) {
      param.remove_user(kWhat);
    }
  }
}

void ParamAccess::check_no_early_scope() const {
  for (const auto& state : open_) {
    TESSERA_CHECK(!state->is_early || state->ids.empty(), ConfigError,
                  "the first unit runs while parameter '", ctx_.params[state->ids.front()].name(),
                  "' is in a gathered scope that was opened before; close that scope first");
  }
}

void ParamAccess::check_no_edits(const char* what) const {
  for (const auto& state : open_) {
    TESSERA_CHECK(state->modifier_rank < 0, ConfigError, what,
                  " inside a gathered scope in which rank ", state->modifier_rank,
                  " may change parameters; close that scope first");
  }
}

void ParamAccess::check_no_scopes(const char* what) const {
  TESSERA_CHECK(open_.empty(), ConfigError, what, " inside a gathered scope; close it first");
}

std::shared_ptr<GatheredState> ParamAccess::open(std::vector<int> ids, int modifier_rank) {
  TESSERA_CHECK(modifier_rank >= -1 && modifier_rank < ctx_.group.size(), ConfigError,
                "gathered(): modifier_rank=", modifier_rank, " of ", ctx_.group.size(),
                " ranks; -1 is for reading");
  if (modifier_rank >= 0) {
    ctx_.lifecycle.check_not_resident("gathered() with a modifier rank");
    TESSERA_CHECK(ctx_.lifecycle.forward_depth() == 0, ConfigError,
                  "gathered() with a modifier rank inside of a unit's forward; change parameters "
                  "between units");
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const int id : ids) {
    TESSERA_CHECK(!ctx_.coordinator.is_decoded(id), ConfigError, "gathered(): parameter '",
                  ctx_.params[id].name(),
                  "' is resident with the rounded values that units compute with (quant.weights); "
                  "engine.full_value(",
                  id, ") gives the exact ones, or leave the resident scope first");
  }
  auto state = std::make_shared<GatheredState>();
  state->ids = std::move(ids);
  state->modifier_rank = modifier_rank;
  state->is_early = !ctx_.lifecycle.is_finalized();
  for (const auto& other : open_) {
    for (const int id : state->ids) {
      TESSERA_CHECK(
          modifier_rank < 0 || other->modifier_rank < 0 || other->modifier_rank == modifier_rank ||
              !std::binary_search(other->ids.begin(), other->ids.end(), id),
          ConfigError, "parameter '", ctx_.params[id].name(), "' is to be changed by rank ",
          modifier_rank, " inside a gathered scope in which rank ", other->modifier_rank,
          " may change it; close that one first");
    }
  }
  for (const int id : state->ids) {
    if (modifier_rank >= 0) {
      ctx_.params.before_overwrite(id).wait();
    }
  }
  if (state->is_early) {
    hold_early(state->ids);
  } else {
    ctx_.coordinator.begin_hold(state->ids, kWhat);
  }
  state->hashes = hashes_of(state->ids);
  for (const int id : state->ids) {
    if (modifier_rank >= 0) {
      ctx_.params[id].allow_edits();
    }
  }
  state->access = this;
  open_.push_back(state);
  return state;
}

// The coordinator takes its arena when the model is complete; until then each parameter gets memory
// of its own.
void ParamAccess::hold_early(const std::vector<int>& ids) {
  for (const int id : ids) {
    shard::Param& param = ctx_.params[id];
    if (param.num_users() == 0) {
      if (param.shard_is_full()) {
        param.start_gather(param.shard());
      } else {
        early_[id] = gather_full(id, kWhat);
        param.start_gather(early_[id].data());
      }
      param.finish_gather();
    }
    param.add_user();
  }
}

void ParamAccess::free_early(int id) {
  shard::Param& param = ctx_.params[id];
  param.remove_user(kWhat);
  if (param.num_users() == 0) {
    param.release();
    early_.erase(id);
  }
}

void ParamAccess::free(const GatheredState& state, const std::vector<int>& written) {
  std::vector<int> kept;
  std::vector<int> stale;
  for (const int id : state.ids) {
    shard::Param& param = ctx_.params[id];
    param.allow_edits();  // they have been looked at
    if (state.is_early) {
      free_early(id);
    } else if (std::binary_search(written.begin(), written.end(), id)) {
      stale.push_back(id);
    } else {
      kept.push_back(id);
    }
  }
  if (!stale.empty()) {
    ctx_.coordinator.end_hold(stale, kWhat, /*changed=*/true);
  }
  if (!kept.empty()) {
    ctx_.coordinator.end_hold(kept, kWhat, /*changed=*/false);
  }
}

// Where the values lie, by all threads there are: only the sums come to the host.
std::vector<std::uint64_t> ParamAccess::hashes_of(const std::vector<int>& ids) const {
  std::vector<std::uint64_t> hashes(ids.size());
  if (ids.empty()) {
    return hashes;
  }
  device::Device& device = ctx_.runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kCompute);
  const std::size_t bytes = hashes.size() * sizeof(std::uint64_t);
  const device::Memory sums = device.allocate(Tier::kDevice, bytes, Role::kStaging);
  std::ignore = device.start_fill(sums.data(), 0, bytes, stream);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const shard::Param& param = ctx_.params[ids[i]];
    std::ignore = ctx_.runtime.kernels().start_hash(
        param.full(),
        static_cast<std::size_t>(param.layout().numel()) * bytes_of(param.layout().dtype()),
        reinterpret_cast<std::uint64_t*>(sums.data()) + i, stream);
  }
  device.start_copy(hashes.data(), sums.data(), bytes, stream).wait();
  return hashes;
}

bool ParamAccess::is_changed_elsewhere(const GatheredState& state, int id) const {
  return state.modifier_rank < 0 && std::any_of(open_.begin(), open_.end(), [&](const auto& each) {
           return each->modifier_rank >= 0 &&
                  std::binary_search(each->ids.begin(), each->ids.end(), id);
         });
}

std::string ParamAccess::first_wrong(const GatheredState& state,
                                     const std::vector<std::int64_t>& changed) const {
  const std::size_t num_ids = state.ids.size();
  for (std::size_t rank = 0; rank < changed.size() / std::max<std::size_t>(num_ids, 1); ++rank) {
    for (std::size_t i = 0; i < num_ids; ++i) {
      if (changed[rank * num_ids + i] == 0 || static_cast<int>(rank) == state.modifier_rank) {
        continue;
      }
      const std::string name = ctx_.params[state.ids[i]].name();
      if (state.modifier_rank >= 0) {
        return detail::concat("parameter '", name, "' was changed on rank ", rank,
                              " inside a gathered scope in which only rank ", state.modifier_rank,
                              " may change it; nothing of this scope was written back");
      }
      return detail::concat("parameter '", name, "' was changed on rank ", rank,
                            " inside a gathered scope for reading; pass the rank whose changes "
                            "shall count: engine.gathered(params, modifier_rank)");
    }
  }
  return {};
}

void ParamAccess::write_back(int id, int modifier_rank) {
  shard::Param& param = ctx_.params[id];
  const shard::Layout& layout = param.layout();
  if (ctx_.group.size() > 1 || !param.shard_is_full()) {
    comm::CallOptions call;
    call.label.unit = kWhat;
    call.label.parameter = param.name();
    call.stream = &ctx_.runtime.device().stream(device::StreamKind::kCompute);
    ctx_.group.start_broadcast(param.full(), layout.numel(), layout.dtype(), modifier_rank, call)
        .wait();
  }
  if (!param.shard_is_full()) {
    ShardWriter writer(ctx_, param, ShardWriter::Before::kKept);
    writer.write(0, param.range().numel,
                 static_cast<const std::byte*>(param.full()) +
                     static_cast<std::size_t>(param.range().begin) * bytes_of(layout.dtype()));
    writer.finish();
  }
  driver_.shard_was_written(id);
}

void ParamAccess::set_hashes(const std::vector<int>& ids) {
  if (open_.empty()) {
    return;  // nobody compares with them
  }
  const std::vector<std::uint64_t> hashes = hashes_of(ids);
  for (const auto& other : open_) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto found = std::lower_bound(other->ids.begin(), other->ids.end(), ids[i]);
      if (found != other->ids.end() && *found == ids[i]) {
        other->hashes[static_cast<std::size_t>(found - other->ids.begin())] = hashes[i];
      }
    }
  }
}

void ParamAccess::close(GatheredState& state) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& each) { return each.get() == &state; });
  const std::shared_ptr<GatheredState> keep = std::move(*found);
  open_.erase(found);
  state.access = nullptr;
  std::vector<int> written;
  std::string wrong;
  try {
    const std::vector<std::uint64_t> hashes = hashes_of(state.ids);
    std::vector<std::int64_t> changed;
    for (std::size_t i = 0; i < state.ids.size(); ++i) {
      const bool counts = !is_changed_elsewhere(state, state.ids[i]);
      changed.push_back(counts && hashes[i] != state.hashes[i] ? 1 : 0);
    }
    changed = ranks_.gather_numbers(changed, kWhat);
    wrong = first_wrong(state, changed);
    for (std::size_t i = 0; i < changed.size(); ++i) {
      if (changed[i] != 0) {
        written.push_back(state.ids[i % state.ids.size()]);
      }
    }
    std::sort(written.begin(), written.end());
    written.erase(std::unique(written.begin(), written.end()), written.end());
    for (const int id : written) {
      if (wrong.empty()) {
        write_back(id, state.modifier_rank);
      } else if (ctx_.params[id].shard_is_full()) {
        driver_.shard_was_written(id);  // it has happened: no later step shall revert half of it
      }
    }
    if (wrong.empty()) {
      set_hashes(written);
    }
  } catch (...) {
    free(state, state.ids);
    throw;
  }
  free(state, written);
  TESSERA_CHECK(wrong.empty(), ConfigError, wrong);
}

void ParamAccess::close_quietly(GatheredState& state) noexcept {
  try {
    close(state);
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("while a gathered scope was left: ", error.what());
    ctx_.lifecycle.throw_later(std::current_exception());
  }
}

std::shared_ptr<ResidentState> ParamAccess::open_resident() {
  ctx_.lifecycle.check_idle("resident()");
  TESSERA_CHECK(resident_ == nullptr, ConfigError, "resident() inside another resident scope");
  auto state = std::make_shared<ResidentState>();
  state->is_resident = ctx_.coordinator.begin_resident();
  state->access = this;
  if (!state->is_resident) {
    ctx_.runtime.logger().info(
        "the parameters do not fit into live.limit_bytes: units gather as usual in the resident "
        "scope");
  }
  resident_ = state;
  ctx_.lifecycle.set_resident(true);
  return state;
}

void ParamAccess::close(ResidentState& state) {
  state.access = nullptr;
  resident_ = nullptr;
  ctx_.lifecycle.set_resident(false);
  if (std::exchange(state.is_resident, false)) {
    ctx_.coordinator.end_resident();
  }
}

void ParamAccess::close_quietly(ResidentState& state) noexcept {
  try {
    close(state);
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("while a resident scope was left: ", error.what());
    driver_.abandon();  // a fresh start releases everything
  }
}

device::Memory ParamAccess::gather_full(int id, const std::string& what) {
  const shard::Param& param = ctx_.params[id];
  const shard::Layout& layout = param.layout();
  ranks_.join_outside_of_units(what);
  device::Device& device = ctx_.runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kGather);
  device::Memory full = device.allocate(Tier::kDevice, param.gathered_bytes(), Role::kFull);
  std::byte* shard = param.shard();
  device::Pending brought;
  if (param.tier() != Tier::kDevice) {
    std::byte* const slot = full.data() + layout.load_offset(ctx_.params.rank());
    if (param.is_on_nvme()) {
      brought = ctx_.tiers.loader().start_load(param, slot, device::Pending());
    } else {
      stream.wait(param.updated());
      brought = device.start_copy(slot, shard, layout.shard_bytes(), stream);
    }
    shard = slot;
    if (ctx_.params.num_ranks() == 1 && !layout.is_encoded()) {
      brought.wait();
      return full;
    }
  } else {
    stream.wait(param.updated());
  }
  comm::CallOptions call;
  call.label.unit = what;
  call.label.parameter = param.name();
  call.stream = &stream;
  call.ready = brought;
  const comm::Gather gather{shard,          full.data(), layout.shard_numel(),
                            layout.dtype(), {},          param.codec()};
  try {
    const device::Pending gathered = ctx_.mesh.gathers().start_all_gather({&gather, 1}, call);
    stream.wait(gathered);
    gathered.wait();
  } catch (...) {
    ctx_.tiers.wait_for_loader();  // it may still write to memory that goes now
    throw;
  }
  return full;
}

at::Tensor ParamAccess::value_on(int id, at::Device where) {
  ctx_.lifecycle.check_usable();
  const device::Memory full = gather_full(id, "full value");
  device::Device& device = ctx_.runtime.device();
  const at::Tensor& tensor = model_.tensor(id);
  at::Tensor value = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       at::TensorOptions(tensor.scalar_type()).device(where));
  if (value.numel() > 0) {
    device::Stream& stream = device.stream(device::StreamKind::kGather);
    // Torch may give memory that work of its stream still uses.
    stream.wait(device.stream(device::StreamKind::kCompute).record());
    device.start_copy(value.data_ptr(), full.data(), value.nbytes(), stream).wait();
  }
  return value;
}

void ParamAccess::save_parameters(const std::string& path) {
  const bool writes = ctx_.group.rank() == 0;
  std::vector<checkpoint::TensorEntry> entries;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    checkpoint::TensorEntry entry;
    entry.name = ctx_.params[id].name();
    entry.dtype = ctx_.params[id].layout().dtype();
    entry.shape = model_.tensor(id).sizes().vec();
    entries.push_back(std::move(entry));
  }
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  ranks_.agree("save_parameters", [&] {
    ctx_.lifecycle.check_usable();
    if (writes) {
      writer = std::make_unique<checkpoint::SafetensorsWriter>(path, entries);
    }
  });
  std::exception_ptr failure;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    const at::Tensor value = full_value(id).contiguous();
    try {
      if (writer && value.numel() > 0) {
        writer->append(value.data_ptr(), value.nbytes());
      }
    } catch (const Error&) {
      failure = std::current_exception();  // the others' gathers need this rank
      writer.reset();
    }
  }
  ranks_.agree("save_parameters", [&] {
    if (failure) {
      std::rethrow_exception(failure);
    }
    if (writer) {
      writer->finish();
    }
  });
}

void ParamAccess::to_plain() {
  ctx_.lifecycle.check_usable();
  ctx_.lifecycle.check_idle("to_plain()");
  TESSERA_CHECK(open_.empty(), ConfigError, "to_plain() inside a gathered scope; close it first");
  driver_.abandon();  // what an old graph still holds does nothing from here on
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    const at::Tensor& tensor = model_.tensor(id);
    shard::unbind_tensor(tensor, value_on(id, tensor.device()));
  }
  model_.make_plain();
  ctx_.lifecycle.set_plain();
}

}  // namespace engine

GatheredScope::GatheredScope(std::shared_ptr<engine::GatheredState> state)
    : state_(std::move(state)) {}
GatheredScope::~GatheredScope() {
  if (state_ && state_->access != nullptr) {
    state_->access->close_quietly(*state_);
  }
}
void GatheredScope::close() {
  if (state_ && state_->access != nullptr) {
    state_->access->close(*state_);
  }
}

ResidentScope::ResidentScope(std::shared_ptr<engine::ResidentState> state)
    : state_(std::move(state)) {}
ResidentScope::~ResidentScope() {
  if (state_ && state_->access != nullptr) {
    state_->access->close_quietly(*state_);
  }
}
bool ResidentScope::is_resident() const { return state_ && state_->is_resident; }
void ResidentScope::close() {
  if (state_ && state_->access != nullptr) {
    state_->access->close(*state_);
  }
}

}  // namespace tessera
