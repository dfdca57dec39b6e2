#include "tessera/device/device_cuda.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "tessera/core/units.h"
#include "tessera/device/cuda_call.h"
#include "tessera/device/cuda_connections.h"
#include "tessera/device/cuda_memory.h"
#include "tessera/device/cuda_stream.h"
#include "tessera/device/cuda_times.h"

namespace tessera::device {
namespace {

const char* remedy(cudaError_t code) {
  switch (code) {
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
      return "see nvidia-smi and CUDA_VISIBLE_DEVICES, or run on the CPU";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
      return "update the NVIDIA driver, or use a build for the CUDA version it supports";
    case cudaErrorMemoryAllocation:
      return "lower the byte budget, or place more on another tier";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "the same pages were pinned twice; this is a defect of Tessera, please report it";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return "earlier work on the GPU failed; run with CUDA_LAUNCH_BLOCKING=1, or under "
             "compute-sanitizer, to find it";
    default:
      return "the GPU's log (dmesg, nvidia-smi -q) may say more";
  }
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaDeviceOptions& options)
      : options_(options),
        // Whoever waits sleeps: with offload, the cores have better things to do than to spin.
        pool_(std::make_shared<CudaEventPool>(options.index,
                                              cudaEventDisableTiming | cudaEventBlockingSync)),
        books_(std::make_shared<CudaBooks>()) {
    const int num_devices = num_cuda_devices();
    TESSERA_CHECK(options.index >= 0 && options.index < num_devices, DeviceError,
                  "cuda:", options.index, ": there are ", num_devices, " CUDA devices (",
                  cuda_description(), "); see nvidia-smi and CUDA_VISIBLE_DEVICES");
    const CudaDeviceScope scope(options.index);
    cudaDeviceProp properties{};
    TESSERA_CUDA_CALL(cudaGetDeviceProperties, &properties, options.index);
    name_ = detail::concat("cuda:", options.index, " (", properties.name, ")");
    memory_ = std::make_unique<CudaMemory>(options.index, name_, properties.totalGlobalMem,
                                           options.ledger);
    if (options.spans != nullptr && options.spans->enabled()) {
      times_ = std::make_shared<CudaTimes>(*options.spans, options.index);
    }
    make_streams();
  }

  ~CudaDevice() override {
    streams_.clear();  // waits for each
    books_->clear_dependencies();
  }

  std::string name() const override { return name_; }
  bool is_discrete() const override { return true; }
  Stream& stream(StreamKind kind) override { return *streams_.at(static_cast<std::size_t>(kind)); }

  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return memory_->allocate(tier, bytes, role, alignment);
  }

