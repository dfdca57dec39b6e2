#include "tessera/comm/board.h"

#include <charconv>

#include "tessera/core/error.h"

namespace tessera::comm {

std::string BoardEntry::serialize() const {
  return detail::concat(launched, ' ', completed, ' ', beat, ' ', text);
}

std::optional<BoardEntry> BoardEntry::parse(const std::string& bytes) {
  BoardEntry entry;
  const char* cursor = bytes.data();
  const char* end = cursor + bytes.size();
  for (std::uint64_t* field : {&entry.launched, &entry.completed, &entry.beat}) {
    const auto result = std::from_chars(cursor, end, *field);
    if (result.ec != std::errc{} || result.ptr == end || *result.ptr != ' ') {
      return std::nullopt;
    }
    cursor = result.ptr + 1;
  }
  entry.text.assign(cursor, end);
  return entry;
}

void MemoryBoard::post(const std::string& group, int rank, const BoardEntry& entry) {
  const std::lock_guard lock(mutex_);
  entries_[{group, rank}] = entry;
}

std::optional<BoardEntry> MemoryBoard::read(const std::string& group, int rank) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find({group, rank});
  return found == entries_.end() ? std::nullopt : std::optional(found->second);
}

void MemoryBoard::post_failure(int world_rank, const std::string& text) {
  const std::lock_guard lock(mutex_);
  failures_.try_emplace(world_rank, text);
}

std::map<int, std::string> MemoryBoard::failures() {
  const std::lock_guard lock(mutex_);
  return failures_;
}

}  // namespace tessera::comm
