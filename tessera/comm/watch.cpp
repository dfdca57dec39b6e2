#include "tessera/comm/watch.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Beats to wait for the others' words before a failure is explained: a line on the board is at most
// one beat old, and the launcher needs a moment to see that a process has died.
constexpr int kBeatsBeforeVerdict = 3;

// The last words of a rank that needs its group no more.
constexpr std::string_view kEnded = "ended";

// So often a wait looks whether the group is still in use.
constexpr milliseconds kMaxSlice{100};

// So often at least, while it waits for one part of several, it looks whether another one has come.
constexpr milliseconds kMaxSliceOfSeveral{16};

struct Cause {
  std::vector<int> ranks;
  std::string text;  // of the first of them
};

// A failure without the call that its rank was in, which await_any() puts before it.
std::string_view reason_of(std::string_view failure) {
  constexpr std::string_view kGroup = " in group '";
  constexpr std::string_view kEnd = "': ";
  const std::size_t group = failure.find(kGroup);
  const std::size_t end = group == failure.npos ? group : failure.find(kEnd, group);
  return end == failure.npos ? failure : failure.substr(end + kEnd.size());
}

std::string seconds(milliseconds time) {
  return detail::concat(static_cast<double>(time.count()) / 1000.0, " s");
}

// What a rank said last.
std::string last_words(const std::optional<BoardEntry>& entry) {
  if (!entry) {
    return "has not said a word in this group";
  }
  if (entry->launched == 0) {
    return "has not started a call in this group";
  }
  return detail::concat(entry->completed >= entry->launched ? "last completed " : "is still in ",
                        entry->text);
}

}  // namespace

Watch::Watch(WatchOptions options) : options_(std::move(options)) {}

void Watch::started(const CallTag& tag, const std::string& text) {
  const std::lock_guard lock(mutex_);
  entry_.launched = tag.sequence;
  entry_.text = text;
}

void Watch::completed(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  entry_.completed = sequence;
}

void Watch::post() {
  if (!options_.board) {
    return;
  }
  BoardEntry entry;
  {
    const std::lock_guard lock(mutex_);
    ++entry_.beat;
    entry = entry_;
    next_post_ = steady_clock::now() + options_.beat;
  }
  options_.board->post(options_.group, options_.rank, entry);
}

void Watch::idle() {
  {
    const std::lock_guard lock(mutex_);
    if (steady_clock::now() < next_post_) {
      return;
    }
  }
  post();
}

void Watch::end() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry_.text = kEnded;
  }
  post();
}

void Watch::post_failure(const std::string& text) {
  if (options_.board) {
    options_.board->post_failure(options_.world_ranks[static_cast<std::size_t>(options_.rank)],
                                 text);
  }
}

// Empty if no rank has failed. What several ranks say is said once: a mismatch is found by all of
// them, and who gives up because of another's failure repeats it.
std::string Watch::failures_text() {
  if (!options_.board) {
    return {};
  }
  std::vector<Cause> causes;
  for (const auto& [rank, failure] : options_.board->failures()) {
    const std::string_view reason = reason_of(failure);
    const auto same = std::find_if(causes.begin(), causes.end(), [&](const Cause& cause) {
      const std::string_view other = reason_of(cause.text);
      return (!other.empty() && failure.find(other) != failure.npos) ||
             (!reason.empty() && cause.text.find(reason) != cause.text.npos);
    });
    if (same == causes.end()) {
      causes.push_back({{rank}, failure});
    } else {
      same->ranks.push_back(rank);
    }
  }
  std::string text;
  for (const Cause& cause : causes) {
    text +=
        detail::concat(text.empty() ? "" : "; ", list_ranks(cause.ranks), " failed: ", cause.text);
  }
  return text;
}

