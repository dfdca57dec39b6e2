#include "testing/mock_device.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_copy.h"
#include "tessera/device/host_memory.h"
#include "tessera/device/inline_stream.h"
#include "testing/mock_stream.h"

namespace tessera::device {
namespace {

class MockDevice final : public Device {
 public:
  explicit MockDevice(MockDeviceOptions options)
      : options_(std::move(options)), allocator_(options_.host, !options_.own_memory) {}

  std::string name() const override {
    const char* const what =
        options_.own_memory ? "late double with memory of its own" : "late cpu";
    return options_.mode == LateMode::kLazy ? detail::concat(what, " (lazy)")
                                            : detail::concat(what, " (seed ", options_.seed, ")");
  }
  bool is_discrete() const override { return options_.own_memory; }

  Stream& stream(StreamKind kind) override {
    return kind == StreamKind::kCompute ? static_cast<Stream&>(compute_) : late(kind);
  }

  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    Memory memory = allocator_.allocate(tier, bytes, role, alignment);
    fill_bytes(memory.data(), kPoisonByte, bytes);
    return memory;
  }

  Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) override {
    check_copy(to, from, bytes);
    if (is_own_compute(stream)) {
      return compute_.run([&] { copy_bytes(to, from, bytes); });
    }
    // A copy of nothing is a fill of nothing: its source may be null.
    LateOp op;
    op.to = to;
    op.from = bytes == 0 ? nullptr : from;
    op.bytes = bytes;
    return late(stream.kind()).enqueue(std::move(op));
  }

  Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) override {
    check_fill(to, bytes);
    if (is_own_compute(stream)) {
      return compute_.run([&] { fill_bytes(to, value, bytes); });
    }
    LateOp op;
    op.to = to;
    op.value = value;
    op.bytes = bytes;
    return late(stream.kind()).enqueue(std::move(op));
  }

  MemoryInfo memory_info() const override {
    if (options_.own_memory_bytes == 0) {
      return allocator_.memory_info();
    }
    const Ledger* const ledger = options_.host.ledger;
    const std::size_t taken = ledger == nullptr ? 0 : ledger->current_bytes(Tier::kDevice);
    return {options_.own_memory_bytes,
            options_.own_memory_bytes - std::min(taken, options_.own_memory_bytes)};
  }

 private:
  MockStream& late(StreamKind kind) { return late_.at(static_cast<std::size_t>(kind) - 1); }

  bool is_own_compute(Stream& given) {
    TESSERA_INVARIANT(&stream(given.kind()) == &given, "the ", to_string(given.kind()),
                      " stream belongs to another device");
    return given.kind() == StreamKind::kCompute;
  }

  const MockDeviceOptions options_;
  HostAllocator allocator_;
  InlineStream compute_{StreamKind::kCompute};
  std::array<MockStream, kNumStreams - 1> late_{
      MockStream(StreamKind::kGather, options_), MockStream(StreamKind::kRead, options_),
      MockStream(StreamKind::kWrite, options_), MockStream(StreamKind::kReduce, options_),
      MockStream(StreamKind::kComm, options_)};
};

}  // namespace

std::unique_ptr<Device> make_mock_device(MockDeviceOptions options) {
  return std::make_unique<MockDevice>(std::move(options));
}

}  // namespace tessera::device
