// An engine whose operations go wrong where a test says so.
//
// Ranges are counted from 0 in the order of the calls, reads and writes apart; a fault is set for
// the n-th of them, or for those that touch a byte of the file at some offset. What no fault
// concerns goes straight to the engine below.
//
//   kFail      nothing is transferred, and the Pending fails as on a broken disk
//   kShort     the first half is transferred (whole blocks), and the Pending fails as at a file's
//              end
//   kCorrupt   all is transferred with one bit flipped, and the Pending succeeds
//   kHold      nothing is transferred until release()
//   kDelay     all is transferred at once, and the Pending is done only after release()
//   kFailLater as kFail, at release()
//
// Threads: as an engine. release() and the destructor run what was held on the calling thread.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/tier/io_engine.h"

namespace tessera::testing {

enum class IoCall : std::uint8_t { kRead, kWrite };
enum class IoFault : std::uint8_t { kFail, kShort, kCorrupt, kHold, kDelay, kFailLater };

// A call as the engine has seen it, whether a fault concerned it or not.
struct SeenIo {
  IoCall call = IoCall::kRead;
  std::string path;
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
  std::string what;
};

class FaultEngine final : public tier::IoEngine {
 public:
  explicit FaultEngine(std::unique_ptr<tier::IoEngine> inner) : inner_(std::move(inner)) {}
  ~FaultEngine() override { release(); }

  // The n-th read or write counts from the engine's first.
  void set_nth(IoCall call, std::uint64_t n, IoFault fault) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({call, fault, [n](std::uint64_t number, const SeenIo&) { return number == n; },
                      /*once=*/true});
  }
  // The first range that touches the byte at `offset` of a file whose path contains `path_part`.
  void set_at(IoCall call, std::uint64_t offset, IoFault fault, std::string path_part = "") {
    add_where(
        call, fault,
        [offset, path_part = std::move(path_part)](const SeenIo& seen) {
          return seen.path.find(path_part) != std::string::npos && seen.offset <= offset &&
                 offset - seen.offset < seen.bytes;
        },
        /*once=*/true);
  }
  // Every range of which `what` contains these words.
  void set_where_named(IoCall call, std::string words, IoFault fault) {
    add_where(
        call, fault,
        [words = std::move(words)](const SeenIo& seen) {
          return seen.what.find(words) != std::string::npos;
        },
        /*once=*/false);
  }
  void clear_faults() {
    const std::lock_guard lock(mutex_);
    rules_.clear();
  }

