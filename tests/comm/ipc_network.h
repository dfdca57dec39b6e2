// GPU ranks as processes that read each other's memory. They meet in a directory.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tessera/comm/ipc_backend.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "testing/file_store.h"
#include "tests/comm/contract.h"
#include "tests/support/temporary_directory.h"

namespace tessera::comm {

// The next one in turn, where there are more ranks than GPUs.
inline int gpu_of(int rank) { return rank % std::max(1, device::num_cuda_devices()); }

class IpcNetwork final : public Network {
 public:
  // Called with the rank that enters a phase; may be empty.
  using PhaseHook = std::function<void(int rank, RoundPhase phase)>;

  IpcNetwork(int num_ranks, PhaseHook on_phase, std::size_t max_listed_regions = kMaxListedRegions)
      : num_ranks_(num_ranks),
        store_(std::make_shared<FileStore>(directory_.path())),
        status_(std::make_shared<StatusStore>(std::make_unique<FileStore>(directory_.path()),
                                              num_ranks)),
        on_phase_(std::move(on_phase)),
        max_listed_regions_(max_listed_regions) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    IpcOptions options;
    options.max_listed_regions = max_listed_regions_;
    if (on_phase_) {
      options.on_phase = [rank, hook = on_phase_](RoundPhase phase) { hook(rank, phase); };
    }
    std::string why_not;
    auto backend =
        make_ipc_backend(store_, rank, num_ranks_, gpu_of(rank), "world", options, why_not);
    TESSERA_CHECK(backend != nullptr, CommError, why_not);
    last_made = backend.get();
    return backend;
  }
  std::shared_ptr<StatusStore> make_status() override { return status_; }

  static inline Backend* last_made = nullptr;  // of each process

 private:
  const int num_ranks_;
  const testing::TemporaryDirectory directory_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<StatusStore> status_;
  const PhaseHook on_phase_;
  const std::size_t max_listed_regions_;
};

// Gradients lie in regions that are exported, and are read in place; other memory passes through
// chunks.
inline ContractWorld ipc_world(const std::string& name, Role role,
                               IpcNetwork::PhaseHook on_phase = {},
                               std::size_t max_listed_regions = kMaxListedRegions) {
  return {.name = name,
          .make_network =
              [on_phase = std::move(on_phase), max_listed_regions](int num_ranks) {
                return std::make_unique<IpcNetwork>(num_ranks, on_phase, max_listed_regions);
              },
          .make_device =
              [](int rank, Ledger& ledger) {
                device::CudaDeviceOptions options;
                options.index = gpu_of(rank);
                options.ledger = &ledger;
                return device::make_cuda_device(options);
              },
          .role = role,
          .needs_gpu = true,
          .as_processes = true};
}

}  // namespace tessera::comm
