#include "tessera/engine/rank_tensors.h"

#include <cstring>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include "tessera/core/error.h"

namespace tessera::engine {
namespace {

constexpr const char* kCpu = "cpu";
constexpr const char* kCuda = "cuda";

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kDouble:
      return DType::kFloat64;
    case at::kLong:
      return DType::kInt64;
    case at::kInt:
      return DType::kInt32;
    case at::kByte:
      return DType::kUInt8;
    default:
      return std::nullopt;
  }
}

// The current GPU's, or the one of the CPU.
at::Generator generator_called(const std::string& name) {
  return name == kCuda ? at::globalContext().defaultGenerator(at::Device(at::kCUDA, -1))
                       : at::detail::getDefaultCPUGenerator();
}

}  // namespace

std::vector<RankTensor> copy_buffers(const Model& model) {
  const at::NoGradGuard no_grad;
  std::vector<RankTensor> copies;
  for (std::size_t i = 0; i < model.buffers().size(); ++i) {
    const at::Tensor& buffer = model.buffers()[i];
    const std::string& name = model.buffer_names()[i];
    TESSERA_CHECK(buffer.layout() == at::kStrided, ConfigError, "buffer '", name, "' is ",
                  buffer.toString(), "; a checkpoint holds dense buffers only");
    if (buffer.numel() > 0) {
      copies.push_back({name, buffer.detach()
                                  .to(at::kCPU, buffer.scalar_type(), /*non_blocking=*/false,
                                      /*copy=*/true)
                                  .contiguous()});
    }
  }
  return copies;
}

std::vector<RankTensor> copy_generators(bool with_cuda) {
  std::vector<RankTensor> copies;
  for (const char* const name : {kCpu, kCuda}) {
    if (name == kCpu || with_cuda) {
      at::Generator generator = generator_called(name);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      copies.push_back({name, generator.get_state().contiguous().clone()});
    }
  }
  return copies;
}

checkpoint::StoredRankTensor describe(const RankTensor& tensor) {
  checkpoint::StoredRankTensor stored;
  stored.name = tensor.name;
  stored.shape = tensor.values.sizes().vec();
  if (const std::optional<DType> dtype = dtype_of(tensor.values.scalar_type())) {
    stored.dtype = *dtype;
  } else {
    stored.dtype = DType::kUInt8;
    stored.type = c10::toString(tensor.values.scalar_type());
  }
  return stored;
}

std::string why_not(const checkpoint::StoredRankTensor& stored, const at::Tensor& buffer) {
  const checkpoint::StoredRankTensor ours = describe({stored.name, buffer});
  if (stored.dtype != ours.dtype || stored.type != ours.type) {
    const auto type = [](const checkpoint::StoredRankTensor& each) {
      return each.type.empty() ? std::string(to_string(each.dtype)) : each.type;
    };
    return detail::concat("is ", type(stored), " there and ", type(ours), " here");
  }
  if (stored.shape != ours.shape) {
    return detail::concat("has shape ", at::IntArrayRef(stored.shape), " there and ",
                          at::IntArrayRef(ours.shape), " here");
  }
  return {};
}

void put_buffer(const at::Tensor& buffer, std::span<const std::byte> bytes) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = at::empty(buffer.sizes(), at::TensorOptions(buffer.scalar_type()));
  TESSERA_INVARIANT(values.nbytes() == bytes.size(), "a buffer of ", values.nbytes(),
                    " bytes is given ", bytes.size());
  std::memcpy(values.data_ptr(), bytes.data(), bytes.size());
  at::Tensor(buffer.detach()).copy_(values);
}

void put_generator(const std::string& name, std::span<const std::byte> bytes) {
  const at::Tensor state =
      at::empty({static_cast<std::int64_t>(bytes.size())}, at::TensorOptions(at::kByte));
  std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
  at::Generator generator = generator_called(name);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace tessera::engine
