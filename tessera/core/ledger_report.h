// Why memory ran out, for people: what was asked for, who holds what, and the smallest change of
// options that would fit.
//
// Pure: the same numbers give the same text. The holdings are the ledger's; what is in use beyond
// them (activations, caches of an allocator, other processes) is what is left of `total`.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/core/ledger.h"

namespace tessera {

// `tier`: where `asked_bytes` were refused while `free_bytes` of `total_bytes` were free; a total
// of 0 is unknown. `device_is_host`: the device's memory is the host's (a CPU), so that only NVMe
// takes anything off it. Several lines, without a line break at the end.
std::string memory_report(const Ledger& ledger, Tier tier, std::size_t asked_bytes,
                          std::size_t free_bytes, std::size_t total_bytes,
                          bool device_is_host = false);

}  // namespace tessera
