// The two things that c10d's store does not do well by itself: wait quietly for a server that is
// not there yet, and listen on one interface only.
//
// Threads: no shared state.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm {

// Blocks until host:port accepts a connection (which is closed at once), or the time is over.
// Returns an empty string, or why the last attempt failed ("Connection refused").
std::string wait_for_listener(const std::string& host, std::uint16_t port,
                              std::chrono::milliseconds timeout);

// A bound socket that does not listen yet; the caller owns it. port 0: a free one. It is bound to
// all interfaces unless `host` is a numeric loopback address. Throws CommError with the remedy.
int bind_listener(const std::string& host, std::uint16_t port);
std::uint16_t bound_port(int fd);

}  // namespace tessera::comm
