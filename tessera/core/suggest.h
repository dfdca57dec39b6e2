// "Did you mean ...?": the known name that is nearest to a mistyped one.
//
// Distance is the number of single-character insertions, deletions, replacements and exchanges of
// neighbours. A name further away than a third of its length is no help and is not suggested.
//
// Threads: stateless.
#pragma once

#include <span>
#include <string_view>

namespace tessera {

// Empty when nothing is near. Of equally near names the first wins.
std::string_view nearest(std::string_view name, std::span<const std::string_view> known);

}  // namespace tessera
