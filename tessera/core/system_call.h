// System calls that a signal, or a completion of io_uring, may end before they have done anything:
// also a wait that has a limit of its own (SO_RCVTIMEO), although nothing is wrong with it.
//
// Threads: stateless.
#pragma once

#include <cerrno>

namespace tessera {

// What `call` returns once nothing has ended it before (EINTR): below zero for an error, which is
// in errno.
template <typename Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) {
    result = call();
  }
  return result;
}

}  // namespace tessera
