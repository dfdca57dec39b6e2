// What to say when torch finds no memory on a GPU: its own words know nothing of who holds what.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tessera/core/ledger.h"
#include "tessera/device/device.h"

namespace tessera::cli {

// What torch says it tried to allocate ("Tried to allocate 2.50 GiB."); 0 if it does not say.
std::size_t asked_bytes(std::string_view torch_message);

// Whether torch says that the host has no memory, and for how many bytes ("you tried to allocate 64
// bytes"); 0 if it does not say.
bool is_host_allocation_failure(std::string_view torch_message);
std::size_t host_asked_bytes(std::string_view torch_message);

// Torch's first line, then memory_report() of the device.
std::string out_of_memory_text(std::string_view torch_message, const Ledger& ledger,
                               const device::MemoryInfo& memory);

}  // namespace tessera::cli
