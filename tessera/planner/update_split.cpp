#include "tessera/planner/update_split.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/planner/placement_cost.h"

namespace tessera::planner {
namespace {

// Elements with states in host memory, as they are given out.
class Split {
 public:
  explicit Split(double share) : share_(share) {}

  bool goes_to_processor(std::int64_t numel) const {
    if (share_ >= 1 || share_ <= 0) {
      return share_ >= 1;
    }
    const std::int64_t all = num_all_ + numel;
    return num_all_ > 0 && distance(num_processor_ + numel, all) < distance(num_processor_, all);
  }
  void give(std::int64_t numel, bool to_processor) {
    num_all_ += numel;
    num_processor_ += to_processor ? numel : 0;
  }
  double share() const {
    return num_all_ == 0 ? 0 : static_cast<double>(num_processor_) / static_cast<double>(num_all_);
  }

 private:
  double distance(std::int64_t num_processor, std::int64_t num_all) const {
    return std::abs(static_cast<double>(num_processor) - share_ * static_cast<double>(num_all));
  }

  const double share_;
  std::int64_t num_all_ = 0;
  std::int64_t num_processor_ = 0;
};

}  // namespace

double assign_updates(const CutModel& cut, std::vector<ShardPlaces>& places) {
  const double wanted = cut.options.cpu_share;
  Split split(wanted < 0 ? kDefaultCpuShare : wanted);
  // Besides: the processor's for another reason.
  std::int64_t num_host = 0;
  std::int64_t num_processor = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    ShardPlaces& each = places[i];
    const std::int64_t numel = cut.layouts[i].shard_numel();
    each.device_update = !cut.is_trainable(i) || each.states == Place::kDevice;
    if (!each.device_update && each.states == Place::kHost) {
      const bool leaves_from_host = each.parameter == Place::kNvme;
      if (!leaves_from_host) {
        each.device_update = !split.goes_to_processor(numel);
        split.give(numel, !each.device_update);
      }
      num_host += numel;
      num_processor += each.device_update ? 0 : numel;
    }
    each.gradient = each.device_update ? Place::kDevice : Place::kHost;
  }
  return num_host == 0 ? 0 : static_cast<double>(num_processor) / static_cast<double>(num_host);
}

}  // namespace tessera::planner
