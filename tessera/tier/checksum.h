// A 64-bit checksum of one block: finds bytes that changed on their way to the disk and back. Not
// against anybody who means it.
//
// A change of any one of a block's 8-byte words, to whatever value, changes the sums before they
// are mixed; other changes, exchanged words among them, stay unseen once in 2^64.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::tier {

// Of kBlockBytes at `block`, which is aligned to 8 bytes at least.
std::uint64_t block_checksum(const std::byte* block);
// Of a block of zeros.
std::uint64_t zero_checksum();

}  // namespace tessera::tier
