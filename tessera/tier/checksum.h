// A 64-bit checksum of one block: finds bytes that changed on their way to the disk and back. Not
// against anybody who means it.
//
// Any change of a block, exchanged words among them, stays unseen about once in 2^63.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::tier {

// Of kBlockBytes.
std::uint64_t block_checksum(const std::byte* block);
// Of a block of zeros.
std::uint64_t zero_checksum();

}  // namespace tessera::tier
