// The half that all engines share: ranges waiting in their order, cut into requests of block_bytes,
// and the check of every result. Internal to tier.
//
// Reads and writes wait apart, each in their order, and take turns as long as there are both: so
// what a disk reads does not wait for all that it has been given to write.
//
// An engine takes requests, transfers them in its own way and hands each result to advance(), which
// says whether the request is over or must be continued. A range is done when its last request is
// over. After a failure nothing more of its range is begun, and its Pending fails once no request
// of it is in flight, since only then nobody uses its memory any more.
//
// Threads: every method may be called from any thread. Completions are fulfilled on the thread that
// calls advance(), without a lock held.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/core/spans.h"
#include "tessera/tier/io_engine.h"

namespace tessera::tier {

enum class IoDirection : std::uint8_t { kRead, kWrite };

struct IoRange;

// A piece of a range. `done` bytes of it have been transferred.
struct IoRequest {
  std::shared_ptr<IoRange> range;
  IoDirection direction = IoDirection::kRead;
  int fd = -1;
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;  // only read from where it is a write
  std::size_t bytes = 0;
  std::size_t done = 0;
  int num_retries = 0;  // since the last progress

  // What is left to transfer.
  std::uint64_t rest_offset() const { return offset + done; }
  std::byte* rest_memory() const { return memory + done; }
  std::size_t rest_bytes() const { return bytes - done; }
};

class RangeQueue {
 public:
  // `wake` is called after a push if sleep_if_empty() has been true since the last try_take();
  // empty where nobody sleeps that way.
  RangeQueue(std::size_t block_bytes, std::function<void()> wake, Spans* spans = nullptr);

  Pending push_read(const IoFile& file, std::uint64_t offset, std::byte* to, std::size_t bytes,
                    std::string what);
  Pending push_write(const IoFile& file, std::uint64_t offset, const std::byte* from,
                     std::size_t bytes, std::string what);

  // Blocks; nothing once the queue is closed and empty.
  std::optional<IoRequest> take();
  std::optional<IoRequest> try_take();
  // Announces that the caller will sleep until it is woken. False: it must not, there is work.
  bool sleep_if_empty();
  // Nothing is pushed any more; what has been is still handed out.
  void close();
  bool is_closed() const;

  // `result` as of pread(2), errors as -errno. False: transfer the rest of the request.
  bool advance(IoRequest& request, ssize_t result);

  IoCounts counts() const;

 private:
  Pending push(std::shared_ptr<IoRange> range);
  // The rest REQUIRE: mutex_ is held.
  std::deque<std::shared_ptr<IoRange>>& next_ranges();
  std::optional<IoRequest> cut();
  void finish(const IoRequest& request, const std::string& failure);
  void begin_span(IoRange& range);
  void end_span(const IoRange& range);

  const std::size_t block_bytes_;
  const std::function<void()> wake_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_, and with them the states of the ranges.
  std::array<std::deque<std::shared_ptr<IoRange>>, 2> ranges_;  // by direction; fronts are cut
  std::size_t turn_ = 0;                                        // of that direction, if it waits
  bool sleeps_ = false;
  bool closed_ = false;
  IoCounts counts_;
  // What is in flight at the same time lies on tracks of its own; by direction, false: free.
  Spans* const spans_;  // null: no trace
  std::array<std::vector<bool>, 2> lanes_;
};

// Starts `body` on a thread that gets no signals: handlers stay on the program's own threads, and a
// write above the limit of a file's size is an error instead of the end of the process (SIGXFSZ).
std::thread start_io_thread(std::function<void()> body);

// For errors: "No space left on device (28)".
std::string system_reason(int error);

}  // namespace tessera::tier
