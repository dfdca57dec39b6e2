#include "tessera/device/cuda_stream.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/device/cuda_call.h"

namespace tessera::device {

CudaEventPool::~CudaEventPool() {
  for (cudaEvent_t event : free_) {
    cudaEventDestroy(event);  // fails only when the driver has shut down, with all its events
  }
}

cudaEvent_t CudaEventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  const CudaDeviceScope scope(device_index_);
  cudaEvent_t event = nullptr;
  // Whoever waits sleeps: with offload, the cores have better things to do than to spin.
  TESSERA_CUDA_CALL(cudaEventCreateWithFlags, &event,
                    cudaEventDisableTiming | cudaEventBlockingSync);
  return event;
}

void CudaEventPool::give_back(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

CudaPending::CudaPending(std::shared_ptr<CudaEventPool> pool, cudaEvent_t event,
                         std::shared_ptr<CudaBooks> books, std::size_t stream, std::uint64_t number)
    : pool_(std::move(pool)),
      event_(event),
      books_(std::move(books)),
      stream_(stream),
      number_(number) {}

CudaPending::~CudaPending() { pool_->give_back(event_); }

bool CudaPending::done() {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) {
    cudaGetLastError();  // not an error, but kept as one
    return false;
  }
  if (code != cudaSuccess) {
    cudaGetLastError();
    books_->fail(stream_, number_,
                 std::make_exception_ptr(DeviceError(cuda_error_message("cudaEventQuery", code))));
  }
  return true;
}

void CudaPending::wait() {
  TESSERA_CUDA_CALL(cudaEventSynchronize, event_);
  throw_if_failed();
}

bool CudaPending::wait_for(std::chrono::nanoseconds limit) {
  // CUDA has no wait with a limit. The pause grows with the time waited, up to 1 ms.
  const SteadyClock clock;
  const std::int64_t start_ns = clock.now_ns();
  while (!done()) {
    const std::int64_t waited_ns = clock.now_ns() - start_ns;
    if (waited_ns >= limit.count()) {
      return false;
    }
    const std::int64_t pause_ns = std::min<std::int64_t>(
        {waited_ns / 16, limit.count() - waited_ns, std::int64_t{1'000'000}});
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
  }
  throw_if_failed();
  return true;
}

void CudaPending::throw_if_failed() {
  if (const std::exception_ptr error = books_->failure(stream_, number_)) {
    std::rethrow_exception(error);
  }
}

void CudaBooks::fail(std::size_t stream, std::uint64_t number, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  Page& page = pages_[stream];
  if (number < page.failed_at) {
    page.failed_at = number;
    page.error = std::move(error);
  }
}

void CudaBooks::depend(std::size_t stream, std::uint64_t number, std::shared_ptr<CudaPending> on) {
  const std::lock_guard lock(mutex_);
  pages_[stream].dependencies.push_back({number, std::move(on)});
}

std::exception_ptr CudaBooks::failure(std::size_t stream, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return failure_locked(stream, number);
}

// An operation depends only on operations enqueued before it, so the recursion ends; taking the
// oldest first keeps it shallow.
std::exception_ptr CudaBooks::failure_locked(std::size_t stream, std::uint64_t number) {
  Page& page = pages_[stream];
  while (!page.dependencies.empty() && page.dependencies.front().number <= number) {
    const Dependency oldest = std::move(page.dependencies.front());
    page.dependencies.pop_front();
    std::exception_ptr error = failure_locked(oldest.on->stream(), oldest.on->number());
    if (error && oldest.number < page.failed_at) {
      page.failed_at = oldest.number;
      page.error = std::move(error);
    }
  }
  return page.failed_at <= number ? page.error : nullptr;
}

std::shared_ptr<CudaPending> CudaBooks::oldest_dependency(std::size_t stream,
                                                          std::uint64_t* number) {
  const std::lock_guard lock(mutex_);
  const auto& dependencies = pages_[stream].dependencies;
  if (dependencies.empty()) {
    return nullptr;
  }
  *number = dependencies.front().number;
  return dependencies.front().on;
}

void CudaBooks::clear_dependencies() {
  const std::lock_guard lock(mutex_);
  for (std::size_t stream = 0; stream < kNumStreams; ++stream) {
    failure_locked(stream, std::numeric_limits<std::uint64_t>::max());
  }
}

CudaStream::~CudaStream() {
  // Failures are kept in the books; here only the memory in use matters, and where there is no
  // device any more, nothing uses it.
  try {
    const CudaDeviceScope scope(options_.device_index);
    cudaStreamSynchronize(options_.handle);
    if (options_.is_owned) {
      cudaStreamDestroy(options_.handle);
    }
  } catch (const DeviceError&) {
  }
}

