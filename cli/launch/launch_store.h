// The store that the ranks of a launcher join. Threads: plain data.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/status_store.h"

namespace tessera::cli {

struct LaunchStore {
  std::string host;
  std::uint16_t port = 0;
  std::shared_ptr<comm::StatusStore> status;  // keeps the server alive
  std::string secret;                         // for kSecretVariable of all ranks; empty: none
};

// A server on loopback. Draws the run's secret, and uses the key prefix that find_rendezvous()
// finds with it. Builds with torch only.
LaunchStore serve_launch_store(int world_size, std::chrono::milliseconds timeout);

}  // namespace tessera::cli
