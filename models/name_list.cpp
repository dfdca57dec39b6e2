#include "models/name_list.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr std::size_t kMostItems = 6;
constexpr std::size_t kMostDims = 4;

}  // namespace

NameList::NameList(std::string title) : title_(std::move(title)) {}

void NameList::add(const std::string& item) {
  if (++num_items_ <= kMostItems) {
    items_.append(items_.empty() ? " " : ", ").append(item);
  }
}

std::string NameList::text() const {
  if (num_items_ == 0) {
    return "";
  }
  return title_ + items_ +
         (num_items_ > kMostItems ? detail::concat(" and ", num_items_ - kMostItems, " more") : "");
}

std::string joined(std::initializer_list<NameList> lists) {
  std::string all;
  for (const NameList& list : lists) {
    const std::string text = list.text();
    all.append(all.empty() || text.empty() ? "" : "; ").append(text);
  }
  return all;
}

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (std::size_t dim = 0; dim < sizes.size() && dim < kMostDims; ++dim) {
    text += (dim > 0 ? ", " : "") + std::to_string(sizes[dim]);
  }
  return "[" + text + (sizes.size() > kMostDims ? ", ...]" : "]");
}

}  // namespace tessera::models
