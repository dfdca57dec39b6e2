#include "tessera/tier/io_load.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

constexpr double kNsPerS = 1e9;

// As many ranges in flight as memory holds. Whatever happens, all are done when it goes: the memory
// is the caller's.
class Window {
 public:
  explicit Window(const IoLoad& load)
      : load_(load), slots_(load.range_bytes > 0 ? load.memory.size() / load.range_bytes : 0) {
    TESSERA_INVARIANT(slots_ >= 2, "a load with memory for ", slots_, " ranges");
  }
  ~Window() {
    for (const Pending& pending : pending_) {
      device::wait_ignoring_failure(pending);  // the first failure is on its way already
    }
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Waits for a slot, and starts `start(memory)` in it.
  template <typename Start>
  void add(const Start& start) {
    if (pending_.size() == slots_) {
      wait_for_oldest();
    }
    pending_.push_back(start(load_.memory.data() + number_++ % slots_ * load_.range_bytes));
  }
  void drain() {
    while (!pending_.empty()) {
      wait_for_oldest();
    }
  }

 private:
  void wait_for_oldest() {
    const Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    oldest.wait();
  }

  const IoLoad& load_;
  const std::size_t slots_;
  std::size_t number_ = 0;
  std::deque<Pending> pending_;
};

bool is_write(IoMix mix, std::size_t number) {
  return mix == IoMix::kWrite || (mix == IoMix::kMixed && number % 2 == 1);
}

std::int64_t now_plus(const Clock& clock, double seconds) {
  return clock.now_ns() + static_cast<std::int64_t>(seconds * kNsPerS);
}

}  // namespace

std::unique_ptr<IoFile> open_nameless(const std::string& directory, DirectIo mode) {
  std::string path = directory + "/.tessera-io-XXXXXX";
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);
  TESSERA_CHECK(fd >= 0, IoError, "the directory ", printable(directory, 400),
                " cannot be written to: ", system_reason(errno),
                "; check its permissions, or name another");
  ::close(fd);
  struct Unlink {
    const std::string& path;
    ~Unlink() { ::unlink(path.c_str()); }
  };
  const Unlink unlink{path};
  return open_io_file(path, O_RDWR, mode);
}

IoMemory::IoMemory(std::size_t bytes) : memory_(transfer_memory(bytes)), bytes_(bytes) {
  std::uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (std::size_t i = 0; i + sizeof state <= bytes; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory_.data() + i, &state, sizeof state);
  }
}

IoRates run_load(IoEngine& engine, const IoLoad& load, IoMix mix, double seconds) {
  const std::size_t num_ranges = load.file_bytes / load.range_bytes;
  TESSERA_INVARIANT(num_ranges >= 2, "a load on a file of ", num_ranges, " ranges");
  const SteadyClock clock;
  const std::int64_t begin_ns = clock.now_ns();
  const std::int64_t end_ns = now_plus(clock, seconds);
  IoRates bytes;  // per second at the end
  Window window(load);
  for (std::size_t number = 0; number < 2 || clock.now_ns() < end_ns; ++number) {
    const std::uint64_t offset = number % num_ranges * load.range_bytes;
    const bool writes = is_write(mix, number);
    window.add([&](std::byte* memory) {
      return writes ? engine.start_write(*load.file, offset, memory, load.range_bytes,
                                         "a load of writes")
                    : engine.start_read(*load.file, offset, memory, load.range_bytes,
                                        "a load of reads");
    });
    (writes ? bytes.write_bytes_per_s : bytes.read_bytes_per_s) +=
        static_cast<double>(load.range_bytes);
  }
  window.drain();
  const double elapsed_s =
      static_cast<double>(std::max<std::int64_t>(1, clock.now_ns() - begin_ns)) / kNsPerS;
  return {bytes.read_bytes_per_s / elapsed_s, bytes.write_bytes_per_s / elapsed_s};
}

std::uint64_t fill_file(IoEngine& engine, const IoLoad& load, std::uint64_t bytes, double seconds) {
  const SteadyClock clock;
  const std::int64_t end_ns = now_plus(clock, seconds);
  const std::uint64_t num_ranges = std::max<std::uint64_t>(2, bytes / load.range_bytes);
  Window window(load);
  std::uint64_t number = 0;
  for (; number < num_ranges && (number < 2 || clock.now_ns() < end_ns); ++number) {
    window.add([&](std::byte* memory) {
      return engine.start_write(*load.file, number * load.range_bytes, memory, load.range_bytes,
                                "a file to measure with");
    });
  }
  window.drain();
  return number * load.range_bytes;
}

}  // namespace tessera::tier
