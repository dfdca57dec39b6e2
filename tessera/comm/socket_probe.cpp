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

#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestProbePause{500};

struct AddressList {
  addrinfo* first = nullptr;
  std::string error;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

void resolve(const std::string& host, std::uint16_t port, AddressList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list.first);
  if (error != 0) list.error = gai_strerror(error);
}

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
  AddressList list;
  resolve(host, port, list);
  if (!list.error.empty()) return {-1, list.error};
  ConnectResult result{-1, "no address"};
  for (const addrinfo* address = list.first; address != nullptr; address = address->ai_next) {
    const int fd = try_connect(*address, left_until(deadline));
    if (fd >= 0) return {fd, ""};
    result.error = std::strerror(-fd);
  }
  return result;
}

struct BindAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

BindAddress ipv4_address(std::uint32_t host, std::uint16_t port) {
  BindAddress address;
  auto* in = reinterpret_cast<sockaddr_in*>(&address.storage);
  in->sin_family = AF_INET;
  in->sin_port = htons(port);
  in->sin_addr.s_addr = htonl(host);
  address.length = sizeof(sockaddr_in);
  return address;
}

BindAddress ipv6_address(const in6_addr& host, std::uint16_t port) {
  BindAddress address;
  auto* in = reinterpret_cast<sockaddr_in6*>(&address.storage);
  in->sin6_family = AF_INET6;
  in->sin6_port = htons(port);
  in->sin6_addr = host;
  address.length = sizeof(sockaddr_in6);
  return address;
}

BindAddress copy_address(const addrinfo& from) {
  BindAddress address;
  std::memcpy(&address.storage, from.ai_addr, from.ai_addrlen);
  address.length = from.ai_addrlen;
  return address;
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

// What is the loopback address on every machine.
bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host.compare(0, 4, "127.") == 0;
}

std::string numeric_text(const sockaddr& address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  return getnameinfo(&address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0
             ? std::string(text.data())
             : std::string();
}

// A socket, or minus an errno.
int try_bind(const BindAddress& address) {
  const int family = address.storage.ss_family;
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  const int on = 1;
  const int off = 0;
  // Connections of the last run that the kernel still remembers do not occupy the port.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0) return fd;
  const int error = errno;
  close(fd);
  return -error;
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
  AddressList list;
  resolve(host, 0, list);
  if (!list.error.empty()) return ListenScope::kNotHere;
  for (const addrinfo* address = list.first; address != nullptr; address = address->ai_next) {
    if (is_loopback(*address->ai_addr) && !is_loopback_name(host))
      return ListenScope::kLoopbackName;
    const int fd = try_bind(copy_address(*address));
    if (fd >= 0) {
      close(fd);
      return ListenScope::kNamed;
    }
  }
  return ListenScope::kNotHere;
}

std::string address_towards(const std::string& host, std::uint16_t port) {
  AddressList list;
  resolve(host, port, list);
  for (const addrinfo* address = list.first; address != nullptr; address = address->ai_next) {
    const int fd = socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    BindAddress own;
    own.length = sizeof(own.storage);
    auto* const storage = reinterpret_cast<sockaddr*>(&own.storage);
    // Of a datagram socket this only asks the routes.
    const bool found = connect(fd, address->ai_addr, address->ai_addrlen) == 0 &&
                       getsockname(fd, storage, &own.length) == 0;
    close(fd);
    if (found && !is_loopback(*storage)) return numeric_text(*storage, own.length);
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
  int fd = -EADDRNOTAVAIL;
  if (listen_scope(host) == ListenScope::kNamed) {
    AddressList list;
    resolve(host, port, list);
    for (const addrinfo* address = list.first; address != nullptr && fd < 0;
         address = address->ai_next) {
      fd = try_bind(copy_address(*address));
    }
  } else {
    fd = try_bind(ipv6_address(in6addr_any, port));
    if (fd == -EAFNOSUPPORT) fd = try_bind(ipv4_address(INADDR_ANY, port));
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