std::size_t Watch::await_any(std::span<const device::Pending> parts, const CallTag& tag,
                             const std::string& text) {
  const auto deadline = steady_clock::now() + options_.timeout;
  auto next_look = steady_clock::now() + options_.beat;
  std::vector<std::uint64_t> beats;  // of all ranks, two beats before the limit
  const milliseconds max_slice = parts.size() == 1 ? kMaxSlice : kMaxSliceOfSeveral;
  milliseconds slice = parts.size() == 1 ? kMaxSlice : milliseconds(1);
  while (true) {
    try {
      // Parts mostly come in their order: so the first is the one to block on.
      if (parts.front().wait_for(std::min<milliseconds>(options_.beat, slice))) {
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
      throw PeerError(explain_loss(text, error.what()));
    } catch (const MismatchError& error) {
      throw MismatchError(error.what());  // one of this thread's own: the other is shared
    } catch (const CommError& error) {
      // A call that waits for another one fails with the other's words; what it says itself is
      // said.
      const std::string what = detail::concat(text, " in group '", options_.group, "'");
      const std::string_view said = error.what();
      throw CommError(said.starts_with(what) ? std::string(said) : what + ": " + std::string(said));
    }
    if (stopped_) {
      throw PeerError(detail::concat(text, ": group '", options_.group, "' is out of use"));
    }
    const auto now = steady_clock::now();
    if (now >= next_look) {
      next_look = now + options_.beat;
      post();
      if (const std::string failures = failures_text(); !failures.empty()) {
        throw PeerError(
            detail::concat(text, " in group '", options_.group, "' was given up: ", failures));
      }
    }
    if (beats.empty() && now + 2 * options_.beat >= deadline) {
      beats = read_beats();
    }
    if (now >= deadline) {
      throw CommError(explain_timeout(tag, text, beats));
    }
  }
}

std::string Watch::explain_loss(const std::string& text, const std::string& reason) {
  const std::string what = detail::concat(text, " in group '", options_.group, "' lost a peer: ");
  if (!options_.board) {
    return what + reason;
  }
  std::vector<std::uint64_t> first_beats(options_.world_ranks.size(), 0);
  std::vector<bool> alive(options_.world_ranks.size(), false);
  alive[static_cast<std::size_t>(options_.rank)] = true;
  for (int beat = 0; beat < kBeatsBeforeVerdict; ++beat) {
    post();
    for (std::size_t rank = 0; rank < alive.size(); ++rank) {
      const auto entry = options_.board->read(options_.group, static_cast<int>(rank));
      if (entry && beat == 0) {
        first_beats[rank] = entry->beat;
      }
      alive[rank] = alive[rank] || (entry && entry->beat != first_beats[rank]);
    }
    if (const std::string failures = failures_text(); !failures.empty()) {
      return detail::concat(what, failures);
    }
    std::this_thread::sleep_for(options_.beat);
  }
  if (const std::string failures = failures_text(); !failures.empty()) {
    return detail::concat(what, failures);
  }
  if (!options_.board->reachable()) {
    return detail::concat(what, reason, "; the process that holds the store is gone, too");
  }
  std::string silent;
  for (std::size_t rank = 0; rank < alive.size(); ++rank) {
    const auto entry = options_.board->read(options_.group, static_cast<int>(rank));
    if (entry && entry->text == kEnded) {
      return detail::concat(
          what, "rank ", options_.world_ranks[rank],
          " has ended its run, and nothing went wrong there: ranks must take the same number of "
          "steps. If they have different amounts of data, set unit.uneven_data=true, and let a "
          "rank "
          "that has no more call engine.follow() until it returns nothing");
    }
    if (!alive[rank]) {
      silent +=
          detail::concat("; rank ", options_.world_ranks[rank], " gives no sign of life, ",
                         last_words(options_.board->read(options_.group, static_cast<int>(rank))));
    }
  }
  return detail::concat(what, reason, silent);
}

std::vector<std::uint64_t> Watch::read_beats() {
  std::vector<std::uint64_t> beats(options_.world_ranks.size(), 0);
  for (std::size_t rank = 0; options_.board && rank < beats.size(); ++rank) {
    const auto entry = options_.board->read(options_.group, static_cast<int>(rank));
    beats[rank] = entry ? entry->beat : 0;
  }
  return beats;
}

// The lines of all ranks. One that does not say that its rank has come may be a beat old: if the
// rank still posts, its next one is waited for, so that who came at the last moment is not accused.
// A rank that has posted nothing since `beats` is dead or stopped, and is not waited for.
std::vector<std::optional<BoardEntry>> Watch::read_fresh(const CallTag& tag,
                                                         const std::vector<std::uint64_t>& beats) {
  constexpr milliseconds kPause{20};
  const std::vector<std::uint64_t> now = read_beats();
  std::vector<std::optional<BoardEntry>> entries(now.size());
  const auto limit = steady_clock::now() + options_.beat + kPause;
  for (std::size_t rank = 0; rank < entries.size(); ++rank) {
    do {
      entries[rank] = options_.board->read(options_.group, static_cast<int>(rank));
      const bool may_change = entries[rank] && entries[rank]->launched < tag.sequence &&
                              now[rank] != beats[rank] && entries[rank]->beat == now[rank];
      if (!may_change) {
        break;
      }
      std::this_thread::sleep_for(std::min(kPause, options_.beat));
    } while (steady_clock::now() < limit);
  }
  return entries;
}

std::string Watch::explain_timeout(const CallTag& tag, const std::string& text,
                                   const std::vector<std::uint64_t>& beats) {
  std::string verdict = detail::concat(text, " in group '", options_.group, "' waited ",
                                       seconds(options_.timeout), ", the limit comm.timeout_s: ");
  if (!options_.board) {
    return verdict + "some ranks have not come, or the network is stuck";
  }
  post();
  std::vector<int> missing;
  std::string words;
  const std::vector<std::optional<BoardEntry>> entries = read_fresh(tag, beats);
  for (std::size_t rank = 0; rank < entries.size(); ++rank) {
    const std::optional<BoardEntry>& entry = entries[rank];
    if (!entry || entry->launched < tag.sequence) {
      missing.push_back(options_.world_ranks[rank]);
      words += detail::concat("; rank ", options_.world_ranks[rank], " ", last_words(entry));
    }
  }
  if (missing.empty()) {
    return verdict +
           "all ranks have come, so the network is stuck or too slow for this call; "
           "check it with tessera bench-comm, or raise comm.timeout_s";
  }
  return detail::concat(verdict, list_ranks(missing), missing.size() == 1 ? " has" : " have",
                        " not come", words, "; if they are only slow, raise comm.timeout_s");
}

}  // namespace tessera::comm
