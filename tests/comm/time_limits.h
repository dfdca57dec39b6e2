// How long the tests of failures let ranks wait.
#pragma once

#include <chrono>

#include "tessera/comm/group.h"
#include "tests/support/sizes.h"

namespace tessera::comm {

// The limit is far away: what is found at once must not need it, however slow the machine.
inline GroupOptions patient() {
  GroupOptions options;
  options.timeout = std::chrono::minutes(15);
  options.heartbeat = std::chrono::milliseconds(30);
  return options;
}

// For what can end only at the limit: as long as a busy machine may hold up a healthy rank.
inline GroupOptions hasty() {
  GroupOptions options = patient();
  options.timeout = std::chrono::seconds(support::rounds(4, 15));
  return options;
}

}  // namespace tessera::comm
