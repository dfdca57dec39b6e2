#include "tessera/tier/range_queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <limits>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::tier {

struct IoRange {
  const IoFile* file = nullptr;
  IoDirection direction = IoDirection::kRead;
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  std::string what;
  device::Completion completion;

  // Guarded by the queue's mutex.
  std::size_t begun_bytes = 0;  // handed out as requests; `bytes` once no more will be
  std::size_t num_in_flight = 0;
  bool failed = false;
  std::uint64_t failure_offset = 0;  // of several failures the first in the file is told
  std::string failure;
  std::int64_t begun_ns = 0;
  std::size_t lane = 0;

  bool is_over() const { return num_in_flight == 0 && begun_bytes == bytes; }
};

namespace {

// A file that answers EAGAIN for ever must not keep a thread busy for ever.
constexpr int kMaxRetries = 1000;

std::string_view remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "make room on that disk, or name a directory on another";
    case EFBIG:
      return "raise the limit of a file's size: ulimit -f";
    case EIO:
      return "the disk itself has failed: see the kernel's log, and name a directory on another";
    case EBADF:
      return "the file is not open for that";
    case EACCES:
    case EPERM:
    case EROFS:
      return "check the permissions of the file and its directory";
    case EINVAL:
      return "if the file system refuses O_DIRECT, use buffered I/O";
    case ENOMEM:
      return "leave more memory to the kernel, or raise the limit of locked memory: ulimit -l";
    default:
      return "see the kernel's log";
  }
}

std::string describe(const IoRequest& request, const IoRange& range, const std::string& reason,
                     std::string_view remedy) {
  return detail::concat(request.direction == IoDirection::kRead ? "read" : "write", " of ",
                        request.bytes, " bytes at offset ", request.offset, " of ",
                        printable(range.file->path(), 400), " failed: ", reason, "; ", range.what,
                        "; ", remedy);
}

std::string describe_error(const IoRequest& request, const IoRange& range, int error) {
  return describe(request, range, system_reason(error), remedy(error));
}

std::string describe_no_progress(const IoRequest& request, const IoRange& range,
                                 std::size_t transferred) {
  return request.direction == IoDirection::kRead
             ? describe(request, range,
                        detail::concat("the file ends after ", transferred, " of them"),
                        "it was cut off, or it belongs to another run")
             : describe(request, range,
                        detail::concat("no more than ", transferred, " of them were taken"),
                        "make room on that disk, or name a directory on another");
}

}  // namespace

std::string system_reason(int error) {
  return detail::concat(std::generic_category().message(error), " (", error, ")");
}

RangeQueue::RangeQueue(std::size_t block_bytes, std::function<void()> wake, Spans* spans)
    : block_bytes_(block_bytes),
      wake_(std::move(wake)),
      spans_(spans != nullptr && spans->enabled() ? spans : nullptr) {
  TESSERA_INVARIANT(block_bytes % kBlockBytes == 0 && block_bytes > 0, "requests of ", block_bytes,
                    " bytes");
}

Pending RangeQueue::push_read(const IoFile& file, std::uint64_t offset, std::byte* to,
                              std::size_t bytes, std::string what) {
  auto range = std::make_shared<IoRange>();
  range->file = &file;
  range->direction = IoDirection::kRead;
  range->offset = offset;
  range->memory = to;
  range->bytes = bytes;
  range->what = std::move(what);
  return push(std::move(range));
}

Pending RangeQueue::push_write(const IoFile& file, std::uint64_t offset, const std::byte* from,
                               std::size_t bytes, std::string what) {
  auto range = std::make_shared<IoRange>();
  range->file = &file;
  range->direction = IoDirection::kWrite;
  range->offset = offset;
  range->memory = const_cast<std::byte*>(from);  // one type for both; see IoRequest::memory
  range->bytes = bytes;
  range->what = std::move(what);
  return push(std::move(range));
}

Pending RangeQueue::push(std::shared_ptr<IoRange> range) {
  constexpr auto kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  TESSERA_INVARIANT(range->bytes <= kMaxOffset && range->offset <= kMaxOffset - range->bytes,
                    range->bytes, " bytes at offset ", range->offset, " of ", range->what,
                    " are behind the end of any file");
  TESSERA_INVARIANT(!range->file->is_direct() ||
                        (range->offset % kBlockBytes == 0 && range->bytes % kBlockBytes == 0 &&
                         reinterpret_cast<std::uintptr_t>(range->memory) % kBlockBytes == 0),
                    range->bytes, " bytes at offset ", range->offset, " of ", range->what,
                    " are not whole blocks, and its file is open for direct I/O");
  Pending pending(std::shared_ptr<device::PendingState>(range, &range->completion));
  const bool is_one_request = range->bytes <= block_bytes_;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    TESSERA_INVARIANT(!closed_, range->what, " was given to an engine that is being destroyed");
    if (range->bytes == 0) {
      ++(range->direction == IoDirection::kRead ? counts_.num_reads : counts_.num_writes);
      return Pending();
    }
    ranges_[static_cast<std::size_t>(range->direction)].push_back(std::move(range));
    wake = std::exchange(sleeps_, false);
  }
  if (is_one_request) {
    changed_.notify_one();
  } else {
    changed_.notify_all();
  }
  if (wake && wake_) {
    wake_();
  }
  return pending;
}

