#include "tessera/comm/store_board.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <utility>

namespace tessera::comm {
namespace {

constexpr const char* kNumFailures = "board/num_failures";

std::string entry_key(const std::string& group, int rank) {
  return "board/" + group + "/" + std::to_string(rank);
}
std::string failure_key(int rank) { return "board/failure/" + std::to_string(rank); }
std::string claim_key(int rank) { return "board/claim/" + std::to_string(rank); }

class StoreBoard final : public Board {
 public:
  StoreBoard(std::unique_ptr<Store> store, int world_size)
      : store_(std::move(store)), world_size_(world_size) {}

  void post(const std::string& group, int rank, const BoardEntry& entry) override {
    attempt([&] { store_->set(entry_key(group, rank), entry.serialize()); });
  }

  std::optional<BoardEntry> read(const std::string& group, int rank) override {
    std::optional<BoardEntry> entry;
    attempt([&] {
      if (const auto bytes = store_->try_get(entry_key(group, rank))) {
        entry = BoardEntry::parse(*bytes);
      }
    });
    return entry;
  }

  void post_failure(int world_rank, const std::string& text) override {
    attempt([&] {
      if (store_->add(claim_key(world_rank), 1) != 1) return;
      store_->set(failure_key(world_rank), text);
      store_->add(kNumFailures, 1);
    });
  }

  std::map<int, std::string> failures() override {
    std::map<int, std::string> found;
    attempt([&] {
      if (!store_->try_get(kNumFailures)) return;
      for (int rank = 0; rank < world_size_; ++rank) {
        if (auto text = store_->try_get(failure_key(rank))) found.emplace(rank, std::move(*text));
      }
    });
    return found;
  }

  bool reachable() override {
    // Asks rather than remembers: the launcher may have died since the last call.
    attempt([&] { store_->try_get(kNumFailures); });
    return !broken_.load();
  }

 private:
  template <typename Body>
  void attempt(const Body& body) noexcept {
    if (broken_.load()) return;
    try {
      body();
    } catch (const std::exception&) {
      broken_.store(true);
    }
  }

  const std::unique_ptr<Store> store_;
  const int world_size_;
  std::atomic<bool> broken_{false};
};

}  // namespace

namespace {

std::string draw_secret() {
  std::random_device source;
  std::string text;
  for (int word = 0; word < 4; ++word) {
    std::array<char, 9> digits{};
    std::snprintf(digits.data(), digits.size(), "%08x", static_cast<unsigned>(source()));
    text += digits.data();
  }
  return text;
}

}  // namespace

std::shared_ptr<Board> make_store_board(std::unique_ptr<Store> store, int world_size) {
  return std::make_shared<StoreBoard>(std::move(store), world_size);
}

LaunchStore serve_launch_store(int world_size, std::chrono::milliseconds timeout) {
  LaunchStore result;
  result.host = "127.0.0.1";
  result.secret = draw_secret();
  auto store =
      serve_store(result.host, 0, timeout, key_prefix_with(Rendezvous{}.key_prefix, result.secret));
  result.port = store->port();
  result.board = make_store_board(std::move(store), world_size);
  return result;
}

}  // namespace tessera::comm
