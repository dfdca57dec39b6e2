#include "tessera/comm/status_store.h"

#include <charconv>
#include <vector>

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr const char* kNumFailures = "status/num_failures";

std::string status_key(const std::string& group, int rank) {
  return detail::concat("status/rank/", group, "/", rank);
}
std::string failure_key(int rank) { return detail::concat("status/failure/", rank); }

std::optional<RankStatus> parse_status(const std::string& bytes) {
  RankStatus status;
  const char* cursor = bytes.data();
  const char* const end = cursor + bytes.size();
  for (std::uint64_t* field : {&status.launched, &status.completed, &status.heartbeat}) {
    const auto result = std::from_chars(cursor, end, *field);
    if (result.ec != std::errc{} || result.ptr == end || *result.ptr != ' ') {
      return std::nullopt;
    }
    cursor = result.ptr + 1;
  }
  status.text.assign(cursor, end);
  return status;
}

// The first character of a failure tells its kind.
constexpr char kMismatch = 'm';
constexpr char kOther = 'o';

}  // namespace

template <typename Body>
void StatusStore::attempt(const Body& body) noexcept {
  if (is_broken_) {
    return;
  }
  try {
    body();
  } catch (const std::exception&) {
    is_broken_ = true;
  }
}

void StatusStore::post(const std::string& group, int rank, const RankStatus& status) noexcept {
  attempt([&] {
    store_->set(status_key(group, rank), detail::concat(status.launched, ' ', status.completed, ' ',
                                                        status.heartbeat, ' ', status.text));
  });
}

std::optional<RankStatus> StatusStore::read(const std::string& group, int rank) noexcept {
  std::optional<RankStatus> status;
  attempt([&] {
    if (const auto bytes = store_->try_get(status_key(group, rank))) {
      status = parse_status(*bytes);
    }
  });
  return status;
}

void StatusStore::post_failure(int world_rank, const RankFailure& failure) noexcept {
  attempt([&] {
    if (store_->add(detail::concat("status/claim/", world_rank), 1) != 1) {
      return;
    }
    store_->set(failure_key(world_rank), (failure.is_mismatch ? kMismatch : kOther) + failure.text);
    store_->add(kNumFailures, 1);
  });
}

void StatusStore::post_failure(int world_rank, const std::exception& error) noexcept {
  post_failure(world_rank,
               RankFailure{error.what(), dynamic_cast<const MismatchError*>(&error) != nullptr});
}

std::map<int, RankFailure> StatusStore::failures() noexcept {
  std::map<int, RankFailure> found;
  attempt([&] {
    if (!store_->try_get(kNumFailures)) {
      return;
    }
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto bytes = store_->try_get(failure_key(rank));
      if (bytes && !bytes->empty()) {
        found[rank] = {bytes->substr(1), bytes->front() == kMismatch};
      }
    }
  });
  return found;
}

void StatusStore::check_no_failure(const std::string& what) {
  std::map<std::string, std::vector<int>> causes;  // what several ranks say is said once
  std::vector<std::string> texts;                  // in the order of ranks
  for (const auto& [rank, failure] : failures()) {
    if (failure.is_mismatch) {
      throw MismatchError(failure.text);
    }
    std::vector<int>& ranks = causes[failure.text];
    if (ranks.empty()) {
      texts.push_back(failure.text);
    }
    ranks.push_back(rank);
  }
  if (texts.empty()) {
    return;
  }
  std::string said;
  for (const std::string& text : texts) {
    said += detail::concat(said.empty() ? "" : "; ", list_ranks(causes[text]), " failed: ", text);
  }
  throw PeerError(what + said);
}

bool StatusStore::is_reachable() noexcept {
  attempt([&] { store_->try_get(kNumFailures); });
  return !is_broken_;
}

}  // namespace tessera::comm
