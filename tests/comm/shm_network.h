// Ranks that share memory: threads of this process, each with its own control block, connections
// and mapping of the heap, or processes, which meet in a directory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tessera/comm/shm_backend.h"
#include "tessera/core/error.h"
#include "testing/file_store.h"
#include "testing/hash_store.h"
#include "tests/comm/contract.h"
#include "tests/support/temporary_directory.h"

namespace tessera::comm {

class ShmNetwork final : public Network {
 public:
  // `on_phase` is called with the rank that enters a phase; may be empty.
  using PhaseHook = std::function<void(int rank, ShmPhase phase)>;

  // `ranks_per_host`: of pretended hosts; 0: all ranks are on this one.
  ShmNetwork(int num_ranks, bool as_processes, PhaseHook on_phase, int ranks_per_host = 0)
      : num_ranks_(num_ranks),
        ranks_per_host_(ranks_per_host),
        directory_(as_processes ? std::make_unique<testing::TemporaryDirectory>() : nullptr),
        store_(make_store()),
        status_(std::make_shared<StatusStore>(make_store(), num_ranks)),
        on_phase_(std::move(on_phase)) {}

  // Null if the ranks do not share memory.
  std::unique_ptr<Backend> try_make_backend(int rank, const std::string& name,
                                            std::string& why_not) const {
    ShmOptions options;
    options.pretended_host = ranks_per_host_ > 0 ? rank / ranks_per_host_ : 0;
    if (on_phase_) {
      options.on_phase = [rank, hook = on_phase_](ShmPhase phase) { hook(rank, phase); };
    }
    return make_shm_backend(store_, rank, num_ranks_, name, options, why_not);
  }
  std::unique_ptr<Backend> make_backend(int rank) override {
    std::string why_not;
    auto backend = try_make_backend(rank, "world", why_not);
    TESSERA_CHECK(backend != nullptr, CommError, why_not);
    return backend;
  }
  std::shared_ptr<StatusStore> make_status() override { return status_; }

 private:
  std::unique_ptr<Store> make_store() const {
    if (directory_) {
      return std::make_unique<FileStore>(directory_->path());
    }
    return std::make_unique<HashStore>();
  }

  const int num_ranks_;
  const int ranks_per_host_;
  const std::unique_ptr<testing::TemporaryDirectory> directory_;  // null: ranks are threads
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<StatusStore> status_;
  const PhaseHook on_phase_;
};

// Gradients lie in the shared heap and are read in place; other memory passes through chunks.
// `max_delay_us`: a rank is held up for random times, as on a busy machine; 0: it is not.
inline ContractWorld shm_world(const std::string& name, Role role, std::uint32_t max_delay_us,
                               bool as_processes) {
  ShmNetwork::PhaseHook delay;
  if (max_delay_us > 0) {
    delay = [max_delay_us](int rank, ShmPhase) { delay_at_random(rank, max_delay_us); };
  }
  return {.name = name,
          .make_network =
              [=](int num_ranks) {
                return std::make_unique<ShmNetwork>(num_ranks, as_processes, delay);
              },
          .role = role,
          .as_processes = as_processes};
}

}  // namespace tessera::comm
