// Lines for people, with the rank and the step that they are about.
//
// A Logger is a handle on one output plus the context that stands before its lines; copies share
// the output. There is no global logger: whoever speaks was given one. Rank 0 speaks for all ranks
// unless `all_ranks` is set; warnings and errors of every rank always get through.
//
// Each call is one write() to the output, so lines of several ranks never mix inside a line.
// Message parts are turned into text only when the line is shown.
//
// Threads: every method may be called from any thread; each thread changes only its own copy's
// context.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/core/error.h"

namespace tessera {

class Config;

enum class LogLevel : std::uint8_t { kTrace, kDebug, kInfo, kWarn, kError };

std::string_view to_string(LogLevel level);
// One of the names of to_string(), else ConfigError.
LogLevel log_level(std::string_view name);

struct LogContext {
  int rank = 0;
  int world = 1;
  std::int64_t step = -1;  // below zero: not shown

  // "[rank 2 step 17] "; empty where there is nothing to say. The rank is shown only where there
  // are several.
  std::string prefix() const;
};

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  bool all_ranks = false;
  // Receives each line whole, with its newline; called by one thread at a time. Empty: stderr.
  std::function<void(std::string_view line)> sink;

  static LogOptions from(const Config& config);
};

class Logger {
 public:
  explicit Logger(LogOptions options, LogContext context = {});

  // The same output under another context.
  Logger with_step(std::int64_t step) const;

  bool enabled(LogLevel level) const {
    return level >= level_ && (speaks_ || level >= LogLevel::kWarn);
  }

  template <typename... Parts>
  void log(LogLevel level, const Parts&... parts) const {
    if (enabled(level)) {
      write(level, detail::concat(parts...));
    }
  }
  template <typename... Parts>
  void trace(const Parts&... parts) const {
    log(LogLevel::kTrace, parts...);
  }
  template <typename... Parts>
  void debug(const Parts&... parts) const {
    log(LogLevel::kDebug, parts...);
  }
  template <typename... Parts>
  void info(const Parts&... parts) const {
    log(LogLevel::kInfo, parts...);
  }
  template <typename... Parts>
  void warn(const Parts&... parts) const {
    log(LogLevel::kWarn, parts...);
  }
  template <typename... Parts>
  void error(const Parts&... parts) const {
    log(LogLevel::kError, parts...);
  }

  // Says it the first time that any copy of this logger gets this key, and never again.
  template <typename... Parts>
  void once(std::string_view key, LogLevel level, const Parts&... parts) const {
    if (enabled(level) && first_time(key)) {
      write(level, detail::concat(parts...));
    }
  }

 private:
  class Output;

  void write(LogLevel level, const std::string& message) const;
  bool first_time(std::string_view key) const;

  std::shared_ptr<Output> output_;
  LogContext context_;
  LogLevel level_;
  bool speaks_;  // rank 0, or all ranks speak
};

}  // namespace tessera
