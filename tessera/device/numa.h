// Which of the host's memory is near a device: on a machine with several NUMA nodes, copies between
// a GPU and memory of another node pass the link between the sockets.
//
// Reads /sys below `root`, so that tests can lay out a machine of their own.
//
// Threads: stateless.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "tessera/device/host_memory.h"

namespace tessera::device {

// Of the device at this address of the PCI bus, such as "0000:1B:00.0". Nothing: the machine has
// one node, or does not say.
std::optional<int> numa_node_of(std::string_view pci_address,
                                const std::filesystem::path& root = "/");

// Pages come from that node as long as it has free ones. A wish, and false where the system does
// not grant it. It must come before the first use of the memory.
bool prefer_node(const HostPages& pages, int node) noexcept;

}  // namespace tessera::device
