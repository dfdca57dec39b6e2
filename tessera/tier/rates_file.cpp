#include "tessera/tier/rates_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/tier/range_queue.h"

namespace tessera::tier {
namespace {

using nlohmann::json;

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

}  // namespace

std::optional<DiskRates> read_rates(const std::string& directory, const RatesKey& key) {
  for (const json& entry : read_entries(directory)) {
    if (is_of(entry, key)) {
      return parse_entry(entry, key);
    }
  }
  return std::nullopt;
}

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

}  // namespace tessera::tier
