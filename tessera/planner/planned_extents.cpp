#include "tessera/core/error.h"
#include "tessera/planner/placement_cost.h"

namespace tessera::planner {
namespace {

class Extents {
 public:
  explicit Extents(std::vector<PlannedExtent>& all) : all_(all) {}
  // Whole blocks, behind what was added so far.
  void add(Role role, int param, std::int64_t begin, std::int64_t bytes, std::string tensor = {}) {
    const std::int64_t whole = block_bytes(bytes);
    all_.push_back({role, param, begin, end_, whole, std::move(tensor)});
    end_ += whole;
  }

 private:
  std::vector<PlannedExtent>& all_;
  std::int64_t end_ = 0;
};

}  // namespace

std::vector<PlannedExtent> planned_extents(const ModelShapes& model,
                                           const PlacementOptions& options,
                                           const Placement& placement,
                                           const std::vector<std::string>& state_names) {
  const CutModel cut(model, options);
  std::vector<PlannedExtent> all;
  Extents parameters(all);
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (placement.params[i].parameter == Place::kNvme) {
      parameters.add(Role::kShard, static_cast<int>(i), 0,
                     static_cast<std::int64_t>(cut.layouts[i].shard_bytes()));
    }
  }
  Extents gradients(all);
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (placement.params[i].gradient == Place::kNvme) {
      gradients.add(Role::kGradient, static_cast<int>(i), 0, 4 * cut.layouts[i].shard_numel());
    }
  }
  std::vector<std::string> tensors = state_names;
  if (!optim::is_own_master(model.dtype)) {
    tensors.insert(tensors.begin(), "master");
  }
  TESSERA_INVARIANT(state_names.size() == static_cast<std::size_t>(options.num_states),
                    state_names.size(), " names for ", options.num_states, " states");
  Extents states(all);
  for (const optim::SubGroup& group :
       sub_groups(cut, placement.params, placement.sub_group_numel).groups) {
    for (const optim::SubGroupPiece& piece : group.pieces) {
      for (const std::string& tensor : tensors) {
        if (group.states_stored) {
          states.add(Role::kOptimizer, piece.param, piece.begin,
                     static_cast<std::int64_t>(piece.tensor_bytes), tensor);
        }
      }
    }
  }
  return all;
}

}  // namespace tessera::planner
