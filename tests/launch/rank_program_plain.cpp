// The program without torch: the launcher's board is in its own memory, and no store exists.
#include <memory>

#include "tests/launch/rank_program.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const auto serve_store = [](int) {
    return comm::LaunchStore{"127.0.0.1", 1, std::make_shared<comm::MemoryBoard>(), ""};
  };
  return testing::rank_program_main(argc, argv, testing::plain_behaviours(), serve_store);
}
