#include "tessera/comm/bootstrap.h"

#include <numeric>

#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/nccl_backend.h"
#include "tessera/comm/solo_backend.h"
#include "tessera/comm/store.h"
#include "tessera/comm/store_board.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::unique_ptr<Backend> make_backend(const Rendezvous& rendezvous, const WorldOptions& options,
                                      std::shared_ptr<Store> store, const std::string& name) {
  const bool on_gpu = options.cuda_device >= 0;
  const BackendKind kind = options.backend != BackendKind::kAuto ? options.backend
                           : on_gpu                              ? BackendKind::kNccl
                                                                 : BackendKind::kGloo;
  TESSERA_CHECK(kind != BackendKind::kNccl || on_gpu, ConfigError,
                "comm.backend=nccl needs a GPU per rank, and this rank runs on the CPU; use gloo");
  if (kind == BackendKind::kNccl) {
    return make_nccl_backend(std::move(store), rendezvous.rank, rendezvous.world_size,
                             options.cuda_device, name, options.group.timeout);
  }
  GlooOptions gloo;
  gloo.timeout = options.group.timeout;
  // The variable that c10d's own users know.
  gloo.interface = process_environment()["GLOO_SOCKET_IFNAME"];
  if (rendezvous.local_world_size == rendezvous.world_size) {
    gloo.bind_host = "127.0.0.1";
  }
  return make_gloo_backend(std::move(store), rendezvous.rank, rendezvous.world_size, name, gloo);
}

}  // namespace

World join_world(const Rendezvous& rendezvous, const WorldOptions& options) {
  World world;
  world.rendezvous = rendezvous;
  GroupOptions group = options.group;
  std::string name = "world";
  std::unique_ptr<Backend> backend;
  if (rendezvous.world_size == 1) {
    backend = make_solo_backend(options.group.device);
  } else {
    std::shared_ptr<Store> store = join_store(rendezvous, options.group.timeout);
    // A process may join more than once: what each world keeps in the store has its number.
    const std::int64_t number = store->add(detail::concat("worlds of rank ", rendezvous.rank), 1);
    const std::string prefix = number == 1 ? "" : detail::concat("world", number, "/");
    if (number > 1) {
      name = detail::concat("world.", number);
    }
    backend = make_backend(rendezvous, options, std::move(store), name);
    world.board =
        make_store_board(connect_store(rendezvous.host, rendezvous.port, options.group.timeout,
                                       rendezvous.key_prefix + prefix),
                         rendezvous.world_size);
    group.board = world.board;
  }
  std::vector<int> ranks(static_cast<std::size_t>(rendezvous.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  world.group =
      std::make_unique<Group>(std::move(backend), name, std::move(ranks), std::move(group));
  return world;
}

}  // namespace tessera::comm
