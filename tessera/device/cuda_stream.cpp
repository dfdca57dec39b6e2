#include "tessera/device/cuda_stream.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/device/cuda_call.h"

namespace tessera::device {

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

std::size_t CudaBooks::add_page() {
  const std::lock_guard lock(mutex_);
  pages_.emplace_back();
  return pages_.size() - 1;
}

void CudaBooks::clear_dependencies() {
  const std::lock_guard lock(mutex_);
  for (std::size_t stream = 0; stream < pages_.size(); ++stream) {
    failure_locked(stream, std::numeric_limits<std::uint64_t>::max());
  }
}

CudaStream::CudaStream(CudaStreamOptions options) : options_(std::move(options)) {
  if (options_.times != nullptr) {
    track_.emplace(*options_.spans, detail::concat("gpu ", to_string(options_.kind)),
                   *options_.times);
  }
}

CudaStream::~CudaStream() {
  // Failures are kept in the books; here only the memory in use matters, and where there is no
  // device any more, nothing uses it.
  try {
    const CudaDeviceScope scope(options_.device_index);
    cudaStreamSynchronize(options_.handle);
    collect_spans();
    if (options_.is_owned) {
      cudaStreamDestroy(options_.handle);
    }
  } catch (const DeviceError&) {  // as said above
  }
}

Pending CudaStream::record() {
  return launch([](cudaStream_t) {}, nullptr);
}

Pending CudaStream::launch(const std::function<void(cudaStream_t)>& start, const char* label,
                           const SpanArgs& args) {
  const std::lock_guard lock(mutex_);
  return launch_locked(start, label, args);
}

Pending CudaStream::launch_locked(const std::function<void(cudaStream_t)>& start, const char* label,
                                  const SpanArgs& args) {
  ++number_;
  cudaEvent_t event = nullptr;
  bool is_marked = false;
  try {
    const CudaDeviceScope scope(options_.device_index);
    event = options_.pool->take();
    if (label != nullptr) {
      mark_begin(label, args);
      is_marked = true;
    }
    start(options_.handle);
    if (is_marked) {
      is_marked = false;
      mark_end();  // ahead of the event: the times of work that is known to be done are known, too
    }
    TESSERA_CUDA_CALL(cudaEventRecord, event, options_.handle);
    resolve_some();
  } catch (...) {
    if (is_marked) {
      mark_end();
    }
    if (event != nullptr) {
      options_.pool->give_back(event);
    }
    options_.books->fail(page(), number_, std::current_exception());
    return Pending::failed(std::current_exception());
  }
  return Pending(
      std::make_shared<CudaPending>(options_.pool, event, options_.books, page(), number_));
}

template <typename Work>
void CudaStream::timing(const Work& work) noexcept {
  if (track_) {
    try {
      work();
    } catch (...) {
      track_.reset();
    }
  }
}

void CudaStream::mark_begin(const char* label, const SpanArgs& args) noexcept {
  timing([&] {
    const cudaEvent_t event = options_.times->take();
    track_->begin(event, label, args);
    TESSERA_CUDA_CALL(cudaEventRecord, event, options_.handle);
  });
}

void CudaStream::mark_end() noexcept {
  timing([&] {
    const cudaEvent_t event = options_.times->take();
    track_->end(event);
    TESSERA_CUDA_CALL(cudaEventRecord, event, options_.handle);
  });
}

// Each operation sets two marks and looks at up to four, so that what is done does not pile up.
void CudaStream::resolve_some() noexcept {
  timing([&] { track_->resolve(4); });
}

void CudaStream::begin_span(const char* name, const SpanArgs& args) {
  const std::lock_guard lock(mutex_);
  if (track_) {
    const CudaDeviceScope scope(options_.device_index);
    mark_begin(name, args);
  }
}

void CudaStream::end_span() {
  const std::lock_guard lock(mutex_);
  if (track_) {
    TESSERA_INVARIANT(track_->num_open() > 0, "a span ends on the ", to_string(kind()),
                      " stream, where none was begun");
    const CudaDeviceScope scope(options_.device_index);
    mark_end();
    resolve_some();
  }
}

void CudaStream::collect_spans() {
  const std::lock_guard lock(mutex_);
  timing([&] {
    const CudaDeviceScope scope(options_.device_index);
    track_->resolve();
  });
}

std::unique_ptr<CudaStream> CudaStream::make_sibling(cudaStream_t handle) const {
  CudaStreamOptions options = options_;
  options.page = options_.books->add_page();
  options.handle = handle;
  options.is_owned = false;
  options.spans = nullptr;
  options.times = nullptr;
  return std::make_unique<CudaStream>(std::move(options));
}

void CudaStream::fail(const Pending& first, std::exception_ptr error) {
  const auto own = std::dynamic_pointer_cast<CudaPending>(first.state());
  if (own == nullptr) {
    return;  // it failed when it was recorded
  }
  TESSERA_INVARIANT(own->books() == books() && own->stream() == page(),
                    "what fails is no work of this stream");
  options_.books->fail(page(), own->number(), std::move(error));
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

Pending CudaStream::enqueue(std::function<void()> work, const char* label, const SpanArgs& args) {
  TESSERA_INVARIANT(work != nullptr, "enqueue of no work on the ", to_string(kind()), " stream");
  const std::lock_guard lock(mutex_);
  auto host = std::make_unique<HostWork>(
      HostWork{std::move(work), options_.books.get(), page(), number_ + 1});
  return launch_locked(
      [&host](cudaStream_t handle) {
        TESSERA_CUDA_CALL(cudaLaunchHostFunc, handle, &CudaStream::run_host_work, host.get());
        (void)host.release();  // run_host_work() owns it now
      },
      label, args);
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
