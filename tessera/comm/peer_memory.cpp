#include "tessera/comm/peer_memory.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "tessera/comm/await_ranks.h"
#include "tessera/core/error.h"
#include "tessera/core/system_call.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kTokenBytes = 16;
constexpr std::size_t kNumSwapped = 2;  // the heap, the control block

std::string random_hex() {
  std::array<unsigned char, kTokenBytes> bytes{};
  TESSERA_CHECK(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
                CommError, "getrandom: ", std::strerror(errno));
  std::string text;
  for (const unsigned char byte : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

// The same for all processes that one kernel runs.
std::string this_host() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, id);
  return id.empty() ? "unknown" : id;
}

// What a rank says at the store.
struct Address {
  std::string host;
  std::string socket;
  std::string token;
  int pretended_host = 0;

  std::string text() const {
    return detail::concat(host, " ", socket, " ", token, " ", pretended_host);
  }
  static Address parse(const std::string& text) {
    Address address;
    std::istringstream(text) >> address.host >> address.socket >> address.token >>
        address.pretended_host;
    return address;
  }
};

// What a rank sends first to one that it has connected to.
struct Introduction {
  std::array<char, 2 * kTokenBytes> token{};  // of the one who listens
  std::int32_t rank = 0;
};

[[noreturn]] void throw_errno(const std::string& what) {
  throw CommError(detail::concat(what, ": ", std::strerror(errno)));
}

// Abstract: its first byte is zero, and it is gone with its last descriptor.
std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof(address.sun_path) - 1));
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

FileDescriptor open_socket() {
  FileDescriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) {
    throw_errno("a Unix socket");
  }
  return fd;
}

// Of the process at the other end, when it connected or began to listen.
uid_t user_of(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw_errno("SO_PEERCRED");
  }
  return peer.uid;
}

