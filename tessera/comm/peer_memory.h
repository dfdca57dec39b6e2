// Processes of one host that map each other's memory.
//
// connect_peers() is collective over the ranks of a group. Whether they can is found out by trying,
// so that ranks in containers without common memory learn it, too: each rank says at the store
// where it listens (an abstract Unix socket, so that nothing is left behind) and a token; connects
// to all ranks below it and introduces itself; and says at the store whether it could. If all
// could, each pair swaps the descriptors of two memfds over its connection: the control block of
// this group and, if its calls are about the host's memory, the shared heap of the process
// (shared_heap.h). Both ends check the user of the other (SO_PEERCRED), and who listens checks the
// token, which only the ranks of the run can read.
//
// Names of abstract sockets are known to every process of the network namespace, so anybody may
// connect. A rank has introduced itself before the others accept: a connection that does not begin
// with the token is closed, and nobody waits for what it may send.
//
// The connections stay: one that ends says that the process at its other end has ended.
//
// Order: store, store, sockets, store; fixed by the code, and every rank takes every step that all
// others take.
//
// Threads: PeerMemory may be used from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"
#include "tessera/device/shared_heap.h"

namespace tessera::comm {

// A descriptor that is closed in the end.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// A memfd, mapped whole; unmapped in the end.
class MappedMemory {
 public:
  // `writable`: false maps it for reading only. Throws CommError with `what`.
  MappedMemory(int fd, bool writable, const std::string& what);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// By rank of the group; at this rank's own place: its own.
struct PeerMemory {
  std::shared_ptr<device::SharedHeap> own_heap;            // null without PeerOptions::has_heap
  std::vector<std::shared_ptr<const MappedMemory>> heaps;  // own: null
  std::vector<std::unique_ptr<MappedMemory>> controls;     // writable
  std::vector<FileDescriptor> sockets;                     // own: none

  // Whether the process of that rank has ended.
  bool has_ended(int rank) const;
};

struct PeerOptions {
  int rank = 0;
  int size = 1;
  std::string group;                     // a name that was not used before
  std::size_t control_bytes = 0;         // zeroed
  bool has_heap = true;                  // ranks map each other's heaps
  std::chrono::milliseconds timeout{0};  // for ranks that do not join
  std::shared_ptr<StatusStore> status;   // may be null
  // Ranks with different numbers do not share memory, as if they were on different hosts
  // (comm.ranks_per_host).
  int pretended_host = 0;
};

// Null if the ranks cannot share memory; `why_not` says then, on every rank, which rank could not,
// and why.
std::unique_ptr<PeerMemory> connect_peers(Store& store, const PeerOptions& options,
                                          std::string& why_not);

}  // namespace tessera::comm
