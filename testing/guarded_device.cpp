#include "testing/guarded_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::device {
namespace {

// The same pages twice: without rights, and for the device.
struct Pages {
  std::byte* seen = nullptr;
  std::byte* real = nullptr;
  std::size_t bytes = 0;
};

std::byte* map_pages(int file, std::size_t bytes, int rights) {
  void* const data = mmap(nullptr, bytes, rights, MAP_SHARED, file, 0);
  TESSERA_CHECK(data != MAP_FAILED, DeviceError, "guarded memory: cannot map ", bytes, " bytes");
  return static_cast<std::byte*>(data);
}

Pages make_pages(std::size_t bytes) {
  const int file = memfd_create("guarded", MFD_CLOEXEC);
  TESSERA_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, DeviceError,
                "guarded memory: no room for ", bytes, " bytes");
  const Pages pages{map_pages(file, bytes, PROT_NONE),
                    map_pages(file, bytes, PROT_READ | PROT_WRITE), bytes};
  close(file);
  return pages;
}

// By the address that is given out.
class Table {
 public:
  void add(const Pages& pages) {
    const std::lock_guard lock(mutex_);
    pages_.emplace(pages.seen, pages);
  }
  void remove(const Pages& pages) {
    {
      const std::lock_guard lock(mutex_);
      pages_.erase(pages.seen);
    }
    munmap(pages.seen, pages.bytes);
    munmap(pages.real, pages.bytes);
  }
  // Memory of others is where it seems to be.
  std::byte* real(const void* address) const {
    auto* const seen = static_cast<std::byte*>(const_cast<void*>(address));
    const std::lock_guard lock(mutex_);
    const auto above = pages_.upper_bound(seen);
    if (above == pages_.begin()) {
      return seen;
    }
    const Pages& pages = std::prev(above)->second;
    const auto offset = static_cast<std::size_t>(seen - pages.seen);
    return offset < pages.bytes ? pages.real + offset : seen;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::byte*, Pages> pages_;  // guarded by mutex_
};

class GuardedDevice final : public Device {
 public:
  explicit GuardedDevice(MockDeviceOptions options) : mock_(make_mock_device(std::move(options))) {}

  std::string name() const override { return mock_->name() + ", guarded"; }
  Stream& stream(StreamKind kind) override { return mock_->stream(kind); }
  bool is_discrete() const override { return true; }

  Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    if (tier != Tier::kDevice || bytes == 0) {
      return mock_->allocate(tier, bytes, role, alignment);
    }
    const Pages pages = make_pages(bytes);
    std::fill_n(pages.real, bytes, std::byte{kPoisonByte});
    table_->add(pages);
    return {pages.seen, bytes, [pages, table = table_] { table->remove(pages); }};
  }

  Pending start_copy(void* to, const void* from, std::size_t bytes, Stream& stream) override {
    return mock_->start_copy(table_->real(to), table_->real(from), bytes, stream);
  }
  Pending start_fill(void* to, std::uint8_t value, std::size_t bytes, Stream& stream) override {
    return mock_->start_fill(table_->real(to), value, bytes, stream);
  }
  MemoryInfo memory_info() const override { return mock_->memory_info(); }

 private:
  const std::shared_ptr<Table> table_ = std::make_shared<Table>();
  const std::unique_ptr<Device> mock_;
};

}  // namespace

std::unique_ptr<Device> make_guarded_device(LateMode mode, int rank, Ledger& ledger) {
  MockDeviceOptions options;
  options.mode = mode;
  options.seed = static_cast<std::uint64_t>(rank) + 1;
  options.own_memory = true;
  options.host.ledger = &ledger;
  return std::make_unique<GuardedDevice>(std::move(options));
}

}  // namespace tessera::device
