// Watches what tensors take from an allocator of torch while it lives, on the thread that made it
// and on autograd's threads that work for it.
//
// Memory that was there before is not counted, nor is what is given back of it.
//
// Threads: one allocates at a time, as in a backward that the caller waits for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace tessera::testing {

class MemoryWatch {
 public:
  // Allocations of exactly one of the sizes in `ignored` are not counted.
  explicit MemoryWatch(c10::DeviceType device, std::set<std::int64_t> ignored = {})
      : book_(std::make_shared<Book>(device, std::move(ignored))),
        guard_(c10::DebugInfoKind::PROFILER_STATE, book_) {}

  std::int64_t live() const { return book_->live; }
  std::int64_t peak() const { return book_->peak; }
  std::int64_t largest() const { return book_->largest; }  // single allocation

 private:
  struct Book : c10::MemoryReportingInfoBase {
    Book(c10::DeviceType type, std::set<std::int64_t> sizes)
        : device(type), ignored(std::move(sizes)) {}
    void reportMemoryUsage(void* ptr, std::int64_t bytes, std::size_t /*total_allocated*/,
                           std::size_t /*total_reserved*/, c10::Device where) override {
      if (where.type() != device) {
        return;
      }
      if (bytes <= 0) {
        const auto known = sizes_of.find(ptr);
        if (known != sizes_of.end()) {
          live -= known->second;
          sizes_of.erase(known);
        }
      } else if (ignored.count(bytes) == 0) {
        sizes_of[ptr] = bytes;
        live += bytes;
        peak = std::max(peak, live);
        largest = std::max(largest, bytes);
      }
    }
    bool memoryProfilingEnabled() const override { return true; }

    const c10::DeviceType device;
    const std::set<std::int64_t> ignored;
    std::unordered_map<void*, std::int64_t> sizes_of;
    std::int64_t live = 0;
    std::int64_t peak = 0;
    std::int64_t largest = 0;
  };

  std::shared_ptr<Book> book_;
  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::testing
