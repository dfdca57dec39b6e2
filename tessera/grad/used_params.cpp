#include "tessera/grad/used_params.h"

#include <algorithm>
#include <utility>

namespace tessera::grad {
namespace {

constexpr std::size_t kBits = 8;  // per byte

}  // namespace

UsedParams::UsedParams(comm::Group& group, int num_params)
    : group_(group), used_(static_cast<std::size_t>(num_params), false) {}

void UsedParams::finish_backward() {
  if (group_.size() == 1 || used_.empty()) {
    return;
  }
  std::vector<std::byte> bits((used_.size() + kBits - 1) / kBits);
  for (std::size_t id = 0; id < used_.size(); ++id) {
    if (used_[id]) {
      bits[id / kBits] |= std::byte{1} << (id % kBits);
    }
  }
  comm::CallOptions call;
  call.label.unit = "parameters used";
  said_.push_back(group_.start_gather_host(bits, call));
}

void UsedParams::collect() {
  const std::size_t bytes = (used_.size() + kBits - 1) / kBits;
  const auto num_ranks = static_cast<std::size_t>(group_.size());
  for (const comm::HostGather& gather : std::exchange(said_, {})) {
    gather.done.wait();
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      const std::byte* const bits = gather.bytes.get() + rank * bytes;
      for (std::size_t id = 0; id < used_.size(); ++id) {
        if ((bits[id / kBits] >> (id % kBits) & std::byte{1}) != std::byte{0}) {
          used_[id] = true;
        }
      }
    }
  }
}

bool UsedParams::is_used(int param) {
  collect();
  return used_[static_cast<std::size_t>(param)];
}

bool UsedParams::is_under_way() const {
  return std::any_of(said_.begin(), said_.end(),
                     [](const comm::HostGather& gather) { return !gather.done.done(); });
}

void UsedParams::clear() noexcept {
  for (const comm::HostGather& gather : std::exchange(said_, {})) {
    try {
      gather.done.wait();
    } catch (...) {  // the group repeats it to whoever calls it next
    }
  }
  used_.assign(used_.size(), false);
}

}  // namespace tessera::grad
