#include "testing/cuda_emulation/cuda_emulation.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda.h>

// What streams have to do with an event outlives it.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::uint64_t num_recorded = 0;
  std::uint64_t num_reached = 0;
  std::chrono::steady_clock::time_point at;

  std::uint64_t record() {
    const std::lock_guard lock(mutex);
    return ++num_recorded;
  }
  void reach(std::uint64_t number) {
    const std::lock_guard lock(mutex);
    num_reached = std::max(num_reached, number);  // it may have been recorded anew, elsewhere
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  std::uint64_t last() {
    const std::lock_guard lock(mutex);
    return num_recorded;
  }
  bool is_reached() {
    const std::lock_guard lock(mutex);
    return num_reached >= num_recorded;
  }
  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_reached >= number; });
  }
};
struct CUevent_st {
  const std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct CUstream_st {
  CUstream_st() {
    std::thread([this] { run(); }).detach();
  }

  void give(std::function<void()> piece) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return work.size() < tessera::testing::kMaxQueued; });
    work.push_back(std::move(piece));
    ++num_given;
    changed.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this, last = num_given] { return num_done >= last; });
  }
  void end() {
    const std::lock_guard lock(mutex);
    is_ended = true;
    changed.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return is_ended || !work.empty(); });
      if (work.empty()) {
        break;
      }
      const std::function<void()> piece = std::move(work.front());
      work.pop_front();
      lock.unlock();
      piece();
      lock.lock();
      ++num_done;
      changed.notify_all();
    }
    lock.unlock();
    delete this;
  }

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::deque<std::function<void()>> work;
  std::uint64_t num_given = 0;
  std::uint64_t num_done = 0;
  bool is_ended = false;
};

namespace {

struct Mapping {
  std::size_t bytes = 0;
  int fd = -1;  // of an own allocation
  cudaMemoryType type = cudaMemoryTypeDevice;
};

struct Handle {
  pid_t process;
  int fd;
  std::size_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

// Of a process; never destroyed, since threads of streams outlive main().
struct Driver {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<std::byte*, Mapping> mappings;
  std::set<CUstream_st*> streams;
  CUstream_st* const null_stream = new CUstream_st();
  std::size_t taken_bytes = 0;

  Driver() { streams.insert(null_stream); }

  CUstream_st& at(cudaStream_t stream) { return stream == nullptr ? *null_stream : *stream; }
  void drain_all() {
    for (CUstream_st* const stream : streams) {
      stream->drain();
    }
  }
  std::map<std::byte*, Mapping>::iterator around(const void* data) {
    auto* const at = static_cast<std::byte*>(const_cast<void*>(data));
    const auto above = mappings.upper_bound(at);
    if (above == mappings.begin()) {
      return mappings.end();
    }
    const auto found = std::prev(above);
    return at < found->first + found->second.bytes ? found : mappings.end();
  }
};

Driver& driver() {
  static auto* const one = new Driver();
  return *one;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

cudaError_t result(cudaError_t code) {
  if (code != cudaSuccess) {
    last_error = code;
  }
  return code;
}

cudaError_t give(cudaStream_t stream, std::function<void()> work) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  one.at(stream).give(std::move(work));
  return cudaSuccess;
}

cudaError_t unmap(void* data, cudaMemoryType type) {
  if (data == nullptr) {
    return cudaSuccess;
  }
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  const auto found = one.mappings.find(static_cast<std::byte*>(data));
  if (found == one.mappings.end() || found->second.type != type) {
    return result(cudaErrorInvalidValue);
  }
  one.drain_all();
  if (type == cudaMemoryTypeDevice) {
    ::munmap(data, found->second.bytes);
  }
  if (found->second.fd >= 0) {
    ::close(found->second.fd);
    one.taken_bytes -= found->second.bytes;
  }
  one.mappings.erase(found);
  return cudaSuccess;
}

std::atomic_ref<std::uint32_t> word_at(CUdeviceptr address) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address));
}

