// Ways to end that need the store: ranks that learn from it which of them has failed.
#include <chrono>
#include <csignal>
#include <memory>

#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tests/launch/rank_program.h"

namespace tessera::testing {
namespace {

// Nothing here takes long; a test that needs this time has failed.
constexpr std::chrono::milliseconds kLimit{60000};

std::unique_ptr<comm::Store> join(const RankContext& context) {
  auto store = comm::join_store(context.rendezvous, kLimit);
  store->add("arrived", 1);
  store->set("present/" + std::to_string(context.rank()), "yes");
  for (int rank = 0; rank < context.rendezvous.world_size; ++rank) {
    store->get("present/" + std::to_string(rank), kLimit);
  }
  return store;
}

// All join; rank 0, which may hold the store, leaves last.
int join_all(RankContext& context) {
  const auto store = join(context);
  say("rank " + std::to_string(context.rank()) + " joined " + store->get("arrived", kLimit) +
      " at port " + std::to_string(store->port()));
  const int num_done = static_cast<int>(store->add("done", 1));
  if (num_done == context.rendezvous.world_size) store->set("all_done", "yes");
  store->get("all_done", kLimit);
  if (context.rendezvous.serves_store) {
    while (store->add("left", 0) < context.rendezvous.world_size - 1) {
    }
  } else {
    store->add("left", 1);
  }
  return 0;
}

// Argument 0 names the culprit. The others wait until its failure is in the status store.
int name_the_culprit(RankContext& context, const std::function<void()>& deed) {
  const auto store = join(context);
  const auto status = std::make_shared<comm::StatusStore>(
      comm::connect_store(context.rendezvous.host, context.rendezvous.port, kLimit,
                          context.rendezvous.key_prefix),
      context.rendezvous.world_size);
  context.process.set_status(status);
  if (context.is_culprit()) deed();
  store->get("status/num_failures", kLimit);
  std::string named;
  for (const auto& [rank, failure] : status->failures()) {
    named += " rank " + std::to_string(rank) + ": " + failure.text;
  }
  say("rank " + std::to_string(context.rank()) + " read" + named);
  throw PeerError("lost" + named);
}

}  // namespace

std::vector<Behaviour> store_behaviours() {
  return {
      {"join", join_all},
      {"killed-beside-readers",
       [](RankContext& context) { return name_the_culprit(context, [] { raise(SIGKILL); }); }},
      {"throw-beside-readers",
       [](RankContext& context) {
         return name_the_culprit(context, [] { throw IoError("disk is full"); });
       }},
  };
}

}  // namespace tessera::testing
