// Internal to engine: what an engine keeps on NVMe. One store per role (parameters, gradients,
// optimizer states), each with scratch files of its own; the I/O engine below them; the buffers
// that gradients and states are read into and written from.
//
// Order of collectives: construction broadcasts the name of the run, and is a barrier.
//
// Threads: as Engine. It outlives whoever uses a store or a pool.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/engine/runtime.h"
#include "tessera/tier/buffer_pool.h"
#include "tessera/tier/file_store.h"

namespace tessera::engine {

// Bytes of one role that were read from and written to NVMe.
struct RoleIo {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
};

class NvmeStores {
 public:
  // Removes what runs that are no more have left. Throws IoError where a directory cannot be used.
  NvmeStores(Runtime& runtime, comm::Group& group);

  // Both replace what the role had before. `bytes`: reserved; of the pool all that it has.
  tier::FileStore& make_store(Role role, std::int64_t bytes);
  tier::BufferPool& make_buffers(Role role, Tier tier, std::int64_t bytes);

  const tier::FileStore* store(Role role) const { return of(role).store.get(); }  // null: none
  // Since the last call.
  RoleIo take_io(Role role);

 private:
  struct RoleStore {
    std::unique_ptr<tier::FileStore> store;
    std::unique_ptr<tier::BufferPool> buffers;
    RoleIo taken;  // at the last take_io()
  };
  RoleStore& of(Role role) { return roles_[static_cast<std::size_t>(role)]; }
  const RoleStore& of(Role role) const { return roles_[static_cast<std::size_t>(role)]; }

  Runtime& runtime_;
  std::string run_;                     // the same on all ranks
  std::unique_ptr<tier::IoEngine> io_;  // of the stores
  std::array<RoleStore, kNumRoles> roles_;
};

}  // namespace tessera::engine