CUresult batch_mem_op(CUstream stream, unsigned count, CUstreamBatchMemOpParams* params, unsigned) {
  give(stream, [ops = std::vector(params, params + count)] {
    for (const CUstreamBatchMemOpParams& op : ops) {
      if (op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        word_at(op.writeValue.address).store(op.writeValue.value);
        continue;
      }
      while (static_cast<std::int32_t>(word_at(op.waitValue.address).load() - op.waitValue.value) <
             0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  });
  return CUDA_SUCCESS;
}

CUresult no_context(CUdevice, unsigned*, int*) { return cudaErrorInvalidDevice; }

}  // namespace

void tessera::testing::enqueue_emulated(cudaStream_t stream, std::function<void()> work) {
  give(stream, std::move(work));
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated GPU"; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "emulated");
  properties->totalGlobalMem = tessera::testing::kEmulatedBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::snprintf(id, static_cast<std::size_t>(length), "ffff:ff:1f.7");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = std::string(symbol) == "cuStreamBatchMemOp" ? reinterpret_cast<void*>(&batch_mem_op)
                                                          : reinterpret_cast<void*>(&no_context);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  if (bytes > tessera::testing::kEmulatedBytes - one.taken_bytes) {
    return result(cudaErrorMemoryAllocation);
  }
  Mapping mapping;
  mapping.bytes = (bytes + 4095) / 4096 * 4096;
  mapping.fd = ::memfd_create("emulated gpu", MFD_CLOEXEC);
  if (mapping.fd < 0 || ::ftruncate(mapping.fd, static_cast<off_t>(mapping.bytes)) != 0) {
    return result(cudaErrorMemoryAllocation);
  }
  *data =
      ::mmap(nullptr, mapping.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, mapping.fd, /*offset=*/0);
  if (*data == MAP_FAILED) {
    ::close(mapping.fd);
    return result(cudaErrorMemoryAllocation);
  }
  one.taken_bytes += mapping.bytes;
  one.mappings.emplace(static_cast<std::byte*>(*data), mapping);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) { return unmap(data, cudaMemoryTypeDevice); }
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  *total_bytes = tessera::testing::kEmulatedBytes;
  *free_bytes = *total_bytes - one.taken_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  const bool is_new =
      one.mappings.emplace(static_cast<std::byte*>(data), Mapping{bytes, -1, cudaMemoryTypeHost})
          .second;
  return is_new ? cudaSuccess : result(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* data) { return unmap(data, cudaMemoryTypeHost); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  const auto found = one.around(data);
  attributes->type = found == one.mappings.end() ? cudaMemoryTypeUnregistered : found->second.type;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  const auto found = one.mappings.find(static_cast<std::byte*>(data));
  if (found == one.mappings.end() || found->second.fd < 0) {
    return result(cudaErrorInvalidValue);
  }
  const Handle exported{::getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle, &exported, sizeof(exported));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  Handle given{};
  std::memcpy(&given, &handle, sizeof(given));
  if (given.process == ::getpid()) {
    return result(cudaErrorInvalidValue);  // as CUDA does
  }
  const std::string path =
      "/proc/" + std::to_string(given.process) + "/fd/" + std::to_string(given.fd);
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return result(cudaErrorInvalidValue);
  }
  *data = ::mmap(nullptr, given.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, /*offset=*/0);
  ::close(fd);
  if (*data == MAP_FAILED) {
    return result(cudaErrorMemoryAllocation);
  }
  one.mappings.emplace(static_cast<std::byte*>(*data),
                       Mapping{given.bytes, -1, cudaMemoryTypeDevice});
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* data) { return unmap(data, cudaMemoryTypeDevice); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  *stream = new CUstream_st();
  one.streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Driver& one = driver();
  const std::lock_guard lock(one.mutex);
  one.streams.erase(stream);
  stream->end();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Driver& one = driver();
  CUstream_st* known = nullptr;
  {
    const std::lock_guard lock(one.mutex);
    known = &one.at(stream);
  }
  known->drain();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return give(stream,
              [state = event->state, number = event->state->last()] { state->wait(number); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* given) {
  return give(stream, [=] { function(given); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return give(stream, [=] { std::memmove(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return give(stream, [=] { std::memset(to, value, bytes); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(driver().mutex);
  *event = new CUevent_st();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return give(stream,
              [state = event->state, number = event->state->record()] { state->reach(number); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(driver().mutex);
  return event->state->is_reached() ? cudaSuccess : result(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->state->wait(event->state->last());
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->state->at - begin->state->at).count();
  return cudaSuccess;
}
