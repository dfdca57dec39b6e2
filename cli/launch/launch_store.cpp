#include "cli/launch/launch_store.h"

#include <array>
#include <cstdio>
#include <random>
#include <utility>

#include "tessera/comm/rendezvous.h"
#include "tessera/comm/store.h"

namespace tessera::cli {
namespace {

std::string draw_secret() {
  std::random_device source;
  std::string text;
  for (int word = 0; word < 4; ++word) {
    std::array<char, 9> digits{};
    std::snprintf(digits.data(), digits.size(), "%08x", static_cast<unsigned>(source()));
    text += digits.data();
  }
  return text;
}

}  // namespace

LaunchStore serve_launch_store(int world_size, std::chrono::milliseconds timeout) {
  LaunchStore result;
  result.host = "127.0.0.1";
  result.secret = draw_secret();
  auto store = comm::serve_store(
      result.host, 0, timeout, comm::key_prefix_with(comm::Rendezvous{}.key_prefix, result.secret));
  result.port = store->port();
  result.status = std::make_shared<comm::StatusStore>(std::move(store), world_size);
  return result;
}

}  // namespace tessera::cli