  // Lets go of all that is held or delayed now.
  void release() {
    std::list<Held> released;
    {
      const std::lock_guard lock(mutex_);
      released.swap(held_);
    }
    for (const Held& held : released) {
      held.run();
    }
  }
  // The oldest of them. REQUIRES: there is one.
  void release_one() {
    std::list<Held> released;
    {
      const std::lock_guard lock(mutex_);
      released.splice(released.end(), held_, held_.begin());
    }
    released.front().run();
  }
  // Of the oldest of them. REQUIRES: there is one.
  std::size_t oldest_held_bytes() const {
    const std::lock_guard lock(mutex_);
    return held_.front().bytes;
  }
  // Blocks until this many are held or delayed.
  void wait_until_held(std::size_t count) {
    std::unique_lock lock(mutex_);
    held_changed_.wait(lock, [this, count] { return held_.size() >= count; });
  }
  std::size_t num_held() const {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }
  std::vector<SeenIo> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }
  std::uint64_t num_faults() const {  // that have struck
    const std::lock_guard lock(mutex_);
    return num_faults_;
  }

  std::string_view name() const override { return inner_->name(); }
  tier::IoCounts counts() const override { return inner_->counts(); }

  tier::Pending start_read(const tier::IoFile& file, std::uint64_t offset, std::byte* to,
                           std::size_t bytes, std::string what) override {
    return start({IoCall::kRead, file.path(), offset, bytes, std::move(what)}, file, to);
  }
  tier::Pending start_write(const tier::IoFile& file, std::uint64_t offset, const std::byte* from,
                            std::size_t bytes, std::string what) override {
    return start({IoCall::kWrite, file.path(), offset, bytes, std::move(what)}, file,
                 const_cast<std::byte*>(from));  // given on as what it was
  }

 private:
  using Completion = device::Completion;

  struct Rule {
    IoCall call = IoCall::kRead;
    IoFault fault = IoFault::kFail;
    std::function<bool(std::uint64_t number, const SeenIo&)> concerns;
    bool once = true;
  };

  struct Held {
    std::size_t bytes = 0;
    std::function<void()> run;
  };

  void add_where(IoCall call, IoFault fault, std::function<bool(const SeenIo&)> concerns,
                 bool once) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({call, fault,
                      [concerns = std::move(concerns)](std::uint64_t, const SeenIo& seen) {
                        return concerns(seen);
                      },
                      once});
  }

  std::optional<IoFault> note(const SeenIo& seen) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = seen.call == IoCall::kRead ? num_reads_++ : num_writes_++;
    seen_.push_back(seen);
    const auto rule = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& candidate) {
      return candidate.call == seen.call && candidate.concerns(number, seen);
    });
    if (rule == rules_.end()) {
      return std::nullopt;
    }
    ++num_faults_;
    const IoFault fault = rule->fault;
    if (rule->once) {
      rules_.erase(rule);
    }
    return fault;
  }

  tier::Pending start(const SeenIo& io, const tier::IoFile& file, std::byte* memory) {
    const std::optional<IoFault> fault = note(io);
    if (!fault) {
      return pass_on(io, file, memory);
    }
    switch (*fault) {
      case IoFault::kFail:
        return failure(io, "Input/output error (5)");
      case IoFault::kShort:
        return cut_short(io, file, memory);
      case IoFault::kCorrupt:
        return corrupt(io, file, memory);
      case IoFault::kHold:
        return hold(io, [this, io, &file, memory] { return pass_on(io, file, memory); });
      case IoFault::kDelay:
        return hold(io, [pending = pass_on(io, file, memory)] { return pending; });
      case IoFault::kFailLater:
        return hold(io, [io] {
          auto completion = std::make_shared<Completion>();
          completion->fail(error(io, "Input/output error (5)"));
          return tier::Pending(completion);
        });
    }
    TESSERA_INVARIANT(false, "no such fault");
  }

  tier::Pending pass_on(const SeenIo& io, const tier::IoFile& file, std::byte* memory) {
    return io.call == IoCall::kRead
               ? inner_->start_read(file, io.offset, memory, io.bytes, io.what)
               : inner_->start_write(file, io.offset, memory, io.bytes, io.what);
  }

  static std::exception_ptr error(const SeenIo& io, const std::string& reason) {
    return std::make_exception_ptr(IoError(detail::concat(
        io.call == IoCall::kRead ? "read" : "write", " of ", io.bytes, " bytes at offset ",
        io.offset, " of ", io.path, " failed: ", reason, "; ", io.what, "; injected by a test")));
  }
  static tier::Pending failure(const SeenIo& io, const std::string& reason) {
    return tier::Pending::failed(error(io, reason));
  }

  // Runs `then` when `pending` is done, on whichever thread that is.
  static void when_done(const tier::Pending& pending, std::function<void()> then) {
    if (pending.state() == nullptr) {
      then();
      return;
    }
    const auto completion = std::dynamic_pointer_cast<Completion>(pending.state());
    TESSERA_INVARIANT(completion != nullptr, "the engine below fulfils no Completions");
    completion->when_done(std::move(then));
  }
  static void pass_outcome(const tier::Pending& pending, Completion& completion) {
    try {
      pending.wait();
    } catch (...) {
      completion.fail(std::current_exception());
      return;
    }
    completion.succeed();
  }

  tier::Pending cut_short(const SeenIo& io, const tier::IoFile& file, std::byte* memory) {
    SeenIo half = io;
    half.bytes = io.bytes / 2 / tier::kBlockBytes * tier::kBlockBytes;
    const tier::Pending part = pass_on(half, file, memory);
    auto completion = std::make_shared<Completion>();
    when_done(part, [completion, io, half] {
      completion->fail(error(io, detail::concat("the file ends after ", half.bytes, " of them")));
    });
    return tier::Pending(completion);
  }

  tier::Pending corrupt(const SeenIo& io, const tier::IoFile& file, std::byte* memory) {
    TESSERA_INVARIANT(io.bytes > 0, "there is nothing to corrupt in ", io.what);
    auto completion = std::make_shared<Completion>();
    if (io.call == IoCall::kRead) {
      const tier::Pending pending = pass_on(io, file, memory);
      when_done(pending, [completion, pending, memory, bytes = io.bytes] {
        memory[bytes / 2] ^= std::byte{0x10};
        pass_outcome(pending, *completion);
      });
      return tier::Pending(completion);
    }
    // The caller's memory is not ours to change, so a changed copy is written.
    std::shared_ptr<std::byte> copy(static_cast<std::byte*>(std::aligned_alloc(
                                        tier::kBlockBytes, tier::whole_blocks(io.bytes))),
                                    std::free);
    std::memcpy(copy.get(), memory, io.bytes);
    copy.get()[io.bytes / 2] ^= std::byte{0x10};
    const tier::Pending pending = pass_on(io, file, copy.get());
    when_done(pending, [completion, pending, copy] { pass_outcome(pending, *completion); });
    return tier::Pending(completion);
  }

  // The Pending is done when what `begin` gives is, and `begin` runs at release().
  tier::Pending hold(const SeenIo& io, std::function<tier::Pending()> begin) {
    auto completion = std::make_shared<Completion>();
    const std::lock_guard lock(mutex_);
    held_.push_back({io.bytes, [completion, begin = std::move(begin)] {
                       const tier::Pending pending = begin();
                       when_done(pending,
                                 [completion, pending] { pass_outcome(pending, *completion); });
                     }});
    held_changed_.notify_all();
    return tier::Pending(completion);
  }

  mutable std::mutex mutex_;
  std::condition_variable held_changed_;
  // Guarded by mutex_.
  std::list<Rule> rules_;
  std::list<Held> held_;
  std::vector<SeenIo> seen_;
  std::uint64_t num_reads_ = 0;
  std::uint64_t num_writes_ = 0;
  std::uint64_t num_faults_ = 0;

  // Last: it ends first, while what its completions use is still there.
  std::unique_ptr<tier::IoEngine> inner_;
};

}  // namespace tessera::testing
