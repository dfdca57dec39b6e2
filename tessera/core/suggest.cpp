#include "tessera/core/suggest.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the classic table: the one before the last is needed for exchanged neighbours.
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

}  // namespace

std::string_view nearest(std::string_view name, std::span<const std::string_view> known) {
  constexpr std::size_t kLongestName = 200;  // nobody mistypes more; bounds the work
  if (name.size() > kLongestName) {
    return {};
  }
  std::string_view best;
  std::size_t best_distance = 0;
  for (const std::string_view candidate : known) {
    const std::size_t limit = std::max<std::size_t>(1, candidate.size() / 3);
    const std::size_t longer = std::max(name.size(), candidate.size());
    if (longer - std::min(name.size(), candidate.size()) > limit) {
      continue;
    }
    const std::size_t distance = edit_distance(name, candidate);
    if (distance <= limit && distance < candidate.size() &&
        (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace tessera
