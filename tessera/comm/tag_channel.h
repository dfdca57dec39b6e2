// The way of tags, words and other bytes of the host for backends whose calls are work of a stream:
// sockets of the host beside the network of the data, so that ranks can agree, or say why they do
// not, while a device is busy or stuck.
//
// Tags travel as Gloo's own do, in a small process group; bytes of the host in another, since they
// are sent when tags have been compared, and Gloo matches the calls of one process group by their
// order. Words, after a mismatch, travel through
// the store: ranks may have sent tags of different numbers of later calls by then, so the process
// group matches no more.
//
// What fixes the order of tags: the order of start_tags(), which is that of the calls. The same
// holds for start_host_gather().
//
// Threads: start_tags() and start_host_gather() each from one at a time, start_words() once,
// abort() from any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backend.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/store.h"
#include "tessera/comm/tag.h"

namespace tessera::comm {

class TagChannel {
 public:
  // Blocks until all `size` ranks have joined at `store` under the prefix `name`. Of the options
  // those count that say where to listen and how long to wait.
  TagChannel(std::shared_ptr<Store> store, int rank, int size, const std::string& name,
             const GlooOptions& options);
  ~TagChannel();
  TagChannel(const TagChannel&) = delete;
  TagChannel& operator=(const TagChannel&) = delete;

  // As in Backend.
  Pending start_tags(const std::shared_ptr<std::vector<CallTag>>& tags);
  Pending start_words(const std::shared_ptr<std::vector<WordsSlot>>& words);
  Pending start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call);
  // The destructor waits for nothing then.
  void abort();

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