  // See [Note: pageable memory on CUDA].
  Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) override {
    TESSERA_INVARIANT(bytes == 0 || (to != nullptr && from != nullptr), "copy of ", bytes,
                      " bytes from ", from, " to ", to);
    CudaStream& mine = own(stream);
    if (bytes == 0) {
      return mine.record();
    }
    const Tier from_tier = tier_of(from);
    if (from_tier != Tier::kDevice && tier_of(to) != Tier::kDevice) {
      return mine.enqueue([=] { std::memcpy(to, from, bytes); }, "copy", span_of(bytes));
    }
    return mine.launch(
        [=](cudaStream_t handle) {
          if (from_tier == Tier::kHost) {
            TESSERA_CUDA_CALL(cudaStreamSynchronize, handle);
          }
          TESSERA_CUDA_CALL(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDefault, handle);
        },
        copy_label(from_tier, to), span_of(bytes));
  }

  Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) override {
    TESSERA_INVARIANT(bytes == 0 || to != nullptr, "fill of ", bytes, " bytes at null");
    CudaStream& mine = own(stream);
    if (bytes == 0) {
      return mine.record();
    }
    if (tier_of(to) != Tier::kDevice) {
      return mine.enqueue([=] { std::memset(to, value, bytes); }, "fill", span_of(bytes));
    }
    return mine.launch(
        [=](cudaStream_t handle) { TESSERA_CUDA_CALL(cudaMemsetAsync, to, value, bytes, handle); },
        "fill", span_of(bytes));
  }

  MemoryInfo memory_info() const override { return memory_->info(); }
  PinStats pin_stats() const override { return memory_->pin_stats(); }

  void collect_spans() override {
    for (const auto& stream : streams_) {
      stream->collect_spans();
    }
  }

 private:
  void make_streams() {
    int least = 0;
    int greatest = 0;  // the numerically lowest is the most urgent
    TESSERA_CUDA_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
    for (std::size_t i = 0; i < kNumStreams; ++i) {
      CudaStreamOptions stream;
      stream.kind = static_cast<StreamKind>(i);
      stream.device_index = options_.index;
      stream.pool = pool_;
      stream.books = books_;
      stream.spans = options_.spans;
      stream.times = times_;
      if (stream.kind == StreamKind::kCompute) {
        stream.handle = static_cast<cudaStream_t>(options_.compute_stream);
      } else {
        const bool is_urgent =
            stream.kind == StreamKind::kGather || stream.kind == StreamKind::kReduce;
        TESSERA_CUDA_CALL(cudaStreamCreateWithPriority, &stream.handle, cudaStreamNonBlocking,
                          is_urgent ? greatest : least);
        stream.is_owned = true;
      }
      streams_.push_back(std::make_unique<CudaStream>(std::move(stream)));
    }
  }

  // One of streams_, or a sibling that a backend made of one for its calls.
  CudaStream& own(Stream& given) {
    auto* const mine = dynamic_cast<CudaStream*>(&given);
    TESSERA_INVARIANT(mine != nullptr && mine->books() == books_.get(), "the ",
                      to_string(given.kind()), " stream belongs to another device");
    return *mine;
  }

  // The device if CUDA cannot say: the work itself then meets the same error, inside the stream.
  static Tier tier_of(const void* data) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
      return Tier::kDevice;
    }
    switch (attributes.type) {
      case cudaMemoryTypeUnregistered:
        return Tier::kHost;
      case cudaMemoryTypeHost:
        return Tier::kPinned;
      default:
        return Tier::kDevice;
    }
  }

  // Asking where `to` lies costs a call that only the trace needs.
  const char* copy_label(Tier from_tier, const void* to) const {
    if (from_tier != Tier::kDevice) {
      return "copy H2D";
    }
    return times_ != nullptr && tier_of(to) != Tier::kDevice ? "copy D2H" : "copy";
  }

  static SpanArgs span_of(std::size_t bytes) {
    SpanArgs args;
    args.bytes = static_cast<std::int64_t>(bytes);
    return args;
  }

  const CudaDeviceOptions options_;
  const std::shared_ptr<CudaEventPool> pool_;
  const std::shared_ptr<CudaBooks> books_;
  std::string name_;
  std::unique_ptr<CudaMemory> memory_;
  std::shared_ptr<CudaTimes> times_;  // null: nothing is timed
  std::vector<std::unique_ptr<CudaStream>> streams_;
};

std::string version_text(int version) {
  return detail::concat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

std::string cuda_error_message(const char* call, cudaError_t code) {
  return detail::concat(call, " failed with ", static_cast<int>(code), " ", cudaGetErrorName(code),
                        " (", cudaGetErrorString(code), "); ", remedy(code));
}

bool cuda_built() { return true; }

int num_cuda_devices() {
  ask_for_cuda_connections();
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string cuda_description() {
  ask_for_cuda_connections();
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::ostringstream out;
  out << "runtime " << version_text(runtime) << ", driver "
      << (driver == 0 ? "not installed" : "for " + version_text(driver));
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    out << ", no device: " << cuda_error_message("cudaGetDeviceCount", code);
    return out.str();
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
      out << ", cuda:" << index << " " << properties.name << " ("
          << approximate_bytes(properties.totalGlobalMem) << ")";
    }
  }
  return out.str();
}

std::unique_ptr<Device> make_cuda_device(CudaDeviceOptions options) {
  return std::make_unique<CudaDevice>(options);
}

}  // namespace tessera::device
