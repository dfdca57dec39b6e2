#include "tessera/tier/io_load.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

constexpr double kNsPerS = 1e9;

// Waits for everything that was started, also on the way out of a failure: the memory is the
// caller's, and it may be gone right after.
class InFlight {
 public:
  ~InFlight() {
    for (const Pending& pending : pending_) {
      try {
        pending.wait();
      } catch (...) {  // the first failure is on its way already
      }
    }
  }

  std::size_t size() const { return pending_.size(); }
  void add(Pending pending) { pending_.push_back(std::move(pending)); }
  void wait_for_oldest() {
    const Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    oldest.wait();
  }

 private:
  std::deque<Pending> pending_;
};

std::size_t num_slots(const IoLoad& load) {
  const std::size_t slots = load.range_bytes > 0 ? load.memory.size() / load.range_bytes : 0;
  TESSERA_INVARIANT(slots >= 2, "a load with memory for ", slots, " ranges");
  return slots;
}

std::size_t num_places(const IoLoad& load) {
  const std::size_t places = load.file_bytes / load.range_bytes;
  TESSERA_INVARIANT(places >= 2, "a load on a file of ", places, " ranges");
  return places;
}

std::byte* slot_memory(const IoLoad& load, std::size_t number, std::size_t slots) {
  return load.memory.data() + number % slots * load.range_bytes;
}

bool is_write(IoMix mix, std::size_t number) {
  return mix == IoMix::kWrite || (mix == IoMix::kMixed && number % 2 == 1);
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

IoRates run_load(IoEngine& engine, const IoLoad& load, IoMix mix, double seconds) {
  const std::size_t slots = num_slots(load);
  const std::size_t places = num_places(load);
  const SteadyClock clock;
  const std::int64_t begin_ns = clock.now_ns();
  const std::int64_t end_ns = begin_ns + static_cast<std::int64_t>(seconds * kNsPerS);
  IoRates bytes;  // per second at the end
  InFlight in_flight;
  for (std::size_t number = 0; number < 2 || clock.now_ns() < end_ns; ++number) {
    if (in_flight.size() == slots) {
      in_flight.wait_for_oldest();
    }
    std::byte* const memory = slot_memory(load, number, slots);
    const std::uint64_t offset = number % places * load.range_bytes;
    if (is_write(mix, number)) {
      in_flight.add(
          engine.start_write(*load.file, offset, memory, load.range_bytes, "a load of writes"));
      bytes.write_bytes_per_s += static_cast<double>(load.range_bytes);
    } else {
      in_flight.add(
          engine.start_read(*load.file, offset, memory, load.range_bytes, "a load of reads"));
      bytes.read_bytes_per_s += static_cast<double>(load.range_bytes);
    }
  }
  while (in_flight.size() > 0) {
    in_flight.wait_for_oldest();
  }
  const double elapsed_s =
      static_cast<double>(std::max<std::int64_t>(1, clock.now_ns() - begin_ns)) / kNsPerS;
  return {bytes.read_bytes_per_s / elapsed_s, bytes.write_bytes_per_s / elapsed_s};
}

std::uint64_t fill_file(IoEngine& engine, const IoLoad& load, std::uint64_t bytes, double seconds) {
  const std::size_t slots = num_slots(load);
  const SteadyClock clock;
  const std::int64_t end_ns = clock.now_ns() + static_cast<std::int64_t>(seconds * kNsPerS);
  const std::uint64_t places = std::max<std::uint64_t>(2, bytes / load.range_bytes);
  InFlight in_flight;
  std::uint64_t number = 0;
  for (; number < places && (number < 2 || clock.now_ns() < end_ns); ++number) {
    if (in_flight.size() == slots) {
      in_flight.wait_for_oldest();
    }
    in_flight.add(engine.start_write(*load.file, number * load.range_bytes,
                                     slot_memory(load, number, slots), load.range_bytes,
                                     "a file to measure with"));
  }
  while (in_flight.size() > 0) {
    in_flight.wait_for_oldest();
  }
  return number * load.range_bytes;
}

}  // namespace tessera::tier
