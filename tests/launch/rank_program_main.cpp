// The program with torch: a real store, and all tables of behaviours.
#include <chrono>

#include "cli/launch/launch_store.h"
#include "tests/launch/rank_program.h"

int main(int argc, char** argv) {
  using namespace tessera;
  std::vector<testing::Behaviour> behaviours = testing::plain_behaviours();
  for (const auto& table : {testing::store_behaviours(), testing::collective_behaviours()}) {
    behaviours.insert(behaviours.end(), table.begin(), table.end());
  }
  const auto serve_store = [](int num_ranks) {
    return cli::serve_launch_store(num_ranks, std::chrono::seconds(60));
  };
  return testing::rank_program_main(argc, argv, behaviours, serve_store);
}
