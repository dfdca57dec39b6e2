// Internal to comm: what the backends share that talk over c10d's Gloo: a process group, and how
// its operations are started. Data of Gloo's own backend travels over one, tags over another.
//
// Threads: start() from any, one at a time; see recorder_mutex() in c10d_gloo.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/comm/backend.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/store.h"

namespace tessera::comm {

// A listening socket and a thread. Process groups may share it.
using GlooDevice = decltype(c10d::ProcessGroupGloo::createDefaultDevice());
std::vector<GlooDevice> make_gloo_devices(const GlooOptions& options, int num_devices);

// Who meets whom.
struct GlooPeers {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;
  std::string name;  // of the group
};

// Those of the tags, which are apart.
inline GlooPeers tag_peers(GlooPeers peers) {
  peers.name += "/tags";
  return peers;
}

// Blocks until all ranks have said at the store that they join, which can name a rank that does
// not; Gloo's own connect cannot. Gives `peers` back.
GlooPeers joined(GlooPeers peers, const GlooOptions& options);

class GlooLink {
 public:
  GlooLink(const GlooPeers& peers, std::vector<GlooDevice> devices, int num_threads,
           const GlooOptions& options);
  // Waits for operations in flight, unless it was abandoned: then they may never end, and the
  // process group is left to the end of the process.
  ~GlooLink();
  GlooLink(const GlooLink&) = delete;
  GlooLink& operator=(const GlooLink&) = delete;

  void abandon() { is_abandoned_ = true; }

  c10d::ProcessGroupGloo& group() { return *group_; }
  static Pending start(const std::function<c10::intrusive_ptr<c10d::Work>()>& operation);
  // Bytes as a tensor that keeps `keep_alive`. Gloo never writes to an input.
  static at::Tensor view(const void* data, std::size_t bytes,
                         const std::shared_ptr<const void>& keep_alive);

  // `all`: a piece of each rank, with this rank's at its place.
  Pending start_gather(void* all, std::size_t piece_bytes,
                       const std::shared_ptr<const void>& keep_alive);

 private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace tessera::comm
