#include "tessera/comm/socket_probe.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestProbePause{500};

// What a name stands for.
class AddressList {
 public:
  AddressList(const std::string& host, std::uint16_t port) {
    resolve(host.c_str(), port, AF_UNSPEC, 0);
  }
  // All addresses of this machine.
  AddressList(int family, std::uint16_t port) { resolve(nullptr, port, family, AI_PASSIVE); }
  ~AddressList() {
    if (first_ != nullptr) freeaddrinfo(first_);
  }
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;

  const addrinfo* first() const { return first_; }
  const std::string& error() const { return error_; }  // empty: none

 private:
  void resolve(const char* host, std::uint16_t port, int family, int flags) {
    addrinfo hints{};
    hints.ai_family = family;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &first_);
    if (error != 0) error_ = gai_strerror(error);
  }

  addrinfo* first_ = nullptr;
  std::string error_;
};

milliseconds left_until(SteadyTime deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(left));
}

// A connection, or minus an errno.
int try_connect(const addrinfo& address, milliseconds limit) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  int error = connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd end{fd, POLLOUT, 0};
    const int ready = poll(&end, 1, static_cast<int>(std::min<std::int64_t>(limit.count(), 60000)));
    socklen_t length = sizeof(error);
    error = ETIMEDOUT;
    if (ready > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return fd;
  close(fd);
  return -error;
}

// Resolves each time: on a cluster a name may appear after the first attempt.
ConnectResult try_once(const std::string& host, std::uint16_t port, SteadyTime deadline) {
  const AddressList list(host, port);
  if (!list.error().empty()) return {-1, list.error()};
  ConnectResult result{-1, "no address"};
  for (const addrinfo* address = list.first(); address != nullptr; address = address->ai_next) {
    const int fd = try_connect(*address, left_until(deadline));
    if (fd >= 0) return {fd, ""};
    result.error = std::strerror(-fd);
  }
  return result;
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

std::string numeric_text(const sockaddr& address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  return getnameinfo(&address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0
             ? std::string(text.data())
             : std::string();
}

// A bound socket, or minus an errno.
int try_bind(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  const int on = 1;
  const int off = 0;
  // Connections of the last run that the kernel still remembers do not occupy the port.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0) return fd;
  const int error = errno;
  close(fd);
  return -error;
}

// The same, of the first address that can be bound.
int try_bind(const AddressList& list) {
  int fd = -EADDRNOTAVAIL;
  for (const addrinfo* address = list.first(); address != nullptr && fd < 0;
       address = address->ai_next) {
    fd = try_bind(*address);
  }
  return fd;
}

}  // namespace

ConnectResult connect_within(const std::string& host, std::uint16_t port, milliseconds timeout) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + timeout;
  milliseconds pause = kFirstPause;
  for (;;) {
    ConnectResult result = try_once(host, port, deadline);
    const milliseconds left = left_until(deadline);
    if (result.fd >= 0 || left.count() == 0) return result;
    if (!remedy_of(result.error).empty()) return result;  // waiting gives no descriptor
    std::this_thread::sleep_for(std::min(pause, left));
    pause = std::min(pause * 2, kLongestProbePause);
  }
}

bool peer_has_closed(int fd) {
  pollfd end{fd, POLLIN | POLLRDHUP, 0};
  return poll(&end, 1, 0) > 0;
}

ListenScope listen_scope(const std::string& host) {
  const AddressList list(host, 0);
  for (const addrinfo* address = list.first(); address != nullptr; address = address->ai_next) {
    if (is_loopback(*address->ai_addr) && !is_loopback_name(host)) {
      return ListenScope::kLoopbackName;
    }
    const int fd = try_bind(*address);
    if (fd >= 0) {
      close(fd);
      return ListenScope::kNamed;
    }
  }
  return ListenScope::kNotHere;
}

std::string address_towards(const std::string& host, std::uint16_t port) {
  const AddressList list(host, port);
  for (const addrinfo* address = list.first(); address != nullptr; address = address->ai_next) {
    const int fd = socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage storage{};
    socklen_t length = sizeof(storage);
    auto* const own = reinterpret_cast<sockaddr*>(&storage);
    // Of a datagram socket this only asks the routes.
    const bool found = connect(fd, address->ai_addr, address->ai_addrlen) == 0 &&
                       getsockname(fd, own, &length) == 0;
    close(fd);
    if (found && !is_loopback(*own)) return numeric_text(*own, length);
  }
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return {};
  std::string text;
  for (const ifaddrs* each = interfaces; each != nullptr && text.empty(); each = each->ifa_next) {
    const bool is_up = (each->ifa_flags & (IFF_UP | IFF_RUNNING)) == (IFF_UP | IFF_RUNNING);
    if (is_up && each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET &&
        !is_loopback(*each->ifa_addr)) {
      text = numeric_text(*each->ifa_addr, sizeof(sockaddr_in));
    }
  }
  freeifaddrs(interfaces);
  return text;
}

int bind_listener(const std::string& host, std::uint16_t port) {
  int fd = -1;
  if (listen_scope(host) == ListenScope::kNamed) {
    fd = try_bind(AddressList(host, port));
  } else {
    fd = try_bind(AddressList(AF_INET6, port));
    if (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL) fd = try_bind(AddressList(AF_INET, port));
  }
  TESSERA_CHECK(fd >= 0, CommError, "store: cannot listen on ", host, ":", port, ": ",
                fd == -EADDRINUSE ? "the port is in use" : std::strerror(-fd),
                fd == -EADDRINUSE ? "; another run or program has it, or a second process was "
                                    "started as rank 0: set MASTER_PORT to a free one"
                : fd == -EMFILE   ? open_files_remedy()
                                  : "; set MASTER_PORT to another port");
  return fd;
}

std::uint16_t bound_port(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  TESSERA_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) == 0, CommError,
                "store: the port of a socket is unknown: ", std::strerror(errno));
  return ntohs(storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

}  // namespace tessera::comm