void limit_waits(int fd, std::chrono::milliseconds timeout) {
  timeval limit{};
  limit.tv_sec = static_cast<time_t>(timeout.count() / 1000);
  limit.tv_usec = static_cast<suseconds_t>(timeout.count() % 1000 * 1000);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

// Room for the descriptors of one message.
union ControlMessage {
  cmsghdr header;
  std::array<char, CMSG_SPACE(kNumSwapped * sizeof(int))> bytes;
};

// With one byte, since descriptors do not travel alone.
void send_descriptors(int socket, std::array<int, kNumSwapped> fds) {
  ControlMessage control{};
  char byte = 0;
  iovec data{&byte, sizeof(byte)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
  if (retried([&] { return sendmsg(socket, &message, MSG_NOSIGNAL); }) !=
      static_cast<ssize_t>(sizeof(byte))) {
    throw_errno("descriptors could not be sent");
  }
}

std::array<FileDescriptor, kNumSwapped> receive_descriptors(int socket) {
  ControlMessage control{};
  char byte = 0;
  iovec data{&byte, sizeof(byte)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  const ssize_t received = retried([&] { return recvmsg(socket, &message, MSG_CMSG_CLOEXEC); });
  std::array<FileDescriptor, kNumSwapped> swapped;
  const cmsghdr* const header = received < 0 ? nullptr : CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    std::array<int, kNumSwapped> fds{-1, -1};
    std::memcpy(fds.data(), CMSG_DATA(header),
                std::min(header->cmsg_len - CMSG_LEN(0), sizeof(fds)));
    for (std::size_t i = 0; i < fds.size(); ++i) {
      swapped.at(i) = FileDescriptor(fds.at(i));
    }
  }
  TESSERA_CHECK(received == static_cast<ssize_t>(sizeof(byte)) && swapped.back().get() >= 0,
                CommError, "descriptors did not arrive: ",
                received < 0 ? std::strerror(errno)
                             : "the other process ended, or has too few "
                               "(ulimit -n)");
  return swapped;
}

// A heap is mapped once, however many groups this process shares with its owner.
std::shared_ptr<const MappedMemory> map_heap(int fd, const std::string& what) {
  struct Mapped {
    std::mutex mutex;
    std::map<ino_t, std::weak_ptr<const MappedMemory>> by_inode;
  };
  static auto* const mapped = new Mapped();
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    throw_errno(what);
  }
  const std::lock_guard lock(mapped->mutex);
  std::weak_ptr<const MappedMemory>& known = mapped->by_inode[status.st_ino];
  if (auto memory = known.lock()) {
    return memory;
  }
  auto memory = std::make_shared<const MappedMemory>(fd, false, what);
  known = memory;
  return memory;
}

// One rank's side of connect_peers().
class PeerConnector {
 public:
  PeerConnector(Store& store, const PeerOptions& options) : store_(store), options_(options) {
    peers_->heaps.resize(num_ranks());
    peers_->controls.resize(num_ranks());
    peers_->sockets.resize(num_ranks());
  }

  std::unique_ptr<PeerMemory> connect(std::string& why_not) {
    for (const auto step : {&PeerConnector::prepare, &PeerConnector::reach, &PeerConnector::swap}) {
      if (!agree(step, why_not)) {
        return nullptr;
      }
    }
    return std::move(peers_);
  }

 private:
  std::size_t num_ranks() const { return static_cast<std::size_t>(options_.size); }
  int socket_of(int rank) const { return peers_->sockets[static_cast<std::size_t>(rank)].get(); }
  std::string peer_text(int rank) const { return detail::concat("memory of rank ", rank); }

  // Takes one step, and hears whether all ranks could.
  bool agree(void (PeerConnector::*step)(), std::string& why_not) {
    std::string failure;
    try {
      (this->*step)();
    } catch (const std::exception& error) {
      failure = error.what();
      peers_->sockets.clear();  // so that no peer waits for this rank
      listener_ = FileDescriptor();
    }
    const std::string own = failure.empty() ? "ok " + said_ : "no " + failure;
    heard_ = exchange_at_store(store_, options_.group, detail::concat("memory.", ++num_steps_),
                               options_.rank, options_.size, own, options_.timeout,
                               options_.status.get());
    for (std::size_t rank = 0; rank < heard_.size(); ++rank) {
      if (heard_[rank].starts_with("no ")) {
        why_not = detail::concat("rank ", rank, ": ", heard_[rank].substr(3));
        return false;
      }
      heard_[rank].erase(0, 3);
    }
    return true;
  }

  void prepare() {
    if (options_.has_heap) {
      peers_->own_heap = device::SharedHeap::open();
    }
    control_ = FileDescriptor(memfd_create("tessera control", MFD_CLOEXEC));
    if (control_.get() < 0 ||
        ftruncate(control_.get(), static_cast<off_t>(options_.control_bytes)) != 0) {
      throw_errno("shared memory");
    }
    peers_->controls[static_cast<std::size_t>(options_.rank)] =
        std::make_unique<MappedMemory>(control_.get(), true, "shared memory");
    own_ = {this_host(), "tessera/" + random_hex(), random_hex(), options_.pretended_host};
    listener_ = open_socket();
    const auto [address, length] = abstract_address(own_.socket);
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener_.get(), SOMAXCONN) != 0) {
      throw_errno("a Unix socket");
    }
    limit_waits(listener_.get(), options_.timeout);
    said_ = own_.text();
  }

  void reach() {
    for (const std::string& text : heard_) {
      addresses_.push_back(Address::parse(text));
    }
    for (int other = 0; other < options_.size; ++other) {
      const Address& address = addresses_[static_cast<std::size_t>(other)];
      TESSERA_CHECK(address.host == own_.host, CommError, "rank ", other, " is on another host");
      TESSERA_CHECK(address.pretended_host == own_.pretended_host, CommError, "rank ", other,
                    " is on another host, as comm.ranks_per_host says");
      if (other >= options_.rank) {
        continue;
      }
      FileDescriptor fd = open_socket();
      limit_waits(fd.get(), options_.timeout);
      const auto [where, length] = abstract_address(address.socket);
      if (retried([&, &where = where, &length = length] {
            return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&where), length);
          }) != 0) {
        throw_errno(detail::concat("no way to ", peer_text(other), " (another container?)"));
      }
      const uid_t user = user_of(fd.get());
      TESSERA_CHECK(user == geteuid(), CommError, "rank ", other, " belongs to user ", user,
                    ", this rank to ", geteuid(), "; start all ranks as one user");
      introduce_to(fd.get(), address.token);
      peers_->sockets[static_cast<std::size_t>(other)] = std::move(fd);
    }
    said_.clear();
  }

  void introduce_to(int socket, const std::string& token) const {
    Introduction own;
    std::copy_n(token.begin(), std::min(token.size(), own.token.size()), own.token.begin());
    own.rank = options_.rank;
    if (retried([&] { return send(socket, &own, sizeof(own), MSG_NOSIGNAL); }) !=
        static_cast<ssize_t>(sizeof(own))) {
      throw_errno("a Unix socket");
    }
  }

  // All ranks have connected and introduced themselves.
  void swap() {
    for (int missing = options_.size - 1 - options_.rank; missing > 0;) {
      missing -= accept_one() ? 1 : 0;
    }
    const auto send_to = [this](int other) {
      send_descriptors(
          socket_of(other),
          {options_.has_heap ? peers_->own_heap->fd() : control_.get(), control_.get()});
    };
    const auto receive_from = [this](int other) {
      keep(other, receive_descriptors(socket_of(other)));
    };
    for (int other = 0; other < options_.rank; ++other) {
      send_to(other);
    }
    // An answer, so that few descriptors are on their way: their number has a limit.
    for (int other = options_.rank + 1; other < options_.size; ++other) {
      receive_from(other);
      send_to(other);
    }
    for (int other = 0; other < options_.rank; ++other) {
      receive_from(other);
    }
  }

  // False: it was no rank of this run.
  bool accept_one() {
    FileDescriptor fd(
        retried([this] { return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC); }));
    if (fd.get() < 0) {
      throw_errno("a Unix socket");
    }
    Introduction other;
    const ssize_t received =
        retried([&] { return recv(fd.get(), &other, sizeof(other), MSG_DONTWAIT); });
    if (user_of(fd.get()) != geteuid() || received != static_cast<ssize_t>(sizeof(other)) ||
        !std::equal(own_.token.begin(), own_.token.end(), other.token.begin(), other.token.end())) {
      return false;
    }
    TESSERA_INVARIANT(other.rank > options_.rank && other.rank < options_.size, "rank ", other.rank,
                      " of ", options_.size, " has connected to rank ", options_.rank);
    limit_waits(fd.get(), options_.timeout);
    peers_->sockets[static_cast<std::size_t>(other.rank)] = std::move(fd);
    return true;
  }

  void keep(int rank, std::array<FileDescriptor, kNumSwapped> fds) {
    const auto at = static_cast<std::size_t>(rank);
    if (options_.has_heap) {
      peers_->heaps[at] = map_heap(fds[0].get(), peer_text(rank));
    }
    peers_->controls[at] = std::make_unique<MappedMemory>(fds[1].get(), true, peer_text(rank));
    TESSERA_CHECK(peers_->controls[at]->bytes() == options_.control_bytes, CommError,
                  peer_text(rank), " has ", peers_->controls[at]->bytes(),
                  " bytes of control, not ", options_.control_bytes,
                  ": do all ranks run the same program?");
  }

  Store& store_;
  const PeerOptions& options_;
  std::unique_ptr<PeerMemory> peers_ = std::make_unique<PeerMemory>();
  int num_steps_ = 0;
  std::string said_;
  std::vector<std::string> heard_;
  Address own_;
  std::vector<Address> addresses_;
  FileDescriptor listener_;
  FileDescriptor control_;
};

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

MappedMemory::MappedMemory(int fd, bool writable, const std::string& what) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    throw_errno(what);
  }
  bytes_ = static_cast<std::size_t>(status.st_size);
  void* const data = mmap(nullptr, bytes_, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                          MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    throw_errno(detail::concat(what, ": ", bytes_, " bytes could not be mapped"));
  }
  madvise(data, bytes_, MADV_DONTDUMP);
  data_ = static_cast<std::byte*>(data);
}

MappedMemory::~MappedMemory() { munmap(data_, bytes_); }

bool PeerMemory::has_ended(int rank) const {
  const int fd = sockets[static_cast<std::size_t>(rank)].get();
  pollfd question{fd, POLLIN, 0};
  // Nothing is sent after the descriptors: what can be read is the end.
  return fd >= 0 && poll(&question, 1, 0) > 0;
}

std::unique_ptr<PeerMemory> connect_peers(Store& store, const PeerOptions& options,
                                          std::string& why_not) {
  return PeerConnector(store, options).connect(why_not);
}

}  // namespace tessera::comm
