// Thousands of random operations over all streams, ordered by nothing but what they read and write,
// against the same operations done one after the other on plain vectors.
#include <algorithm>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/device/device_contract.h"

namespace tessera::device {
namespace {

constexpr std::size_t kBufferBytes = 1001;
constexpr Tier kBufferKinds[] = {Tier::kDevice, Tier::kHost,   Tier::kPinned, Tier::kDevice,
                                 Tier::kHost,   Tier::kPinned, Tier::kDevice};
constexpr std::size_t kNumBuffers = std::size(kBufferKinds);

struct Buffer {
  Memory memory;
  Bytes expected;
  Pending written;
  std::vector<Pending> read;  // since it was written
};

class RandomProgram {
 public:
  RandomProgram(Device& device, std::uint32_t seed) : device_(device), random_(seed) {
    for (std::size_t i = 0; i < kNumBuffers; ++i) {
      Buffer& buffer = buffers_[i];
      buffer.memory = device.allocate(kBufferKinds[i], kBufferBytes, Role::kOther);
      buffer.expected = pattern(kBufferBytes, seed * 100 + static_cast<std::uint32_t>(i));
      device
          .start_copy(buffer.memory.data(), buffer.expected.data(), kBufferBytes,
                      device.stream(StreamKind::kRead))
          .wait();
    }
  }

  void step() {
    Stream& stream = device_.stream(kAllStreams[random_() % 5]);
    Buffer& to = buffers_[random_() % kNumBuffers];
    const std::size_t bytes = random_() % 8 == 0 ? random_() % 2 : random_() % kBufferBytes;
    const std::size_t offset = random_() % (kBufferBytes - bytes + 1);
    switch (random_() % 4) {
      case 0:
        fill(to, offset, bytes, stream);
        break;
      case 1:
        work_on_host(offset, bytes, stream);
        break;
      default:
        copy(to, offset, bytes, stream);
    }
    if (random_() % 16 == 0) {
      buffers_[random_() % kNumBuffers].written.wait();
    }
    if (random_() % 64 == 0) {
      device_.stream(kAllStreams[random_() % 5]).synchronize();
    }
  }

  void expect_equal() {
    for (std::size_t i = 0; i < kNumBuffers; ++i) {
      Stream& stream = device_.stream(StreamKind::kWrite);
      stream.wait(buffers_[i].written);
      Bytes found(kBufferBytes);
      device_.start_copy(found.data(), buffers_[i].memory.data(), kBufferBytes, stream).wait();
      ASSERT_EQ(found, buffers_[i].expected) << "buffer " << i;
    }
  }

  // The memory must not go before its last use.
  ~RandomProgram() {
    for (const StreamKind kind : kAllStreams) {
      device_.stream(kind).synchronize();
    }
  }

 private:
  void order_behind(const Buffer& buffer, bool is_written, Stream& stream) {
    stream.wait(buffer.written);
    if (is_written) {
      stream.wait(Pending::all(buffer.read));
    }
  }
  static void note_written(Buffer& buffer, Pending pending) {
    buffer.written = std::move(pending);
    buffer.read.clear();
  }

  void fill(Buffer& to, std::size_t offset, std::size_t bytes, Stream& stream) {
    const auto value = static_cast<std::uint8_t>(random_());
    order_behind(to, true, stream);
    note_written(to, device_.start_fill(to.memory.data() + offset, value, bytes, stream));
    std::fill_n(to.expected.begin() + static_cast<std::ptrdiff_t>(offset), bytes, value);
  }

  void copy(Buffer& to, std::size_t offset, std::size_t bytes, Stream& stream) {
    Buffer& from = buffers_[random_() % kNumBuffers];
    if (&from == &to) {
      return;
    }
    const std::size_t from_offset = random_() % (kBufferBytes - bytes + 1);
    order_behind(from, false, stream);
    order_behind(to, true, stream);
    const Pending copied = device_.start_copy(to.memory.data() + offset,
                                              from.memory.data() + from_offset, bytes, stream);
    from.read.push_back(copied);
    note_written(to, copied);
    std::copy_n(from.expected.begin() + static_cast<std::ptrdiff_t>(from_offset), bytes,
                to.expected.begin() + static_cast<std::ptrdiff_t>(offset));
  }

  void work_on_host(std::size_t offset, std::size_t bytes, Stream& stream) {
    // Only memory that a host function may touch.
    Buffer& to = buffers_[random_() % 2 == 0 ? 1 : 2];
    order_behind(to, true, stream);
    std::byte* const data = to.memory.data() + offset;
    note_written(to, stream.enqueue([data, bytes] {
      for (std::size_t i = 0; i < bytes; ++i) {
        data[i] = static_cast<std::byte>(static_cast<std::uint8_t>(data[i]) * 5 + 1);
      }
    }));
    for (std::size_t i = offset; i < offset + bytes; ++i) {
      to.expected[i] = static_cast<std::uint8_t>(to.expected[i] * 5 + 1);
    }
  }

  Device& device_;
  std::mt19937 random_;
  Buffer buffers_[kNumBuffers];
};

TEST_P(DeviceContract, GivesTheBitsOfASequentialProgram) {
  for (std::uint32_t seed = 1; seed <= 3; ++seed) {
    RandomProgram program(*device_, seed);
    for (int step = 1; step <= 1000; ++step) {
      program.step();
      if (step % 500 == 0) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " step " + std::to_string(step));
        ASSERT_NO_FATAL_FAILURE(program.expect_equal());
      }
    }
  }
}

}  // namespace
}  // namespace tessera::device
