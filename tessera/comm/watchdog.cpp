#include "tessera/comm/watchdog.h"

#include <algorithm>
#include <string_view>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Heartbeats to wait for the others' words before a loss is explained: a status is at most one
// heartbeat old, and the launcher needs a moment to see that a process has died.
constexpr int kHeartbeatsBeforeVerdict = 3;

// The last status of a rank that needs its group no more.
constexpr std::string_view kEnded = "ended";

// So often a wait looks whether the group is still in use.
constexpr milliseconds kMaxSlice{100};

// So often at least, while it waits for one part of several, it looks whether another has arrived.
constexpr milliseconds kMaxSliceOfSeveral{16};

std::string describe_last(const std::optional<RankStatus>& status) {
  if (!status) {
    return "has posted no status in this group";
  }
  if (status->launched == 0) {
    return "has not started a call in this group";
  }
  return detail::concat(status->completed >= status->launched ? "last completed " : "is still in ",
                        status->text);
}

}  // namespace

void Watchdog::started(const CallTag& tag, const std::string& text) {
  const std::lock_guard lock(mutex_);
  own_.launched = tag.sequence;
  own_.text = text;
}

void Watchdog::completed(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  own_.completed = sequence;
}

void Watchdog::post() {
  if (!options_.status) {
    return;
  }
  RankStatus status;
  {
    const std::lock_guard lock(mutex_);
    ++own_.heartbeat;
    status = own_;
    next_post_ = steady_clock::now() + options_.heartbeat;
  }
  options_.status->post(options_.group, options_.rank, status);
}

void Watchdog::idle() {
  {
    const std::lock_guard lock(mutex_);
    if (steady_clock::now() < next_post_) {
      return;
    }
  }
  post();
}

void Watchdog::end() {
  {
    const std::lock_guard lock(mutex_);
    own_.text = kEnded;
  }
  post();
}

void Watchdog::post_failure(const std::exception& error) {
  if (options_.status) {
    options_.status->post_failure(options_.world_ranks[static_cast<std::size_t>(options_.rank)],
                                  error);
  }
}

void Watchdog::check_no_failure(const std::string& what) {
  if (options_.status) {
    options_.status->check_no_failure(what);
  }
}

std::size_t Watchdog::await_any(std::span<const device::Pending> parts, const CallTag& tag,
                                const std::string& text, std::optional<milliseconds> own_limit) {
  const milliseconds limit = own_limit.value_or(options_.timeout);
  const auto deadline = steady_clock::now() + limit;
  auto next_look = steady_clock::now() + options_.heartbeat;
  std::vector<std::uint64_t> heartbeats;  // of all ranks, two heartbeats before the limit
  const milliseconds max_slice = parts.size() == 1 ? kMaxSlice : kMaxSliceOfSeveral;
  milliseconds slice = parts.size() == 1 ? kMaxSlice : milliseconds(1);
  const auto what = [&] { return detail::concat(text, " in group '", options_.group, "'"); };
  while (true) {
    try {
      // Parts mostly arrive in their order: so the first is the one to block on.
      if (parts.front().wait_for(std::min<milliseconds>(options_.heartbeat, slice))) {
        return 0;
      }
      for (std::size_t i = 1; i < parts.size(); ++i) {
        if (parts[i].done()) {
          parts[i].wait();
          return i;
        }
      }
      slice = std::min(2 * slice, max_slice);
    } catch (const PeerError& error) {
      throw_loss(what(), error.what());
    } catch (const MismatchError& error) {
      throw MismatchError(error.what());  // one of this thread's own: the other is shared
    } catch (const CommError& error) {
      // A call that waits for another one fails with the other's words, which name the call.
      const std::string_view said = error.what();
      throw CommError(said.starts_with(what()) ? std::string(said)
                                               : detail::concat(what(), ": ", said));
    }
    if (stopped_) {
      throw PeerError(detail::concat(text, ": group '", options_.group, "' is out of use"));
    }
    const auto now = steady_clock::now();
    if (now >= next_look) {
      next_look = now + options_.heartbeat;
      post();
      check_no_failure(what() + " was aborted: ");
    }
    if (heartbeats.empty() && now + 2 * options_.heartbeat >= deadline) {
      heartbeats = read_heartbeats();
    }
    if (now >= deadline) {
      throw_timeout(tag, what(), limit, heartbeats);
    }
  }
}

