#include "tessera/grad/host_copies.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {

using device::Pending;

HostCopies::HostCopies(DType dtype, int num_micro_batches, std::function<device::Memory()> allocate)
    : dtype_(dtype),
      num_sum_(static_cast<std::size_t>(num_sum_buffers(dtype))),
      num_micro_batches_(num_micro_batches),
      allocate_(std::move(allocate)) {}

void HostCopies::reserve(int num_buffers) {
  while (buffers_.size() < static_cast<std::size_t>(num_buffers)) {
    buffers_.push_back(allocate_());
  }
}

std::byte* HostCopies::next() {
  const auto holds = [](const std::vector<std::size_t>& list, std::size_t buffer) {
    return std::find(list.begin(), list.end(), buffer) != list.end();
  };
  std::size_t free = 0;
  while (holds(sum_, free) || holds(alone_, free) || holds(folded_, free)) {
    ++free;
  }
  if (free >= buffers_.size() && !folded_.empty()) {
    made_.wait();
    free = folded_.front();
    folded_.clear();
  }
  reserve(static_cast<int>(free) + 1);
  alone_.push_back(free);
  return buffers_[free].data();
}

bool HostCopies::end(Pending left) {
  left_ = std::move(left);
  ++num_ended_;
  const std::size_t num_addends = sum_.size() + alone_.size();
  const bool comes_another = num_ended_ < num_micro_batches_;
  const bool is_room_left = num_addends < buffers_.size();
  return comes_another && num_addends > num_sum_ &&
         (!is_room_left || num_ended_ == num_micro_batches_ - 1);
}

void HostCopies::fold(const std::function<Pending(HostAddends addends, Pending ready)>& sum) {
  TESSERA_INVARIANT(alone_.size() + sum_.size() > num_sum_, alone_.size(),
                    " micro-batches are to be added up");
  made_ = sum(addends(), ready());
  std::vector<std::size_t> all = std::move(sum_);
  all.insert(all.end(), alone_.begin(), alone_.end());
  const auto behind = all.begin() + static_cast<std::ptrdiff_t>(num_sum_);
  sum_.assign(all.begin(), behind);
  folded_.insert(folded_.end(), behind, all.end());
  alone_.clear();
}

HostAddends HostCopies::addends() {
  if (num_ended_ == 0) {
    reserve(1);
    std::memset(buffers_.front().data(), 0, buffers_.front().bytes());
    return {buffers_.front().data(), nullptr, dtype_, {}};
  }
  HostAddends found;
  found.dtype = dtype_;
  std::vector<const void*> all;
  for (const auto* list : {&sum_, &alone_}) {
    for (const std::size_t buffer : *list) {
      all.push_back(data(buffer));
    }
  }
  found.values = all.front();
  const std::size_t first = std::max<std::size_t>(1, sum_.size());
  found.low = first == 2 ? all[1] : nullptr;
  found.later.assign(all.begin() + static_cast<std::ptrdiff_t>(first), all.end());
  return found;
}

Pending HostCopies::ready() const { return Pending::all({left_, made_}); }

void HostCopies::clear() {
  sum_.clear();
  alone_.clear();
  folded_.clear();
  num_ended_ = 0;
  made_ = {};
}

}  // namespace tessera::grad
