// Parameters between steps: frozen and unfrozen, written from outside, given back as plain tensors.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {
namespace {

// Fires once per backward, when the parameter's gradient is complete.
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(Engine::Impl& engine, int id) : engine_(engine), id_(id) {}
  void operator()(const at::Tensor& tensor) override { engine_.on_gradient(id_, tensor); }

 private:
  Engine::Impl& engine_;
  const int id_;
};

}  // namespace

int Engine::Impl::id_of(const at::Tensor& tensor) const {
  const auto known = id_of_tensor_.find(tensor.unsafeGetTensorImpl());
  TESSERA_CHECK(known != id_of_tensor_.end(), ConfigError, "a tensor of ", tensor.toString(),
                " with sizes ", tensor.sizes(),
                " is no parameter of this engine; give one that a unit of it owns");
  return known->second;
}

const std::string* Engine::Impl::name_of(const at::Tensor& tensor) const {
  const auto known = id_of_tensor_.find(tensor.unsafeGetTensorImpl());
  return known == id_of_tensor_.end() ? nullptr : &params[known->second].name();
}

bool Engine::Impl::is_used_by(const at::Tensor& param, const engine::UnitCore& unit) const {
  const auto known = id_of_tensor_.find(param.unsafeGetTensorImpl());
  if (known == id_of_tensor_.end()) {
    return false;
  }
  const auto& users = units_of_param_[static_cast<std::size_t>(known->second)];
  return std::find(users.begin(), users.end(), &unit) != users.end();
}

std::vector<int> Engine::Impl::ids_of(const std::vector<at::Tensor>& wanted) const {
  std::vector<int> ids;
  ids.reserve(wanted.size());
  for (const at::Tensor& tensor : wanted) {
    ids.push_back(id_of(tensor));
  }
  return ids;
}

void Engine::Impl::watch_gradient(int id) {
  const at::Tensor& tensor = tensors[static_cast<std::size_t>(id)];
  torch::autograd::impl::set_post_acc_grad_hooks(
      tensor, params[id].trainable() ? std::make_unique<GradientHook>(*this, id) : nullptr);
}

void Engine::Impl::set_trainable(const at::Tensor& tensor, bool trainable) {
  check_usable();
  const int id = id_of(tensor);
  if (params[id].trainable() == trainable && tensor.requires_grad() == trainable) {
    return;
  }
  check_no_gradients_pending(id);
  tensor.set_requires_grad(trainable);
  if (params[id].trainable() != trainable) {
    change_trainable({id});
  }
}

void Engine::Impl::check_no_gradients_pending(int id) const {
  TESSERA_CHECK(forward_depth_ == 0 && backward_depth_ == 0 &&
                    (reducer_ == nullptr || update_runs_ || reducer_->num_backwards() == 0),
                ConfigError, "parameter '", params[id].name(), "' is ",
                params[id].trainable() ? "frozen" : "unfrozen",
                " in the middle of a step: gradients of it are pending; call step() or zero_grad() "
                "first");
}

void Engine::Impl::notice_trainable() {
  if (trainable_is_known_) {
    return;
  }
  std::vector<int> changed;
  for (int id = 0; id < params.num_params(); ++id) {
    if (tensors[static_cast<std::size_t>(id)].requires_grad() != params[id].trainable()) {
      check_no_gradients_pending(id);
      changed.push_back(id);
    }
  }
  trainable_is_known_ = true;
  if (!changed.empty()) {
    change_trainable(changed);
  }
}

void Engine::Impl::change_trainable(const std::vector<int>& ids) {
  finish_update();
  for (const int id : ids) {
    const bool trainable = !params[id].trainable();
    params[id].set_trainable(trainable);
    watch_gradient(id);
    for (engine::UnitCore* unit : units_of_param_[static_cast<std::size_t>(id)]) {
      unit->add_trainable(trainable ? 1 : -1);
    }
    if (optimizer) {
      optimizer->follow_trainable(id);
    }
  }
  if (reducer_) {
    reducer_->clear();
    add_stats(replaced_reductions_, reducer_->take_stats());
    make_reducer();
  }
}

void Engine::Impl::let_go_of_copies(coordinator::UnitId unit) {
  for (shard::Param* const param : coordinator_->unit(unit).params) {
    if (param->device_copy().values != nullptr) {
      param->set_device_copy({});
      reducer_->free_gradient(param->id());
    }
  }
}

void Engine::Impl::shard_was_written(int id) {
  finish_update();
  params[id].set_updated(device::Pending());
  params[id].set_first_master({});
  if (optimizer) {
    optimizer->reset_master(id);
  }
}

void Engine::Impl::meet_outside_of_units(const std::string& what) {
  if (is_sealed()) {
    coordinator_->meet(coordinator::MeetingPoint::kHold, what);
  }
}

