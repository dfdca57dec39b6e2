#include "tessera/device/device_cpu.h"

#include <array>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_copy.h"
#include "tessera/device/host_memory.h"
#include "tessera/device/inline_stream.h"

namespace tessera::device {
namespace {

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(CpuDeviceOptions options)
      : spans_(options.spans), allocator_(std::move(options), true) {
    for (InlineStream& stream : streams_) {
      stream.set_spans(spans_);
    }
  }

  std::string name() const override { return "cpu"; }
  Stream& stream(StreamKind kind) override { return streams_.at(static_cast<std::size_t>(kind)); }

  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return allocator_.allocate(tier, bytes, role, alignment);
  }

  Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) override {
    check_copy(to, from, bytes);
    return own(stream).run([&] { copy_bytes(to, from, bytes); });
  }

  Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) override {
    check_fill(to, bytes);
    return own(stream).run([&] { fill_bytes(to, value, bytes); });
  }

  MemoryInfo memory_info() const override { return allocator_.memory_info(); }

 private:
  InlineStream& own(Stream& stream) {
    InlineStream& mine = streams_.at(static_cast<std::size_t>(stream.kind()));
    TESSERA_INVARIANT(&mine == &stream, "the ", to_string(stream.kind()),
                      " stream belongs to another device");
    return mine;
  }

  Spans* const spans_;
  HostAllocator allocator_;
  std::array<InlineStream, kNumStreams> streams_{
      InlineStream(StreamKind::kCompute), InlineStream(StreamKind::kGather),
      InlineStream(StreamKind::kRead),    InlineStream(StreamKind::kWrite),
      InlineStream(StreamKind::kReduce),  InlineStream(StreamKind::kComm)};
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(CpuDeviceOptions options) {
  return std::make_unique<CpuDevice>(std::move(options));
}

}  // namespace tessera::device
