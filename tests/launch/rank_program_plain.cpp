// The program without torch: the launcher's status store is in its own memory, and ranks have none.
#include <memory>

#include "testing/hash_store.h"
#include "tests/launch/rank_program.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const auto serve_store = [](int num_ranks) {
    return cli::LaunchStore{
        "127.0.0.1", 1,
        std::make_shared<comm::StatusStore>(std::make_unique<comm::HashStore>(), num_ranks), ""};
  };
  return testing::rank_program_main(argc, argv, testing::plain_behaviours(), serve_store);
}
