#include "tessera/comm/await_ranks.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The longest pause between two questions, and how often failures are looked for.
constexpr milliseconds kLongestPause{50};
constexpr milliseconds kLookInterval{250};

}  // namespace

std::vector<std::string> exchange_at_store(Store& store, const std::string& group,
                                           const std::string& topic, int rank, int size,
                                           const std::string& own, milliseconds timeout,
                                           StatusStore* status) {
  const auto key = [&](int of) { return detail::concat(group, "/", topic, "/", of); };
  const auto missing = [&] {
    std::string text;
    for (int other = 0; other < size; ++other) {
      if (!store.try_get(key(other))) {
        text += detail::concat(text.empty() ? "rank " : ", rank ", other);
      }
    }
    return text.empty() ? std::string("the last rank") : text;
  };
  store.set(key(rank), own);
  const auto deadline = steady_clock::now() + timeout;
  auto next_look = steady_clock::now();
  milliseconds pause{1};
  std::vector<std::string> said;
  while (static_cast<int>(said.size()) < size) {
    if (auto value = store.try_get(key(static_cast<int>(said.size())))) {
      said.push_back(*std::move(value));
      continue;
    }
    const auto now = steady_clock::now();
    if (status != nullptr && now >= next_look) {
      next_look = now + kLookInterval;
      status->check_no_failure(detail::concat("group '", group, "' was aborted: "));
    }
    TESSERA_CHECK(now < deadline, CommError, "group '", group, "' of ", size, " ranks: ", missing(),
                  " did not join within ", static_cast<double>(timeout.count()) / 1000.0,
                  " s (comm.timeout_s); see whether those processes were started, and their "
                  "own errors");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return said;
}

}  // namespace tessera::comm
