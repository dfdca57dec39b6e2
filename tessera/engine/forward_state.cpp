#include "tessera/engine/forward_state.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_lazy_clone.h>

namespace tessera::engine {
namespace {

constexpr std::array<at::DeviceType, 2> kAutocastDevices = {at::kCPU, at::kCUDA};

// Shares the memory until one of the two is written to, where the memory is torch's own.
at::Tensor copy_on_write(const at::Tensor& tensor) {
  try {
    return at::_lazy_clone(tensor);
  } catch (const c10::Error&) {
    return tensor.detach().clone();
  }
}

}  // namespace

AutocastState AutocastState::now() {
  AutocastState state;
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    state.devices_[i] = {at::autocast::is_autocast_enabled(kAutocastDevices[i]),
                         at::autocast::get_autocast_dtype(kAutocastDevices[i])};
  }
  state.cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::apply() const {
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_dtype(kAutocastDevices[i], devices_[i].dtype);
    at::autocast::set_autocast_enabled(kAutocastDevices[i], devices_[i].enabled);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
}

RandomState RandomState::now(bool with_cuda) {
  RandomState state;
  const auto add = [&](at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::Tensor saved = generator.get_state();
    state.saved_.emplace_back(std::move(generator), saved);
  };
  if (with_cuda) {
    add(at::globalContext().defaultGenerator(at::Device(at::kCUDA, -1)));
  }
  add(at::detail::getDefaultCPUGenerator());
  return state;
}

void RandomState::apply() const {
  for (const auto& [generator, saved] : saved_) {
    at::Generator target = generator;
    const std::lock_guard<std::mutex> lock(target.mutex());
    target.set_state(saved);
  }
}

BufferValues BufferValues::now(const std::vector<at::Tensor>& buffers) {
  const at::NoGradGuard no_grad;
  BufferValues values;
  for (const at::Tensor& buffer : buffers) {
    if (buffer.defined() && buffer.has_storage()) {
      values.saved_.emplace_back(buffer, copy_on_write(buffer));
    }
  }
  return values;
}

void BufferValues::apply() const {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, value] : saved_) {
    if (buffer.const_data_ptr() != value.const_data_ptr()) {
      buffer.variable_data().copy_(value);
    }
  }
}

ForwardState ForwardState::now(const std::vector<at::Tensor>& buffers, bool with_cuda) {
  ForwardState state;
  state.autocast_ = AutocastState::now();
  state.random_ = RandomState::now(with_cuda);
  state.buffers_ = BufferValues::now(buffers);
  return state;
}

void ForwardState::apply() const {
  autocast_.apply();
  random_.apply();
  buffers_.apply();
}

}  // namespace tessera::engine
