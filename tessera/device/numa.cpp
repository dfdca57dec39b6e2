#include "tessera/device/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>

#include "tessera/core/printable.h"

namespace tessera::device {
namespace {

// Linux has at most 1024 of them.
constexpr int kMaxNodes = 1024;
constexpr int kWordBits = 8 * sizeof(unsigned long);

}  // namespace

std::optional<int> numa_node_of(std::string_view pci_address, const std::filesystem::path& root) {
  std::ifstream file(root / "sys/bus/pci/devices" / lower_case(pci_address) / "numa_node");
  int node = -1;
  std::error_code error;
  const bool has_several = std::filesystem::exists(root / "sys/devices/system/node/node1", error);
  if (!has_several || !(file >> node) || node < 0 || node >= kMaxNodes) {
    return std::nullopt;
  }
  return node;
}

bool prefer_node(const HostPages& pages, int node) noexcept {
  if (node < 0 || node >= kMaxNodes) {
    return false;
  }
  std::array<unsigned long, kMaxNodes / kWordBits> nodes{};
  nodes[static_cast<std::size_t>(node / kWordBits)] = 1UL << (node % kWordBits);
  // The kernel reads one bit less than it is told to.
  return syscall(SYS_mbind, pages.data, pages.bytes, MPOL_PREFERRED, nodes.data(), kMaxNodes + 1,
                 0) == 0;
}

}  // namespace tessera::device
