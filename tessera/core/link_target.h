// Where a file that is written beside its place and renamed has to go: renaming onto a symbolic
// link would replace the link, and leave what it points to as it was.
//
// Threads: stateless.
#pragma once

#include <string>

namespace tessera {

// What the links at `path` lead to, whether it exists or not; `path` itself if it is no link. Links
// that lead in a circle are given back after 40 of them, as the kernel does.
std::string link_target(const std::string& path);

}  // namespace tessera
