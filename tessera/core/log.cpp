#include "tessera/core/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <set>
#include <utility>

#include "tessera/core/config.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"trace", "debug", "info", "warn", "error"};

// One write per line. A log that cannot be written must not end a run: errors are dropped.
void write_stderr(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written =
        retried([&] { return ::write(STDERR_FILENO, line.data(), line.size()); });
    if (written <= 0) {
      return;
    }
    line.remove_prefix(static_cast<std::size_t>(written));
  }
}

// "12:34:56.789 info  "
std::string line_start(LogLevel level) {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto since = std::chrono::floor<std::chrono::milliseconds>(now.time_since_epoch());
  std::tm local{};
  ::localtime_r(&seconds, &local);
  // A warning is spelt out: it is what people search a log for.
  const std::string name(level == LogLevel::kWarn ? "warning" : to_string(level));
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%02d:%02d:%02d.%03d %-5s ", local.tm_hour, local.tm_min,
                local.tm_sec, static_cast<int>(since.count() % 1000), name.c_str());
  return text.data();
}

}  // namespace

class Logger::Output {
 public:
  explicit Output(std::function<void(std::string_view)> sink)
      : sink_(sink ? std::move(sink) : write_stderr) {}

  void write(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sink_(line);
  }

  bool first_time(std::string_view key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return said_.emplace(key).second;
  }

 private:
  const std::function<void(std::string_view)> sink_;
  std::mutex mutex_;            // one line at a time
  std::set<std::string> said_;  // guarded by mutex_
};

std::string_view to_string(LogLevel level) { return kNames[static_cast<std::size_t>(level)]; }

LogLevel log_level(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found != kNames.end()) {
    return static_cast<LogLevel>(found - kNames.begin());
  }
  throw ConfigError(detail::concat("log level ", in_quotes(name),
                                   ": expected trace, debug, info, warn or error"));
}

std::string LogContext::prefix() const {
  std::string text = world > 1 ? detail::concat("rank ", rank) : "";
  if (step >= 0) {
    text += detail::concat(text.empty() ? "" : " ", "step ", step);
  }
  return text.empty() ? text : "[" + text + "] ";
}

LogOptions LogOptions::from(const Config& config) {
  LogOptions options;
  options.level = log_level(config.get_string("log.level"));
  options.all_ranks = config.get_bool("log.all_ranks");
  return options;
}

Logger::Logger(LogOptions options, LogContext context)
    : output_(std::make_shared<Output>(std::move(options.sink))),
      context_(context),
      level_(options.level),
      speaks_(options.all_ranks || context_.rank == 0) {}

Logger Logger::with_step(std::int64_t step) const {
  Logger copy = *this;
  copy.context_.step = step;
  return copy;
}

void Logger::write(LogLevel level, const std::string& message) const {
  output_->write(line_start(level) + context_.prefix() + message + "\n");
}

bool Logger::first_time(std::string_view key) const { return output_->first_time(key); }

}  // namespace tessera
