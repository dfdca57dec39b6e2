// Internal to engine: plain values of every rank.
//
// Threads: as Group.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::engine {

// Of every rank of the group, in its order. Collective, in the caller's order.
template <typename T>
std::vector<T> gather_host(comm::Group& group, const T& mine, const char* what) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (group.size() == 1) {
    return {mine};
  }
  comm::CallOptions call;
  call.label.unit = what;
  const comm::HostGather all = group.start_gather_host(std::as_bytes(std::span(&mine, 1)), call);
  all.done.wait();
  std::vector<T> result(static_cast<std::size_t>(group.size()));
  std::memcpy(result.data(), all.bytes.get(), result.size() * sizeof(T));
  return result;
}

}  // namespace tessera::engine
