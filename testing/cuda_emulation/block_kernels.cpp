// quant/cuda_launch.h on cuda_emulation.h: the host's loops, in the order of a stream. The codec in
// front of them is the one that a GPU has.
#include <memory>

#include "tessera/quant/cuda_launch.h"
#include "testing/cuda_emulation/cuda_emulation.h"

namespace tessera::quant::cuda {
namespace {

template <typename Work>
void enqueue(const BlockFormat& format, cudaStream_t stream, const Work& work) {
  const std::shared_ptr<comm::Codec> codec = make_cpu_block_codec(format);
  testing::enqueue_emulated(stream, [=] { work(*codec); });
}

}  // namespace

void launch_encode(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                   std::byte* wire, cudaStream_t stream) {
  enqueue(format, stream, [=](const comm::Codec& codec) {
    codec.encode(values, dtype, numel, wire, nullptr).wait();
  });
}

void launch_decode(const BlockFormat& format, const std::byte* wire, std::int64_t numel,
                   void* values, DType dtype, cudaStream_t stream) {
  enqueue(format, stream, [=](const comm::Codec& codec) {
    codec.decode(wire, numel, values, dtype, nullptr).wait();
  });
}

void launch_decode_sum(const BlockFormat& format, const std::byte* wires, std::size_t stride,
                       int num_wires, std::int64_t numel, void* sum, DType dtype,
                       cudaStream_t stream) {
  enqueue(format, stream, [=](const comm::Codec& codec) {
    codec.decode_sum(wires, stride, num_wires, numel, sum, dtype, nullptr).wait();
  });
}

void launch_measure(const BlockFormat& format, const void* values, DType dtype, std::int64_t numel,
                    const std::byte* wire, double* /*slots*/, double* result, bool continues,
                    cudaStream_t stream) {
  enqueue(format, stream, [=](const comm::Codec& codec) {
    codec.measure(values, dtype, numel, wire, result, continues, nullptr).wait();
  });
}

}  // namespace tessera::quant::cuda
