#include "tessera/tier/io_measure.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <utility>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"
#include "tessera/tier/io_load.h"
#include "tessera/tier/range_queue.h"
#include "tessera/tier/rates_file.h"

namespace tessera::tier {
namespace {

// Ranges as the stores have them: several requests each, and twice as much of them given to the
// engine as any candidate has in flight.
constexpr std::size_t kRangeBytes = std::size_t{4} << 20;
constexpr std::size_t kMemoryBytes = 8 * kRangeBytes;
constexpr std::uint64_t kShareOfFreeSpace = 20;  // one in so many

// Shares of the budget; what is left goes to setting up.
constexpr double kFillShare = 0.2;
constexpr double kCandidatesShare = 0.4;
constexpr double kResultShare = 0.12;  // read, write and mixed, each

// Less in flight is less memory in use and less waiting, so more must be worth it.
constexpr double kWorthwhile = 1.05;

struct Candidate {
  std::size_t block_bytes;
  int num_in_flight;
};

// By bytes in flight, the fewest first.
constexpr std::array<Candidate, 6> kCandidates = {{{std::size_t{256} << 10, 8},
                                                   {std::size_t{1} << 20, 4},
                                                   {std::size_t{256} << 10, 32},
                                                   {std::size_t{1} << 20, 8},
                                                   {std::size_t{1} << 20, 16},
                                                   {std::size_t{4} << 20, 4}}};

IoOptions engine_options(IoKind kind, const Candidate& candidate) {
  IoOptions options;
  options.kind = kind;
  options.block_bytes = candidate.block_bytes;
  // One thread serves a ring; a pool of threads has one request in flight for each.
  const bool is_ring = kind == IoKind::kUring;
  options.queue_depth = is_ring ? candidate.num_in_flight : 1;
  options.num_threads = is_ring ? 1 : candidate.num_in_flight;
  return options;
}

// The engine that kAuto means here, with the notice or the error that belongs to it.
IoKind resolve(const MeasureOptions& options) {
  const std::unique_ptr<IoEngine> engine =
      make_io_engine(IoOptions{options.kind, kBlockBytes, 1, 1}, options.notice);
  return engine->name() == "uring" ? IoKind::kUring : IoKind::kThreads;
}

std::uint64_t device_id(const std::string& directory) {
  struct stat info {};
  TESSERA_CHECK(::stat(directory.c_str(), &info) == 0, IoError, "the directory ",
                printable(directory, 400), " cannot be used: ", system_reason(errno),
                "; create it, or name another");
  TESSERA_CHECK(S_ISDIR(info.st_mode), IoError, printable(directory, 400),
                " is no directory; name one on the disk to use");
  return info.st_dev;
}

struct AllowedBytes {
  std::uint64_t bytes = 0;  // of the file that is measured with
  std::string too_few;      // why that does not do; empty: it does
};

AllowedBytes allowed_file_bytes(const std::string& directory, std::size_t max_file_bytes) {
  struct statvfs info {};
  TESSERA_CHECK(::statvfs(directory.c_str(), &info) == 0, IoError, "the free space of ",
                printable(directory, 400), " is not known: ", system_reason(errno),
                "; name a directory on another disk");
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
  AllowedBytes allowed;
  allowed.bytes = std::min<std::uint64_t>(max_file_bytes, free_bytes / kShareOfFreeSpace);
  if (allowed.bytes < 2 * kRangeBytes) {
    allowed.too_few =
        detail::concat("the disk of ", printable(directory, 400), " has ",
                       approximate_bytes(free_bytes), " free, and measuring it takes ",
                       approximate_bytes(2 * kRangeBytes), " in at most 5 % of that");
  }
  return allowed;
}

IoOptions find_best(IoKind kind, const IoLoad& load, double seconds) {
  IoOptions best;
  double best_rate = 0;
  const SteadyClock clock;
  const std::int64_t end_ns = clock.now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  for (const Candidate& candidate : kCandidates) {
    if (best_rate > 0 && clock.now_ns() >= end_ns) {
      break;  // a slow disk: what is in flight takes longer than its share of the time
    }
    const IoOptions options = engine_options(kind, candidate);
    const std::unique_ptr<IoEngine> engine = make_io_engine(options, nullptr);
    const IoRates rates = run_load(*engine, load, IoMix::kMixed, seconds / kCandidates.size());
    const double rate = rates.read_bytes_per_s + rates.write_bytes_per_s;
    if (rate > kWorthwhile * best_rate) {
      best = options;
      best_rate = rate;
    }
  }
  return best;
}

DiskRates measure(IoKind kind, const IoFile& file, std::uint64_t max_bytes, double budget_s) {
  const IoMemory memory(kMemoryBytes);
  IoLoad load;
  load.file = &file;
  load.range_bytes = kRangeBytes;
  load.memory = memory.bytes();
  {
    const std::unique_ptr<IoEngine> engine =
        make_io_engine(engine_options(kind, {std::size_t{1} << 20, 8}), nullptr);
    load.file_bytes = fill_file(*engine, load, max_bytes, kFillShare * budget_s);
  }
  DiskRates result;
  result.best = find_best(kind, load, kCandidatesShare * budget_s);
  result.is_direct = file.is_direct();
  const std::unique_ptr<IoEngine> engine = make_io_engine(result.best, nullptr);
  result.engine = engine->name();
  const double seconds = kResultShare * budget_s;
  result.read_bytes_per_s = run_load(*engine, load, IoMix::kRead, seconds).read_bytes_per_s;
  result.write_bytes_per_s = run_load(*engine, load, IoMix::kWrite, seconds).write_bytes_per_s;
  const IoRates mixed = run_load(*engine, load, IoMix::kMixed, seconds);
  result.mixed_read_bytes_per_s = mixed.read_bytes_per_s;
  result.mixed_write_bytes_per_s = mixed.write_bytes_per_s;
  return result;
}

// Those of a plain SATA SSD.
DiskRates assumed_rates(IoKind kind, bool is_direct, const std::string& why) {
  constexpr double kBytesPerS = 500e6;
  DiskRates rates;
  rates.assumed = why + "; 500 MB/s are assumed";
  rates.best = engine_options(kind, {std::size_t{1} << 20, 8});
  rates.engine = kind == IoKind::kUring ? "uring" : "threads";
  rates.is_direct = is_direct;
  rates.read_bytes_per_s = kBytesPerS;
  rates.write_bytes_per_s = kBytesPerS;
  rates.mixed_read_bytes_per_s = kBytesPerS / 2;
  rates.mixed_write_bytes_per_s = kBytesPerS / 2;
  return rates;
}

RatesKey make_key(IoKind kind, bool is_direct, std::uint64_t device) {
  return {kind == IoKind::kUring ? "uring" : "threads", is_direct, device};
}

}  // namespace

std::optional<DiskRates> read_measured(const std::string& directory,
                                       const MeasureOptions& options) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    return std::nullopt;
  }
  const IoKind kind = resolve(options);
  for (const bool is_direct : {true, false}) {
    const bool is_asked_for =
        options.direct == DirectIo::kAuto || (options.direct == DirectIo::kOn) == is_direct;
    if (!is_asked_for) {
      continue;
    }
    if (std::optional<DiskRates> kept =
            read_rates(directory, make_key(kind, is_direct, info.st_dev))) {
      return kept;
    }
  }
  return std::nullopt;
}

DiskRates measure_directory(const std::string& directory, const MeasureOptions& options) {
  const std::uint64_t device = device_id(directory);
  const IoKind kind = resolve(options);
  MeasureOptions resolved = options;
  resolved.kind = kind;
  if (!options.force) {
    if (std::optional<DiskRates> kept = read_measured(directory, resolved)) {
      return *kept;
    }
  }
  const std::unique_ptr<IoFile> file = open_nameless(directory, options.direct);
  const AllowedBytes allowed = allowed_file_bytes(directory, options.max_file_bytes);
  if (!allowed.too_few.empty()) {
    TESSERA_CHECK(!options.needs_rates, IoError, allowed.too_few,
                  "; make room, or name a directory on another disk");
    return assumed_rates(kind, file->is_direct(), allowed.too_few);
  }
  const DiskRates rates = measure(kind, *file, allowed.bytes, options.budget_s);
  const std::string failure =
      write_rates(directory, make_key(kind, rates.is_direct, device), rates);
  if (!failure.empty() && options.notice) {
    options.notice("the measurement of " + printable(directory, 400) +
                   " could not be kept and is made again next time: " + failure);
  }
  return rates;
}

}  // namespace tessera::tier