std::optional<RankStatus> Watchdog::read(std::size_t rank) {
  return options_.status ? options_.status->read(options_.group, static_cast<int>(rank))
                         : std::nullopt;
}

std::vector<std::uint64_t> Watchdog::read_heartbeats() {
  std::vector<std::uint64_t> heartbeats;
  for (std::size_t rank = 0; rank < options_.world_ranks.size(); ++rank) {
    const auto status = read(rank);
    heartbeats.push_back(status ? status->heartbeat : 0);
  }
  return heartbeats;
}

void Watchdog::throw_loss(const std::string& what, const std::string& reason) {
  const std::string lost = what + " lost a peer: ";
  if (!options_.status) {
    throw PeerError(lost + reason);
  }
  const std::vector<std::uint64_t> first = read_heartbeats();
  std::vector<std::uint64_t> last;
  for (int heartbeat = 0; heartbeat < kHeartbeatsBeforeVerdict; ++heartbeat) {
    post();
    check_no_failure(lost);
    std::this_thread::sleep_for(options_.heartbeat);
    last = read_heartbeats();
  }
  check_no_failure(lost);
  if (!options_.status->is_reachable()) {
    throw PeerError(lost + reason + "; the process that holds the store is gone, too");
  }
  std::string silent;
  for (std::size_t rank = 0; rank < last.size(); ++rank) {
    const auto status = read(rank);
    if (status && status->text == kEnded) {
      throw PeerError(detail::concat(
          lost, "rank ", options_.world_ranks[rank],
          " has ended its run, and nothing went wrong there: ranks must take the same number of "
          "steps. If they have different amounts of data, set unit.uneven_data=true, and let a "
          "rank that has no more call engine.join() until it returns nothing"));
    }
    if (last[rank] == first[rank] && static_cast<int>(rank) != options_.rank) {
      silent += detail::concat("; rank ", options_.world_ranks[rank], " gives no sign of life, ",
                               describe_last(status));
    }
  }
  throw PeerError(lost + reason + silent);
}

// The status of all ranks. One that does not say that its rank has arrived may be a heartbeat old:
// if the rank still posts, its next one is waited for, so that who arrived at the last moment is
// not accused. A rank that has posted nothing since `heartbeats` is dead or stopped, and is not
// waited for.
std::vector<std::optional<RankStatus>> Watchdog::read_fresh(
    const CallTag& tag, const std::vector<std::uint64_t>& heartbeats) {
  constexpr milliseconds kPause{20};
  const std::vector<std::uint64_t> now = read_heartbeats();
  std::vector<std::optional<RankStatus>> all(now.size());
  const auto limit = steady_clock::now() + options_.heartbeat + kPause;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    do {
      all[rank] = read(rank);
      const bool may_change = all[rank] && all[rank]->launched < tag.sequence &&
                              now[rank] != heartbeats[rank] && all[rank]->heartbeat == now[rank];
      if (!may_change) {
        break;
      }
      std::this_thread::sleep_for(std::min(kPause, options_.heartbeat));
    } while (steady_clock::now() < limit);
  }
  return all;
}

void Watchdog::throw_timeout(const CallTag& tag, const std::string& what, milliseconds limit,
                             const std::vector<std::uint64_t>& heartbeats) {
  const std::string waited =
      detail::concat(what, " waited ", static_cast<double>(limit.count()) / 1000.0,
                     " s, the limit comm.timeout_s: ");
  if (!options_.status) {
    throw CommError(waited + "some ranks have not arrived, or the network is stuck");
  }
  post();
  std::vector<int> missing;
  std::string last;
  const std::vector<std::optional<RankStatus>> all = read_fresh(tag, heartbeats);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank] || all[rank]->launched < tag.sequence) {
      missing.push_back(options_.world_ranks[rank]);
      last += detail::concat("; rank ", options_.world_ranks[rank], " ", describe_last(all[rank]));
    }
  }
  if (missing.empty()) {
    throw CommError(waited +
                    "all ranks have arrived, so the network is stuck or too slow for this call; "
                    "check it with tessera bench-comm, or raise comm.timeout_s");
  }
  throw CommError(detail::concat(waited, list_ranks(missing),
                                 missing.size() == 1 ? " has" : " have", " not arrived", last,
                                 "; if they are only slow, raise comm.timeout_s"));
}

}  // namespace tessera::comm
