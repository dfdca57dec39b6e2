// The NUMA node of a device. On a machine with several nodes, copies between a GPU and memory of
// another node pass the link between the sockets.
//
// Reads /sys below `root`, so that tests can describe other machines.
//
// Threads: stateless.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "tessera/device/host_memory.h"

namespace tessera::device {

// Node of the device at this PCI address, such as "0000:1B:00.0". Null: the machine has one node,
// or does not report it.
std::optional<int> numa_node_of(std::string_view pci_address,
                                const std::filesystem::path& root = "/");

// Makes pages come from that node while it has free ones. A hint: returns false if the system
// refuses, which is harmless. REQUIRES: before the first use of the memory.
bool prefer_node(const HostPages& pages, int node) noexcept;

}  // namespace tessera::device
