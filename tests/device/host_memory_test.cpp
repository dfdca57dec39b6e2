#include "tessera/device/host_memory.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/host_info.h"
#include "tests/device/device_support.h"

namespace tessera::device {
namespace {

bool is_aligned(const void* data, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

HostMemoryRequest request_for(Tier tier, std::size_t bytes, Ledger* ledger) {
  HostMemoryRequest request;
  request.tier = tier;
  request.bytes = bytes;
  request.ledger = ledger;
  return request;
}

TEST(HostMemory, TakesSmallSizesExactlyAndLargeOnesInPages) {
  Ledger ledger;
  const auto charged = [&ledger](std::size_t bytes) {
    const Memory memory = allocate_host_memory(request_for(Tier::kHost, bytes, &ledger));
    std::memset(memory.data(), 1, memory.bytes());
    EXPECT_EQ(memory.bytes(), bytes);
    return ledger.current_bytes(Tier::kHost, Role::kOther);
  };
  const std::size_t page = page_bytes();
  EXPECT_EQ(charged(1), 1U);
  EXPECT_EQ(charged(kPagesFromBytes - 1), kPagesFromBytes - 1);
  EXPECT_EQ(charged(kPagesFromBytes), kPagesFromBytes);
  // One byte more than a power of two costs a page, not another power of two.
  EXPECT_EQ(charged((std::size_t{8} << 20) + 1), (std::size_t{8} << 20) + page);
  EXPECT_EQ(ledger.current_bytes(Tier::kHost), 0U);
}

TEST(HostMemory, IsAlignedAsAskedBelowAndAboveAPage) {
  for (const std::size_t alignment : {std::size_t{16}, std::size_t{4096}, std::size_t{2} << 20}) {
    for (const std::size_t bytes : {std::size_t{100}, std::size_t{300'000}}) {
      for (const Tier tier : {Tier::kHost, Tier::kPinned}) {
        HostMemoryRequest request = request_for(tier, bytes, nullptr);
        request.alignment = alignment;
        const Memory memory = allocate_host_memory(request);
        EXPECT_TRUE(is_aligned(memory.data(), alignment)) << alignment << " " << bytes;
        std::memset(memory.data(), 1, bytes);
      }
    }
  }
}

TEST(HostMemory, BeginsWhereAHugePageCanAndTakesNoMoreForIt) {
  for (const Tier tier : {Tier::kHost, Tier::kPinned}) {
    Ledger ledger;
    const std::size_t bytes = kHugePageBytes + page_bytes();
    const Memory memory = allocate_host_memory(request_for(tier, bytes, &ledger));
    EXPECT_TRUE(is_aligned(memory.data(), kHugePageBytes));
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(ledger.current_bytes(tier), bytes);
  }
}

TEST(HostMemory, RefusesAlignmentsThatAreNone) {
  for (const std::size_t alignment : {0U, 8U, 48U}) {
    HostMemoryRequest request = request_for(Tier::kHost, 64, nullptr);
    request.alignment = alignment;
    EXPECT_THROW((void)allocate_host_memory(request), InternalError) << alignment;
  }
}

TEST(HostMemory, OfZeroBytesIsNullAndCostsNothing) {
  Ledger ledger;
  const Memory memory = allocate_host_memory(request_for(Tier::kPinned, 0, &ledger));
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(memory.bytes(), 0U);
  EXPECT_EQ(ledger.peak_bytes(Tier::kPinned), 0U);
}

TEST(HostMemory, SaysHowMuchWasAskedForWhenThereIsNotEnough) {
  const std::size_t bytes = SIZE_MAX / 2;
  try {
    (void)allocate_host_memory(request_for(Tier::kHost, bytes, nullptr));
    FAIL() << "expected DeviceError";
  } catch (const DeviceError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(std::to_string(bytes)), std::string::npos) << message;
    EXPECT_NE(message.find("available"), std::string::npos) << message;
  }
  EXPECT_THROW((void)allocate_host_memory(request_for(Tier::kHost, SIZE_MAX, nullptr)),
               DeviceError);
}

TEST(HostMemory, MovesWithoutBeingGivenBackTwice) {
  Ledger ledger;
  Memory first = allocate_host_memory(request_for(Tier::kHost, 100, &ledger));
  std::byte* const data = first.data();
  Memory second = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): moved-from is empty
  EXPECT_EQ(second.data(), data);
  second = allocate_host_memory(request_for(Tier::kHost, 50, &ledger));
  EXPECT_EQ(ledger.current_bytes(Tier::kHost), 50U);
  second.reset();
  second.reset();
  EXPECT_EQ(ledger.current_bytes(Tier::kHost), 0U);
}

// Pages of a mapping that the kernel has given so far.
std::size_t num_resident(const HostPages& pages) {
  std::vector<unsigned char> resident(pages.bytes / page_bytes());
  EXPECT_EQ(mincore(pages.data, pages.bytes, resident.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(resident.begin(), resident.end(), [](unsigned char page) { return page & 1; }));
}

TEST(HostPages, AreAllThereOnceTheyAreTouched) {
  // Within one piece of the work, and over several with a rest.
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{5} << 20, (std::size_t{130} << 20) + 1}) {
    const HostPages pages = map_pages(bytes, kHugePageBytes, Tier::kPinned);
    EXPECT_EQ(num_resident(pages), 0U);
    touch_pages(pages);
    EXPECT_EQ(num_resident(pages), pages.bytes / page_bytes()) << bytes;
    const auto* const data = static_cast<const unsigned char*>(pages.data);
    EXPECT_TRUE(is_all(data, pages.bytes, 0));
    unmap_pages(pages);
  }
}

// Lowers the limit on locked memory for the time of a test.
class LockedLimit {
 public:
  explicit LockedLimit(rlim_t bytes) {
    getrlimit(RLIMIT_MEMLOCK, &former_);
    rlimit lower = former_;
    lower.rlim_cur = std::min(bytes, former_.rlim_max);
    setrlimit(RLIMIT_MEMLOCK, &lower);
  }
  ~LockedLimit() { setrlimit(RLIMIT_MEMLOCK, &former_); }
  LockedLimit(const LockedLimit&) = delete;
  LockedLimit& operator=(const LockedLimit&) = delete;

