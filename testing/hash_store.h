// The key-value store of ranks that are threads of one process.
//
// Threads: every method may be called from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "tessera/comm/store.h"
#include "tessera/core/error.h"

namespace tessera::comm {

class HashStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    TESSERA_CHECK(changed_.wait_for(lock, timeout, [&] { return values_.contains(key); }),
                  CommError, "key '", key, "' was not set within ", timeout.count(), " ms");
    return values_[key];
  }
  std::optional<std::string> try_get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    const std::lock_guard lock(mutex_);
    std::string& value = values_[key];
    const std::int64_t sum = (value.empty() ? 0 : std::stoll(value)) + delta;
    value = std::to_string(sum);
    changed_.notify_all();
    return sum;
  }
  std::string address() const override { return "this process"; }
  std::uint16_t port() const override { return 0; }

 private:
  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace tessera::comm
