#include "tessera/comm/tag_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "tessera/comm/c10d_gloo.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::steady_clock;

// A limit too large to add to the time of day means "never".
constexpr std::chrono::hours kNever{24 * 365};

// How long a wait for words pauses before it asks the store again.
constexpr std::chrono::milliseconds kPause{5};

// Those of bytes of the host, which are apart from tags.
GlooPeers host_peers(GlooPeers peers) {
  peers.name += "/host";
  return peers;
}

std::string words_key(const std::string& name, int rank) {
  return detail::concat(name, "/words/", rank);
}

// The words of all ranks, as the store gets them.
class StoredWords final : public device::PendingState {
 public:
  StoredWords(std::shared_ptr<Store> store, std::string name,
              std::shared_ptr<std::vector<WordsSlot>> words)
      : store_(std::move(store)), name_(std::move(name)), words_(std::move(words)) {}

  bool done() override {
    const std::lock_guard lock(mutex_);
    for (; num_read_ < words_->size(); ++num_read_) {
      const std::optional<std::string> said =
          store_->try_get(words_key(name_, static_cast<int>(num_read_)));
      if (!said) {
        return false;
      }
      std::memcpy(&(*words_)[num_read_], said->data(), std::min(said->size(), sizeof(WordsSlot)));
    }
    return true;
  }
  void wait() override {
    while (!wait_for(kNever)) {
    }
  }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto deadline = steady_clock::now() + std::min<std::chrono::nanoseconds>(limit, kNever);
    while (!done()) {
      if (steady_clock::now() >= deadline) {
        return false;
      }
      std::this_thread::sleep_for(kPause);
    }
    return true;
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string name_;
  const std::shared_ptr<std::vector<WordsSlot>> words_;
  std::mutex mutex_;
  std::size_t num_read_ = 0;  // guarded by mutex_
};

}  // namespace

struct TagChannel::Impl {
  Impl(const GlooPeers& given, const GlooOptions& options)
      : peers(joined(given, options)),
        devices(make_gloo_devices(options, 1)),
        tags(tag_peers(peers), devices, 1, options),
        host(host_peers(peers), devices, 1, options) {}

  const GlooPeers peers;
  const std::vector<GlooDevice> devices;
  GlooLink tags;
  GlooLink host;
};

TagChannel::TagChannel(std::shared_ptr<Store> store, int rank, int size, const std::string& name,
                       const GlooOptions& options)
    : impl_(std::make_unique<Impl>(GlooPeers{std::move(store), rank, size, name}, options)) {}

TagChannel::~TagChannel() = default;

Pending TagChannel::start_tags(const std::shared_ptr<std::vector<CallTag>>& tags) {
  return impl_->tags.start_gather(tags->data(), sizeof(CallTag), tags);
}

Pending TagChannel::start_words(const std::shared_ptr<std::vector<WordsSlot>>& words) {
  const GlooPeers& peers = impl_->peers;
  const WordsSlot& own = (*words)[static_cast<std::size_t>(peers.rank)];
  peers.store->set(words_key(peers.name, peers.rank),
                   std::string(reinterpret_cast<const char*>(&own), sizeof(own)));
  return Pending(std::make_shared<StoredWords>(peers.store, peers.name, words));
}

Pending TagChannel::start_host_gather(std::byte* all, std::size_t piece_bytes, const Call& call) {
  return impl_->host.start_gather(all, piece_bytes, call.keep_alive);
}

void TagChannel::abort() {
  impl_->tags.abandon();
  impl_->host.abandon();
}

}  // namespace tessera::comm
