#include "tessera/tier/io_measure.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"
#include "tessera/tier/io_load.h"
#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

// --- The small file in which measured rates are kept. Reading believes nothing: a file that is too
// large, no JSON, of another version or device, or with a value out of range is as good as none.
// Writing replaces the file in one step and keeps what it said of other engines; the last writer
// wins.

using nlohmann::json;

// What an entry is valid for.
struct RatesKey {
  std::string engine;
  bool is_direct = false;
  std::uint64_t device_id = 0;  // st_dev of the directory
};

constexpr int kVersion = 1;
constexpr std::size_t kMaxFileBytes = 64 * 1024;
constexpr double kMaxRate = 1e15;

std::string path_in(const std::string& directory) { return directory + "/" + kMeasuredFileName; }

// Nothing if there is no such file, or one that is not ours to read.
std::optional<std::string> read_small_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    return std::nullopt;
  }
  struct stat info {};
  std::string text(kMaxFileBytes + 1, '\0');
  const bool is_file = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const ssize_t bytes = is_file ? ::pread(fd, text.data(), text.size(), 0) : -1;
  ::close(fd);
  if (bytes < 0 || static_cast<std::size_t>(bytes) > kMaxFileBytes) {
    return std::nullopt;
  }
  text.resize(static_cast<std::size_t>(bytes));
  return text;
}

json read_entries(const std::string& directory) {
  const std::optional<std::string> text = read_small_file(path_in(directory));
  const json document = text ? json::parse(*text, nullptr, /*allow_exceptions=*/false) : json();
  if (!document.is_object() || document.value("version", json()) != kVersion) {
    return json::array();
  }
  json entries = document.value("entries", json());
  return entries.is_array() ? entries : json::array();
}

bool is_of(const json& entry, const RatesKey& key) {
  return entry.is_object() && entry.value("engine", json()) == key.engine &&
         entry.value("direct", json()) == key.is_direct &&
         entry.value("device", json()) == key.device_id;
}

bool take_rate(const json& entry, const char* name, double& to) {
  const json value = entry.value(name, json());
  to = value.is_number() ? value.get<double>() : 0;
  return std::isfinite(to) && to > 0 && to < kMaxRate;
}

template <typename Count>
bool take_count(const json& entry, const char* name, std::uint64_t min, std::uint64_t max,
                Count& to) {
  const json value = entry.value(name, json());
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() < min ||
      value.get<std::uint64_t>() > max) {
    return false;
  }
  to = static_cast<Count>(value.get<std::uint64_t>());
  return true;
}

std::optional<DiskRates> parse_entry(const json& entry, const RatesKey& key) {
  DiskRates rates;
  rates.engine = key.engine;
  rates.is_direct = key.is_direct;
  rates.best.kind = key.engine == "uring" ? IoKind::kUring : IoKind::kThreads;
  const bool is_whole =
      take_rate(entry, "read_bytes_per_s", rates.read_bytes_per_s) &&
      take_rate(entry, "write_bytes_per_s", rates.write_bytes_per_s) &&
      take_rate(entry, "mixed_read_bytes_per_s", rates.mixed_read_bytes_per_s) &&
      take_rate(entry, "mixed_write_bytes_per_s", rates.mixed_write_bytes_per_s) &&
      take_count(entry, "block_bytes", kBlockBytes, 64U << 20, rates.best.block_bytes) &&
      take_count(entry, "queue_depth", 1, 1024, rates.best.queue_depth) &&
      take_count(entry, "threads", 1, 256, rates.best.num_threads);
  if (!is_whole || rates.best.block_bytes % kBlockBytes != 0) {
    return std::nullopt;
  }
  return rates;
}

json make_entry(const RatesKey& key, const DiskRates& rates) {
  return {{"engine", key.engine},
          {"direct", key.is_direct},
          {"device", key.device_id},
          {"block_bytes", rates.best.block_bytes},
          {"queue_depth", rates.best.queue_depth},
          {"threads", rates.best.num_threads},
          {"read_bytes_per_s", rates.read_bytes_per_s},
          {"write_bytes_per_s", rates.write_bytes_per_s},
          {"mixed_read_bytes_per_s", rates.mixed_read_bytes_per_s},
          {"mixed_write_bytes_per_s", rates.mixed_write_bytes_per_s}};
}

// Beside its place, then renamed: a reader sees the old text or the new one.
std::string replace_file(const std::string& path, const std::string& text) {
  std::string beside = path + ".XXXXXX";
  const int fd = ::mkostemp(beside.data(), O_CLOEXEC);  // mode 0600
  if (fd < 0) {
    return system_reason(errno);
  }
  int error = 0;
  const ssize_t written = ::write(fd, text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    error = written < 0 ? errno : ENOSPC;
  }
  if (::close(fd) != 0 && error == 0) {
    error = errno;
  }
  if (error == 0 && std::rename(beside.c_str(), path.c_str()) != 0) {
    error = errno;
  }
  if (error != 0) {
    ::unlink(beside.c_str());
    return system_reason(error);
  }
  return "";
}

std::optional<DiskRates> read_rates(const std::string& directory, const RatesKey& key) {
  for (const json& entry : read_entries(directory)) {
    if (is_of(entry, key)) {
      return parse_entry(entry, key);
    }
  }
  return std::nullopt;
}

// Empty, or why it could not be written; then the old file is as it was.
std::string write_rates(const std::string& directory, const RatesKey& key, const DiskRates& rates) {
  json kept = json::array();
  kept.push_back(make_entry(key, rates));
  for (const bool is_direct : {true, false}) {
    for (const char* const engine : {"uring", "threads"}) {
      const RatesKey other{engine, is_direct, key.device_id};
      if (other.engine == key.engine && other.is_direct == key.is_direct) {
        continue;
      }
      if (const std::optional<DiskRates> old = read_rates(directory, other)) {
        kept.push_back(make_entry(other, *old));
      }
    }
  }
  return replace_file(path_in(directory),
                      json{{"version", kVersion}, {"entries", kept}}.dump(2) + "\n");
}

// --- Measuring.

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

IoOptions part_of(const IoOptions& best, int num_processes) {
  IoOptions part = best;
  part.num_threads = std::max(1, best.num_threads / num_processes);
  const int num_threads = part.num_threads * num_processes;
  const int num_requests = best.num_threads * best.queue_depth;
  part.queue_depth = std::max(1, (num_requests + num_threads - 1) / num_threads);
  return part;
}

}  // namespace tessera::tier