std::vector<std::int64_t> Engine::Impl::gather_numbers(const std::vector<std::int64_t>& mine,
                                                       const std::string& what) {
  if (group().size() == 1 || mine.empty()) {
    return mine;
  }
  meet_outside_of_units(what);
  device::Device& device = runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kGather);
  const std::size_t bytes = mine.size() * sizeof(std::int64_t);
  const auto ranks = static_cast<std::size_t>(group().size());
  const device::Memory own = device.allocate(Tier::kDevice, bytes, Role::kStaging);
  const device::Memory all = device.allocate(Tier::kDevice, bytes * ranks, Role::kStaging);
  device.start_copy(own.data(), mine.data(), bytes, stream).wait();
  comm::CallOptions call;
  call.label.unit = what;
  call.stream = &stream;
  const comm::Gather gather{own.data(), all.data(), static_cast<std::int64_t>(mine.size()),
                            DType::kInt64};
  group().start_all_gather({&gather, 1}, call).wait();
  std::vector<std::int64_t> result(mine.size() * ranks);
  device.start_copy(result.data(), all.data(), bytes * ranks, stream).wait();
  return result;
}

void Engine::Impl::agree(const std::string& what, const std::function<void()>& check) {
  constexpr std::size_t kMostWords = 400;
  std::exception_ptr refusal;
  std::string words;
  try {
    check();
  } catch (const std::exception& error) {
    refusal = std::current_exception();
    words = error.what();
    words = words.substr(0, std::min(kMostWords, words.find('\n')));
  }
  if (group().size() > 1) {
    meet_outside_of_units(what);
    std::vector<std::byte> mine(1 + kMostWords);
    mine.front() = std::byte{refusal ? std::uint8_t{1} : std::uint8_t{0}};
    std::memcpy(mine.data() + 1, words.data(), words.size());
    comm::CallOptions call;
    call.label.unit = what;
    const comm::HostGather said = group().start_gather_host(mine, call);
    said.done.wait();
    for (int rank = 0; rank < group().size() && !refusal; ++rank) {
      const std::byte* const from = said.bytes.get() + static_cast<std::size_t>(rank) * mine.size();
      TESSERA_CHECK(from[0] == std::byte{0}, ConfigError, what, ": rank ", rank,
                    " cannot, so no rank does. It says: ",
                    std::string(reinterpret_cast<const char*>(from + 1),
                                strnlen(reinterpret_cast<const char*>(from + 1), kMostWords)));
    }
  }
  if (refusal) {
    std::rethrow_exception(refusal);
  }
}

void Engine::Impl::send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers) {
  check_usable();
  const std::optional<DType> dtype = wanted_dtype();
  for (const NamedTensor& buffer : buffers) {
    if (dtype && buffer.tensor.defined() && buffer.tensor.is_floating_point()) {
      at::Tensor(buffer.tensor).set_data(buffer.tensor.to(shard::scalar_type_of(*dtype)));
    }
    if (buffer.tensor.defined() &&
        std::none_of(buffers_.begin(), buffers_.end(),
                     [&](const at::Tensor& known) { return known.is_same(buffer.tensor); })) {
      buffers_.push_back(buffer.tensor);
    }
    if (!buffer.tensor.defined() || buffer.tensor.numel() == 0 || group().size() == 1) {
      continue;
    }
    const std::string name = unit + "." + buffer.name;
    TESSERA_CHECK(buffer.tensor.layout() == at::kStrided, ConfigError, "buffer '", name, "' is ",
                  buffer.tensor.toString(), "; buffers of a unit must be dense");
    // Bytes, whatever the type is, in the logical order.
    const at::NoGradGuard no_grad;
    const at::Device where(runtime.on_cuda() ? at::kCUDA : at::kCPU);
    at::Tensor values = buffer.tensor.detach();
    values = (values.device().type() == where.type() ? values : values.to(where)).contiguous();
    comm::CallOptions call;
    call.label.unit = unit;
    call.label.parameter = name;
    call.stream = &runtime.device().stream(device::StreamKind::kCompute);
    group()
        .start_broadcast(values.data_ptr(), static_cast<std::int64_t>(values.nbytes()),
                         DType::kUInt8, 0, call)
        .wait();
    if (values.data_ptr() != buffer.tensor.data_ptr()) {
      at::Tensor(buffer.tensor.detach()).copy_(values);
    }
  }
}

void Engine::Impl::to_plain() {
  check_usable();
  TESSERA_CHECK(forward_depth_ == 0 && backward_depth_ == 0, ConfigError,
                "to_plain() inside of a forward or backward");
  TESSERA_CHECK(!gathered_.has_open(), ConfigError,
                "to_plain() inside a gathered scope; close it first");
  abandon();  // what an old graph still holds does nothing from here on
  for (int id = 0; id < params.num_params(); ++id) {
    const at::Tensor& tensor = tensors[static_cast<std::size_t>(id)];
    const at::Tensor value = full_value(id).to(tensor.device());
    shard::unbind_tensor(tensor, value);
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
  }
  for (const auto& unit : units_) {
    unit->set_plain();
  }
  is_plain_ = true;
}

}  // namespace tessera
