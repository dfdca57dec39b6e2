#include "tessera/core/log.h"

#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>
#include <utility>

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>

#include "tessera/core/config.h"
#include "tessera/core/printable.h"

namespace tessera {
namespace {

constexpr const char* kPattern = "%H:%M:%S.%e %-5l %v";

// One write per line. A log that cannot be written must not end a run: errors are dropped.
void write_stderr(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return;
    }
    line.remove_prefix(static_cast<std::size_t>(written));
  }
}

class LineSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit LineSink(std::function<void(std::string_view)> write) : write_(std::move(write)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    write_(std::string_view(line.data(), line.size()));
  }
  void flush_() override {}

 private:
  const std::function<void(std::string_view)> write_;
};

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

class Logger::Output {
 public:
  explicit Output(std::function<void(std::string_view)> sink)
      : logger_("tessera", std::make_shared<LineSink>(sink ? std::move(sink) : write_stderr)) {
    logger_.set_level(spdlog::level::trace);  // Logger::enabled() has decided already
    logger_.set_formatter(std::make_unique<spdlog::pattern_formatter>(kPattern));
  }

  void write(LogLevel level, const std::string& line) { logger_.log(to_spdlog(level), line); }

  bool first_time(std::string_view key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return said_.emplace(key).second;
  }

 private:
  spdlog::logger logger_;
  std::mutex mutex_;
  std::set<std::string> said_;  // guarded by mutex_
};

std::string_view to_string(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return "trace";
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarn:
      return "warn";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

LogLevel log_level(std::string_view name) {
  for (const LogLevel level :
       {LogLevel::kTrace, LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarn, LogLevel::kError}) {
    if (to_string(level) == name) {
      return level;
    }
  }
  throw ConfigError(detail::concat("log level ", in_quotes(name),
                                   ": expected trace, debug, info, warn or error"));
}

std::string LogContext::prefix() const {
  std::string text;
  const auto add = [&text](std::string_view name, const std::string& value) {
    text.append(text.empty() ? "[" : " ").append(name).append(" ").append(value);
  };
  if (world > 1) {
    add("rank", std::to_string(rank));
  }
  if (step >= 0) {
    add("step", std::to_string(step));
  }
  if (!unit.empty()) {
    add("unit", unit);
  }
  if (!parameter.empty()) {
    add("param", parameter);
  }
  return text.empty() ? text : text + "] ";
}

LogOptions LogOptions::from(const Config& config) {
  LogOptions options;
  options.level = log_level(config.get_string("log.level"));
  options.all_ranks = config.get_bool("log.all_ranks");
  return options;
}

Logger::Logger(LogOptions options, LogContext context)
    : output_(std::make_shared<Output>(std::move(options.sink))),
      context_(std::move(context)),
      level_(options.level),
      all_ranks_(options.all_ranks),
      speaks_(options.all_ranks || context_.rank == 0) {}

Logger Logger::with(LogContext context) const {
  Logger copy = *this;
  copy.context_ = std::move(context);
  copy.speaks_ = all_ranks_ || copy.context_.rank == 0;
  return copy;
}

Logger Logger::with_step(std::int64_t step) const {
  Logger copy = *this;
  copy.context_.step = step;
  return copy;
}

Logger Logger::with_unit(std::string unit, std::string parameter) const {
  Logger copy = *this;
  copy.context_.unit = std::move(unit);
  copy.context_.parameter = std::move(parameter);
  return copy;
}

void Logger::write(LogLevel level, const std::string& message) const {
  output_->write(level, context_.prefix() + message);
}

bool Logger::first_time(std::string_view key) const { return output_->first_time(key); }

}  // namespace tessera
