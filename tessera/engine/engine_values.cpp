// Whole parameters for those who look at or save a model.

#include <exception>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {

device::Memory Engine::Impl::gather_full(int id, const std::string& what) {
  const shard::Param& param = params[id];
  const shard::Layout& layout = param.layout();
  meet_outside_of_units(what);
  device::Device& device = runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kGather);
  device::Memory full = device.allocate(Tier::kDevice, layout.full_bytes(), Role::kFull);
  std::byte* shard = param.shard();
  device::Pending brought;
  if (param.tier() != Tier::kDevice) {
    std::byte* const slot =
        full.data() + static_cast<std::size_t>(group().rank()) * layout.shard_bytes();
    if (param.is_on_nvme()) {
      brought = tiers.feed().start_load(param, slot, device::Pending());
    } else {
      stream.wait(param.updated());
      brought = device.start_copy(slot, shard, layout.shard_bytes(), stream);
    }
    shard = slot;
    if (group().size() == 1) {
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
  const comm::Gather gather{shard, full.data(), layout.shard_numel(), layout.dtype()};
  try {
    const device::Pending gathered = group().start_all_gather({&gather, 1}, call);
    stream.wait(gathered);
    gathered.wait();
  } catch (...) {
    tiers.wait_for_feed();  // it may still write to memory that goes now
    throw;
  }
  return full;
}

at::Tensor Engine::Impl::full_value(int id) {
  check_usable();
  const device::Memory full = gather_full(id, "full value");
  device::Device& device = runtime.device();
  const at::Tensor& tensor = tensors[static_cast<std::size_t>(id)];
  at::Tensor value =
      at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  if (value.numel() > 0) {
    device
        .start_copy(value.data_ptr(), full.data(), value.nbytes(),
                    device.stream(device::StreamKind::kGather))
        .wait();
  }
  return value;
}

void Engine::Impl::save_parameters(const std::string& path) {
  const bool writes = group().rank() == 0;
  std::vector<checkpoint::TensorEntry> entries;
  for (int id = 0; id < params.num_params(); ++id) {
    checkpoint::TensorEntry entry;
    entry.name = params[id].name();
    entry.dtype = params[id].layout().dtype();
    entry.shape = tensors[static_cast<std::size_t>(id)].sizes().vec();
    entries.push_back(std::move(entry));
  }
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  agree("save_parameters", [&] {
    check_usable("save_parameters()");
    if (writes) {
      writer = std::make_unique<checkpoint::SafetensorsWriter>(path, entries);
    }
  });
  std::exception_ptr failure;
  for (int id = 0; id < params.num_params(); ++id) {
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
  agree("save_parameters", [&] {
    if (failure) {
      std::rethrow_exception(failure);
    }
    if (writer) {
      writer->finish();
    }
  });
}

}  // namespace tessera
