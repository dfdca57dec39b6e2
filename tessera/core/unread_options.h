// What a run says of options that somebody gave and that nothing reads yet (Config::unread()).
//
// Threads: a pure function.
#pragma once

#include <string>

namespace tessera {

class Config;

// A sentence that names them, with the way out; empty: there are none.
std::string unread_warning(const Config& config);

}  // namespace tessera
