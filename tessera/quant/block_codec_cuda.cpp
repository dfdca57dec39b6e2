// Blocks on an NVIDIA GPU: checks, scratch memory and the order of streams. The kernels themselves
// are behind cuda_launch.h.
#include <array>
#include <cstddef>
#include <mutex>

#include <cuda_runtime_api.h>

#include "tessera/core/error.h"
#include "tessera/device/cuda_stream.h"
#include "tessera/quant/checked_codec.h"
#include "tessera/quant/cuda_launch.h"

namespace tessera::quant {
namespace {

device::CudaStream& cuda_stream(device::Stream& stream) {
  auto* own = dynamic_cast<device::CudaStream*>(&stream);
  TESSERA_INVARIANT(own != nullptr, "blocks of a GPU on the ", to_string(stream.kind()),
                    " stream of a device that is not CUDA's");
  return *own;
}

class CudaBlockCodec final : public CheckedCodec {
 public:
  CudaBlockCodec(const BlockFormat& format, device::Device& device)
      : CheckedCodec(format), device_(device), host_(make_cpu_block_codec(format)) {
    cuda_stream(device.stream(device::StreamKind::kCompute));
  }

  // The scratch memory below may still be in use.
  ~CudaBlockCodec() override {
    for (Scratch& scratch : scratch_) {
      try {
        scratch.last_use.wait();
      } catch (const Error&) {
        // Whoever waits for the work learns of it.
      }
    }
  }

  device::Pending encode(const void* values, DType dtype, std::int64_t numel, std::byte* wire,
                         device::Stream* stream) const override {
    check("encoding", dtype, numel, wire);
    if (stream == nullptr) {
      return host_->encode(values, dtype, numel, wire, nullptr);
    }
    return launch("encode", numel, *stream, [&](cudaStream_t handle) {
      cuda::launch_encode(format(), values, dtype, numel, wire, handle);
    });
  }

  device::Pending decode(const std::byte* wire, std::int64_t numel, void* values, DType dtype,
                         device::Stream* stream) const override {
    check("decoding", dtype, numel, wire);
    if (stream == nullptr) {
      return host_->decode(wire, numel, values, dtype, nullptr);
    }
    return launch("decode", numel, *stream, [&](cudaStream_t handle) {
      cuda::launch_decode(format(), wire, numel, values, dtype, handle);
    });
  }

  device::Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                             std::int64_t numel, void* sum, DType dtype,
                             device::Stream* stream) const override {
    check_sum(dtype, numel, wires, stride, num_wires);
    if (stream == nullptr) {
      return host_->decode_sum(wires, stride, num_wires, numel, sum, dtype, nullptr);
    }
    return launch("decode and sum", numel, *stream, [&](cudaStream_t handle) {
      cuda::launch_decode_sum(format(), wires, stride, num_wires, numel, sum, dtype, handle);
    });
  }

  device::Pending measure(const void* values, DType dtype, std::int64_t numel,
                          const std::byte* wire, double* result, bool continues,
                          device::Stream* stream) const override {
    check("measuring", dtype, numel, wire);
    if (stream == nullptr) {
      return host_->measure(values, dtype, numel, wire, result, continues, nullptr);
    }
    // Under the mutex up to the launch: uses of one stream's scratch memory are in its order.
    const std::scoped_lock lock(mutex_);
    Scratch& scratch = scratch_.at(static_cast<std::size_t>(stream->kind()));
    if (scratch.slots.data() == nullptr) {
      scratch.slots = device_.allocate(Tier::kDevice,
                                       static_cast<std::size_t>(kMeasureSlots) * 2 * sizeof(double),
                                       Role::kStaging);
    }
    auto* const slots = reinterpret_cast<double*>(scratch.slots.data());
    scratch.last_use = cuda_stream(*stream).launch(
        [&](cudaStream_t handle) {
          cuda::launch_measure(format(), values, dtype, numel, wire, slots, result, continues,
                               handle);
        },
        "quantisation error");
    return scratch.last_use;
  }

 private:
  // Of the device's stream of each kind.
  struct Scratch {
    device::Memory slots;
    device::Pending last_use;
  };

  template <typename Start>
  static device::Pending launch(const char* label, std::int64_t numel, device::Stream& stream,
                                const Start& start) {
    if (numel == 0) {
      return stream.record();  // CUDA refuses a grid without blocks
    }
    return cuda_stream(stream).launch(start, label);
  }

  device::Device& device_;
  const std::unique_ptr<comm::Codec> host_;  // for memory of the host

  mutable std::mutex mutex_;
  mutable std::array<Scratch, device::kNumStreams> scratch_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<comm::Codec> make_cuda_block_codec(const BlockFormat& format,
                                                   device::Device& device) {
  return std::make_unique<CudaBlockCodec>(format, device);
}

}  // namespace tessera::quant
