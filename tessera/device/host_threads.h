// Work on memory of the host that one core alone takes seconds for: cut into pieces, and done by as
// many threads as this process may use cores. They keep to the caller's cores, so pages that they
// touch first are near them.
//
// For what is done once, at the start or for a save: threads are made and joined at every call.
// What is done in every step has a team of its own (optim/thread_team.h).
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera::device {

// work(piece) once for each piece in [0, num_pieces), several at a time, in no fixed order. Returns
// when all are done; if one throws, those that have begun are, and that is thrown.
void for_each_piece(std::size_t num_pieces, const std::function<void(std::size_t piece)>& work);

// As memset; with several threads where there is much of it.
void fill_host(void* to, std::uint8_t value, std::size_t bytes);
// As memcpy, likewise.
void copy_host(void* to, const void* from, std::size_t bytes);

}  // namespace tessera::device
