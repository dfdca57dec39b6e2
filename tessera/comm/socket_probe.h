// What c10d's store does not do well by itself: wait quietly for a server that is not there yet,
// notice quietly that it has gone, and listen on one interface only.
//
// Threads: no shared state.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm {

struct ConnectResult {
  int fd = -1;        // an open connection, owned by the caller; or -1
  std::string error;  // why the last attempt failed: "Connection refused"
};

// Tries until host:port accepts a connection, or the time is over; at least once.
ConnectResult connect_within(const std::string& host, std::uint16_t port,
                             std::chrono::milliseconds timeout);

// True if the other end of a connection on which nothing was sent has closed it, or died.
bool peer_has_closed(int fd);

// Which addresses a listener at `host` has.
enum class ListenScope : std::uint8_t {
  kNamed,         // that of `host` alone
  kNotHere,       // all: `host` is no address of this machine (a service's name, a translated one)
  kLoopbackName,  // all: this machine's own name stands for loopback here (/etc/hosts), where the
                  // other hosts could not reach it
};
ListenScope listen_scope(const std::string& host);

// The address of this machine that other hosts see: the one from which it reaches `host`. Where
// that is loopback (the name of this machine often stands for it), the first of an interface that
// is not. Empty: none was found. Sends nothing.
std::string address_towards(const std::string& host, std::uint16_t port);

// A bound socket that does not listen yet; the caller owns it. port 0: a free one. listen_scope()
// says where it can be reached. Throws CommError with the remedy.
int bind_listener(const std::string& host, std::uint16_t port);
std::uint16_t bound_port(int fd);

}  // namespace tessera::comm
