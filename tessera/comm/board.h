// Where each rank says what it is doing, so that a wait can be explained.
//
// The board is not on the path of any collective. A group's worker posts a line for its rank about
// once a second and when something goes wrong; a rank that has waited too long, or lost a peer,
// reads what the others posted and names the ones that have not come. Between processes the board
// lies in the rendezvous store (store_board.h), which the launcher holds, so that it outlives the
// rank that died; for ranks as threads it is MemoryBoard.
//
// Boards never throw: a board that cannot be reached reads as empty, and says so in `reachable`.
//
// Threads: every method may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace tessera::comm {

struct BoardEntry {
  std::uint64_t launched = 0;   // sequence number of the last call that this rank started
  std::uint64_t completed = 0;  // ... that came to its end here
  std::uint64_t beat = 0;       // counts posts: one that stands still belongs to a dead rank
  std::string text;             // describe(tag, unit, parameter) of the last call started

  std::string serialize() const;
  static std::optional<BoardEntry> parse(const std::string& bytes);
};

class Board {
 public:
  virtual ~Board() = default;
  // `group` names a group; `rank` is the rank inside it.
  virtual void post(const std::string& group, int rank, const BoardEntry& entry) = 0;
  virtual std::optional<BoardEntry> read(const std::string& group, int rank) = 0;

  // The root cause of one rank's end, by its rank in the world. The first post of a rank stays.
  virtual void post_failure(int world_rank, const std::string& text) = 0;
  virtual std::map<int, std::string> failures() = 0;

  virtual bool reachable() = 0;
};

class MemoryBoard final : public Board {
 public:
  void post(const std::string& group, int rank, const BoardEntry& entry) override;
  std::optional<BoardEntry> read(const std::string& group, int rank) override;
  void post_failure(int world_rank, const std::string& text) override;
  std::map<int, std::string> failures() override;
  bool reachable() override { return true; }

 private:
  // Guarded by mutex_.
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, BoardEntry> entries_;
  std::map<int, std::string> failures_;
};

}  // namespace tessera::comm