// Empty if nothing waits.
std::deque<std::shared_ptr<IoRange>>& RangeQueue::next_ranges() {
  for (std::deque<std::shared_ptr<IoRange>>& ranges : ranges_) {
    while (!ranges.empty() && ranges.front()->begun_bytes == ranges.front()->bytes) {
      ranges.pop_front();  // a failure has ended it early
    }
  }
  turn_ = ranges_[turn_].empty() ? 1 - turn_ : turn_;
  return ranges_[turn_];
}

std::optional<IoRequest> RangeQueue::cut() {
  std::deque<std::shared_ptr<IoRange>>& ranges = next_ranges();
  if (ranges.empty()) {
    return std::nullopt;
  }
  const std::shared_ptr<IoRange>& range = ranges.front();
  IoRequest request;
  request.range = range;
  request.direction = range->direction;
  request.fd = range->file->fd();
  request.offset = range->offset + range->begun_bytes;
  request.memory = range->memory + range->begun_bytes;
  request.bytes = std::min(block_bytes_, range->bytes - range->begun_bytes);
  if (range->begun_bytes == 0) {
    begin_span(*range);
  }
  range->begun_bytes += request.bytes;
  ++range->num_in_flight;
  if (range->begun_bytes == range->bytes) {
    ranges.pop_front();
  }
  turn_ = 1 - turn_;
  return request;
}

void RangeQueue::begin_span(IoRange& range) {
  if (spans_ == nullptr) {
    return;
  }
  std::vector<bool>& lanes = lanes_[static_cast<std::size_t>(range.direction)];
  range.lane =
      static_cast<std::size_t>(std::find(lanes.begin(), lanes.end(), false) - lanes.begin());
  lanes.resize(std::max(lanes.size(), range.lane + 1));
  lanes[range.lane] = true;
  range.begun_ns = spans_->now_ns();
}

void RangeQueue::end_span(const IoRange& range) {
  if (spans_ == nullptr) {
    return;
  }
  const bool is_read = range.direction == IoDirection::kRead;
  lanes_[static_cast<std::size_t>(range.direction)][range.lane] = false;
  SpanArgs args;
  args.bytes = static_cast<std::int64_t>(range.bytes);
  args.parameter = spans_->intern(range.what);
  const TrackId track =
      spans_->add_track(detail::concat(is_read ? "disk reads " : "disk writes ", range.lane + 1));
  spans_->record_on(track, is_read ? "read" : "write", range.begun_ns, spans_->now_ns(), args);
}

std::optional<IoRequest> RangeQueue::take() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (std::optional<IoRequest> request = cut()) {
      return request;
    }
    if (closed_) {
      return std::nullopt;
    }
    changed_.wait(lock);
  }
}

std::optional<IoRequest> RangeQueue::try_take() {
  const std::lock_guard lock(mutex_);
  sleeps_ = false;
  return cut();
}

bool RangeQueue::sleep_if_empty() {
  const std::lock_guard lock(mutex_);
  sleeps_ = ranges_[0].empty() && ranges_[1].empty();
  return sleeps_;
}

void RangeQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    sleeps_ = false;
  }
  changed_.notify_all();
  if (wake_) {
    wake_();
  }
}

bool RangeQueue::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

bool RangeQueue::advance(IoRequest& request, ssize_t result) {
  const IoRange& range = *request.range;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    const bool again = error == EINTR || error == EAGAIN;
    if (again && ++request.num_retries <= kMaxRetries) {
      return false;
    }
    finish(request, describe_error(request, range, error));
    return true;
  }
  auto progress = static_cast<std::size_t>(result);
  TESSERA_INVARIANT(progress <= request.rest_bytes(), progress, " bytes were transferred where ",
                    request.rest_bytes(), " were asked for");
  const std::size_t transferred = request.done + progress;
  if (range.file->is_direct() && transferred < request.bytes) {
    progress -= progress % kBlockBytes;  // only whole blocks can be continued behind
  }
  if (progress == 0) {
    finish(request, describe_no_progress(request, range, transferred));
    return true;
  }
  request.done += progress;
  request.num_retries = 0;
  if (request.done < request.bytes) {
    return false;
  }
  finish(request, "");
  return true;
}

void RangeQueue::finish(const IoRequest& request, const std::string& failure) {
  IoRange& range = *request.range;
  std::string first_failure;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    --range.num_in_flight;
    if (!failure.empty()) {
      if (!range.failed || request.offset < range.failure_offset) {
        range.failure_offset = request.offset;
        range.failure = failure;
      }
      range.failed = true;
      range.begun_bytes = range.bytes;
    }
    if (!range.is_over()) {
      return;
    }
    end_span(range);
    failed = range.failed;
    if (failed) {
      first_failure = range.failure;
    } else if (range.direction == IoDirection::kRead) {
      ++counts_.num_reads;
      counts_.read_bytes += range.bytes;
    } else {
      ++counts_.num_writes;
      counts_.written_bytes += range.bytes;
    }
  }
  if (failed) {
    range.completion.fail(std::make_exception_ptr(IoError(first_failure)));
  } else {
    range.completion.succeed();
  }
}

IoCounts RangeQueue::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::thread start_io_thread(std::function<void()> body) {
  // Threads inherit the mask, so that there is no moment in which the new one could get a signal.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), "tessera-io");
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace tessera::tier
