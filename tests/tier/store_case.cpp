#include "tests/tier/store_case.h"

#include <utility>

#include "tessera/device/device_cpu.h"
#include "testing/memory_store.h"
#include "testing/mock_device.h"

namespace tessera::testing {

using tier::DirectIo;

std::vector<StoreCase> all_store_cases() {
  std::vector<StoreCase> cases = {{"DeviceMemory", StoreKind::kDeviceMemory},
                                  {"HostMemory", StoreKind::kHostMemory},
                                  {"LateMemory", StoreKind::kLateMemory}};
  for (const int directories : {1, 3}) {
    for (const bool direct : {false, true}) {
      for (const bool verify : {false, true}) {
        cases.push_back({std::string(directories == 1 ? "OneFile" : "ThreeFiles") +
                             (direct ? "Direct" : "Buffered") + (verify ? "Verified" : ""),
                         StoreKind::kFiles, directories, direct ? DirectIo::kOn : DirectIo::kOff,
                         verify});
      }
    }
  }
  return cases;
}

StoreMaker::StoreMaker(StoreCase store_case) : case_(std::move(store_case)) {
  if (case_.kind == StoreKind::kLateMemory) {
    device::MockDeviceOptions options;
    options.host.ledger = &ledger_;
    device_ = device::make_mock_device(options);
  } else {
    device_ = device::make_cpu_device({.ledger = &ledger_, .notice = {}});
  }
  for (int i = 0; i < case_.num_directories; ++i) {
    directories_.push_back(std::make_unique<TemporaryDirectory>());
  }
  if (case_.kind == StoreKind::kFiles) {
    tier::IoOptions options;
    options.kind = tier::IoKind::kThreads;
    options.num_threads = 2;
    options.block_bytes = 2 * tier::kBlockBytes;
    engine_ = tier::make_io_engine(options, [](const std::string&) {});
  }
}

StoreMaker::~StoreMaker() = default;

std::unique_ptr<tier::Store> StoreMaker::make(std::size_t reserved_bytes) {
  if (case_.kind != StoreKind::kFiles) {
    const auto kind = case_.kind == StoreKind::kHostMemory ? Tier::kHost : Tier::kDevice;
    return std::make_unique<tier::MemoryStore>(*device_, kind, kStoreRole, reserved_bytes);
  }
  tier::FileStoreOptions options;
  for (const auto& directory : directories_) {
    options.directories.push_back(directory->path().string());
  }
  options.name = {"contract", 0, "states"};
  options.role = kStoreRole;
  options.verify = case_.verify;
  options.direct_io = case_.direct_io;
  options.reserved_bytes = reserved_bytes;
  options.stripe_bytes = 2 * tier::kBlockBytes;  // so that small ranges have many
  options.engine = engine_.get();
  options.ledger = &ledger_;
  return std::make_unique<tier::FileStore>(std::move(options));
}

}  // namespace tessera::testing