Pending CudaStream::record() {
  const std::lock_guard lock(mutex_);
  return record_locked();
}

Pending CudaStream::record_locked() {
  return launch_locked([](cudaStream_t) {});
}

Pending CudaStream::launch(const std::function<void(cudaStream_t)>& start) {
  const std::lock_guard lock(mutex_);
  return launch_locked(start);
}

Pending CudaStream::launch_locked(const std::function<void(cudaStream_t)>& start) {
  ++number_;
  cudaEvent_t event = nullptr;
  try {
    const CudaDeviceScope scope(options_.device_index);
    event = options_.pool->take();
    start(options_.handle);
    TESSERA_CUDA_CALL(cudaEventRecord, event, options_.handle);
  } catch (...) {
    if (event != nullptr) {
      options_.pool->give_back(event);
    }
    options_.books->fail(page(), number_, std::current_exception());
    return Pending::failed(std::current_exception());
  }
  return Pending(
      std::make_shared<CudaPending>(options_.pool, event, options_.books, page(), number_));
}

bool CudaStream::can_order_behind(const Pending& pending) const {
  const std::shared_ptr<PendingState>& state = pending.state();
  if (state == nullptr) {
    return true;
  }
  const std::span<const Pending> parts = state->parts();
  if (!parts.empty()) {
    return std::all_of(parts.begin(), parts.end(),
                       [this](const Pending& part) { return can_order_behind(part); });
  }
  const auto* own = dynamic_cast<const CudaPending*>(state.get());
  return (own != nullptr && own->books() == options_.books.get()) || state->done();
}

void CudaStream::wait(const Pending& pending) {
  if (pending.state() == nullptr) {
    return;
  }
  if (!pending.state()->parts().empty()) {
    for (const Pending& part : pending.state()->parts()) {
      wait(part);
    }
    return;
  }
  auto own = std::dynamic_pointer_cast<CudaPending>(pending.state());
  if (own == nullptr || own->books() != options_.books.get()) {
    // See [Note: what a CUDA stream can wait for]. Not under the mutex: what is waited for may
    // need this stream.
    std::exception_ptr error;
    try {
      if (const std::optional<Pending> handed_over = pending.state()->wait_handed_over()) {
        return wait(*handed_over);
      }
      pending.wait();
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      const std::lock_guard lock(mutex_);
      options_.books->fail(page(), ++number_, std::move(error));
    }
    return;
  }
  strike_off_done();
  const std::lock_guard lock(mutex_);
  ++number_;
  try {
    const CudaDeviceScope scope(options_.device_index);
    TESSERA_CUDA_CALL(cudaStreamWaitEvent, options_.handle, own->event(), 0);
    options_.books->depend(page(), number_, std::move(own));
  } catch (...) {
    options_.books->fail(page(), number_, std::current_exception());
  }
}

// Keeps the books short on streams that nobody ever waits for on the host.
void CudaStream::strike_off_done() {
  std::uint64_t number = 0;
  while (const auto oldest = options_.books->oldest_dependency(page(), &number)) {
    if (!oldest->done()) {
      return;
    }
    options_.books->failure(page(), number);
  }
}

struct CudaStream::HostWork {
  std::function<void()> work;
  CudaBooks* books;  // the stream's destructor waits for us
  std::size_t page;
  std::uint64_t number;
};

void CUDART_CB CudaStream::run_host_work(void* given) {
  const std::unique_ptr<HostWork> host(static_cast<HostWork*>(given));
  // By the order of the stream, everything before this number is done.
  if (host->books->failure(host->page, host->number) != nullptr) {
    return;
  }
  try {
    host->work();
  } catch (...) {
    host->books->fail(host->page, host->number, std::current_exception());
  }
}

Pending CudaStream::enqueue(std::function<void()> work) {
  TESSERA_INVARIANT(work != nullptr, "enqueue of no work on the ", to_string(kind()), " stream");
  const std::lock_guard lock(mutex_);
  auto host = std::make_unique<HostWork>(
      HostWork{std::move(work), options_.books.get(), page(), number_ + 1});
  return launch_locked([&host](cudaStream_t handle) {
    TESSERA_CUDA_CALL(cudaLaunchHostFunc, handle, &CudaStream::run_host_work, host.get());
    host.release();
  });
}

void CudaStream::synchronize() {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = number_;
  }
  const CudaDeviceScope scope(options_.device_index);
  TESSERA_CUDA_CALL(cudaStreamSynchronize, options_.handle);
  if (const std::exception_ptr error = options_.books->failure(page(), number)) {
    std::rethrow_exception(error);
  }
}

}  // namespace tessera::device