 private:
  rlimit former_{};
};

// Gives up, for this thread alone, the right to pass the limit (root has it).
void drop_right_to_lock() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  ASSERT_EQ(syscall(SYS_capget, &header, data), 0);
  data[0].effective &= ~(1U << CAP_IPC_LOCK);
  ASSERT_EQ(syscall(SYS_capset, &header, data), 0);
}

TEST(PinnedMemory, IsGoodAndSaysSoOnceWhereItCannotBeLocked) {
  const LockedLimit limit(page_bytes());
  bool is_unlimited = false;
  int num_notices = 0;
  std::string notice;
  std::thread([&] {
    ASSERT_NO_FATAL_FAILURE(drop_right_to_lock());
    const HostPages probe = map_pages(16 * page_bytes(), 16, Tier::kPinned);
    is_unlimited = lock_pages(probe);
    unmap_pages(probe);
    CpuDeviceOptions options;
    options.notice = [&](const std::string& text) {
      ++num_notices;
      notice = text;
    };
    const auto device = make_cpu_device(options);
    for (int i = 0; i < 3; ++i) {
      const Memory memory = device->allocate(Tier::kPinned, 1 << 20, Role::kStaging);
      std::memset(memory.data(), 7, memory.bytes());
    }
  }).join();
  if (is_unlimited) {
    GTEST_SKIP() << "mlock knows no limit here; sanitizers replace it by nothing";
  }
  EXPECT_EQ(num_notices, 1);
  EXPECT_NE(notice.find("1048576"), std::string::npos) << notice;
  EXPECT_NE(notice.find("ulimit -l"), std::string::npos) << notice;
}

TEST(PinnedMemory, IsChargedInWholePagesSinceLocksAre) {
  Ledger ledger;
  const Memory memory = allocate_host_memory(request_for(Tier::kPinned, 1, &ledger));
  EXPECT_EQ(ledger.current_bytes(Tier::kPinned), page_bytes());
}

}  // namespace
}  // namespace tessera::device
