// The stores that share one contract, with all they need.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"
#include "tessera/tier/file_store.h"
#include "tessera/tier/io_engine.h"
#include "tessera/tier/store.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {

enum class StoreKind { kDeviceMemory, kHostMemory, kLateMemory, kFiles };

struct StoreCase {
  std::string name;
  StoreKind kind = StoreKind::kFiles;
  int num_directories = 0;
  tier::DirectIo direct_io = tier::DirectIo::kOff;
  bool verify = false;
};
inline void PrintTo(const StoreCase& store, std::ostream* out) { *out << store.name; }
std::vector<StoreCase> all_store_cases();

inline constexpr Role kStoreRole = Role::kOptimizer;

// Makes stores of one case; outlives them.
class StoreMaker {
 public:
  explicit StoreMaker(StoreCase store_case);
  ~StoreMaker();
  // ConfigError where the file system does not do direct I/O and the case asks for it.
  std::unique_ptr<tier::Store> make(std::size_t reserved_bytes = 0);
  Ledger& ledger() { return ledger_; }

 private:
  const StoreCase case_;
  Ledger ledger_;
  std::unique_ptr<device::Device> device_;
  std::vector<std::unique_ptr<TemporaryDirectory>> directories_;
  std::unique_ptr<tier::IoEngine> engine_;
};

}  // namespace tessera::testing
