#include "tessera/planner/memory_cost.h"

#include <algorithm>

#include "tessera/comm/staging.h"
#include "tessera/coordinator/shard_loader.h"
#include "tessera/core/error.h"
#include "tessera/device/host_memory.h"
#include "tessera/grad/bucket.h"
#include "tessera/grad/reducer.h"
#include "tessera/planner/gather_cost.h"
#include "tessera/quant/block_codec.h"
#include "tessera/tier/io_engine.h"

namespace tessera::planner {
namespace {

// Without a budget: many small calls would cost more than they hide.
constexpr std::int64_t kSmallestBucketBytes = std::int64_t{4} << 20;
// With one: buckets and what belongs to them take less than half of it, whatever the types are.
constexpr std::int64_t kBucketsPerBudget = 16;
constexpr std::int64_t kTiniestBucketBytes = std::int64_t{64} << 10;
constexpr std::int64_t kKeptGradientsPerBudget = 16;

// Of one micro-batch's gradient.
DType reduced_dtype(const CutModel& cut) {
  return cut.options.sends_gradients() ? cut.options.wire_dtype : cut.model.dtype;
}

grad::ReplicaSums replica_sums(const CutModel& cut, std::int64_t num_micro_batches) {
  return {cut.options.num_copies, static_cast<int>(num_micro_batches)};
}

// Of as many calls as there are slots.
std::int64_t two_encoded(std::int64_t numel, int num_ranks, const MemoryPlanOptions& options) {
  return region_bytes(2 * as_int(comm::encoded_reduce_scatter_staging_bytes(
                              quant::wire_bytes(*options.gradient_blocks, numel), num_ranks)));
}

// Of one hop, or of two.
struct HopStaging {
  std::int64_t first = 0;
  std::int64_t across = 0;
};

HopStaging two_reductions(std::int64_t shard_numel, const MemoryPlanOptions& options) {
  const int hosts = options.num_reduction_hosts;
  if (shard_numel == 0 || hosts == 1) {
    return {region_bytes(2 * reduction_staging(shard_numel, options)), 0};
  }
  return {two_encoded(shard_numel * hosts, options.num_ranks / hosts, options),
          two_encoded(shard_numel, hosts, options)};
}

std::int64_t replica_sum_staging(std::int64_t shard_numel, bool has_totals,
                                 const MemoryPlanOptions& options) {
  const DType dtype = has_totals ? DType::kFloat32 : options.wire_dtype;
  return as_int(
      comm::all_reduce_staging_bytes(shard_numel, dtype, options.num_copies, options.call_memory));
}

// Which parameters were used (grad/used_params.h): a bit of each, of two backwards.
std::int64_t words_staging(const CutModel& cut) {
  const MemoryPlanOptions& options = cut.options;
  const std::size_t bytes = (cut.num_params() + 7) / 8;
  return options.num_reduction_hosts == 1 && options.num_copies == 1
             ? 0
             : region_bytes(2 * as_int(comm::all_gather_staging_bytes(
                                    {&bytes, 1}, static_cast<std::size_t>(options.pack_below_bytes),
                                    options.num_ranks * options.num_copies, options.call_memory)));
}

GroupStaging reductions_staging(const BucketNumel& numel, const CutModel& cut,
                                const grad::ReplicaSums& replicas) {
  const MemoryPlanOptions& options = cut.options;
  GroupStaging staging;
  staging.all_reductions = words_staging(cut);
  const HopStaging fixed = two_reductions(numel.static_numel, options);
  staging.reductions = fixed.first;
  staging.reductions_across = fixed.across;
  if (has_agreed_groups(options)) {
    const HopStaging dynamic = two_reductions(numel.dynamic_numel, options);
    staging.agreed = dynamic.first;
    staging.agreed_across = dynamic.across;
  }
  staging.replicas = region_bytes(
      2 *
      std::max(replica_sum_staging(numel.static_numel, replicas.has_totals(), options),
               replica_sum_staging(numel.dynamic_numel, replicas.has_dynamic_totals(), options)));
  return staging;
}

// The ledger's name for memory that holds parameters or states. On a CPU it is what was asked for:
// "host" is charged to the host.
Tier charged_tier(const MemoryPlanOptions& options, Tier tier, std::optional<Tier> wish,
                  bool is_pinned) {
  if (tier == Tier::kHost) {
    return is_pinned ? Tier::kPinned : Tier::kHost;
  }
  const bool is_host =
      !options.is_discrete && tier == Tier::kDevice && wish.has_value() && *wish != Tier::kDevice;
  return is_host ? Tier::kHost : tier;
}

}  // namespace

CutModel::CutModel(const ModelShapes& shapes, const MemoryPlanOptions& given)
    : model(shapes), options(given) {
  layouts.reserve(shapes.params.size());
  for (const ParamShape& param : shapes.params) {
    const shard::StoredFormat format = param.format.value_or(
        given.stored.format_of(param.name, param.trainable, param.numel, param.num_dims));
    layouts.emplace_back(param.numel, given.num_ranks, shapes.dtype, format);
  }
  for (const std::vector<int>& unit : shapes.units) {
    for (const int id : unit) {
      TESSERA_INVARIANT(id >= 0 && static_cast<std::size_t>(id) < layouts.size(),
                        "a unit names parameter ", id, "; there are ", layouts.size());
    }
  }
}

std::int64_t CutModel::states_bytes(std::size_t id) const {
  return num_state_tensors() * block_bytes(4 * layouts[id].shard_numel());
}

std::int64_t CutModel::full_gradient_bytes(std::size_t id) const {
  return is_trainable(id) ? layouts[id].numel() * as_int(bytes_of(model.dtype)) : 0;
}

std::int64_t taken_bytes(std::int64_t bytes) {
  return as_int(grad::taken_bytes(static_cast<std::size_t>(bytes)));
}

std::int64_t region_bytes(std::int64_t bytes) {
  return rounded_up(bytes, as_int(device::page_bytes()));
}

std::int64_t block_bytes(std::int64_t bytes) {
  return as_int(tier::whole_blocks(static_cast<std::size_t>(bytes)));
}

std::int64_t whole_pages_below(std::int64_t bytes) {
  const auto step = as_int(std::max(device::page_bytes(), tier::kBlockBytes));
  return bytes / step * step;
}

std::int64_t checksum_bytes(const MemoryPlanOptions& options, std::int64_t nvme_bytes) {
  return options.verify ? nvme_bytes / as_int(tier::kBlockBytes) * as_int(sizeof(std::uint64_t))
                        : 0;
}

std::int64_t charged_bytes(const MemoryPlanOptions& options, Tier tier, std::int64_t bytes) {
  switch (tier) {
    case Tier::kNvme:
      return block_bytes(bytes);
    case Tier::kPinned:
      return rounded_up(bytes, as_int(device::page_bytes()));
    case Tier::kHost:
      return taken_bytes(bytes);
    case Tier::kDevice:
      break;
  }
  return options.is_discrete ? bytes : taken_bytes(bytes);
}

Tier io_tier(const MemoryPlanOptions& options) {
  return options.is_discrete ? Tier::kPinned : Tier::kHost;
}

std::int64_t pool_bytes(const MemoryPlanOptions& options, std::int64_t bytes) {
  return charged_bytes(options, io_tier(options), block_bytes(bytes));
}

std::int64_t feed_pool_bytes(const MemoryPlanOptions& options, std::int64_t bytes) {
  if (bytes == 0) {
    return 0;
  }
  const coordinator::LoaderSizes sizes = coordinator::loader_sizes(static_cast<std::size_t>(bytes));
  return pool_bytes(options, as_int(2 * sizes.tile_bytes)) +
         pool_bytes(options, as_int(sizes.window_bytes));
}

bool uses_nvme(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& each) { return each.uses_nvme(); });
}

optim::SubGroupPlan sub_groups(const CutModel& cut, const Placements& placements,
                               std::int64_t sub_group_numel) {
  std::vector<optim::SubGroupParam> params;
  params.reserve(cut.num_params());
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    optim::SubGroupParam param;
    param.shard_numel = cut.layouts[i].shard_numel();
    param.dtype = cut.model.dtype;
    param.trainable = cut.is_trainable(i) && placements[i].updater == Updater::kCpu;
    param.placement = placements[i];
    params.push_back(param);
  }
  return optim::plan_sub_groups(params, sub_group_numel, cut.options.num_states);
}

std::int64_t choose_bucket_bytes(const CutModel& cut) {
  const MemoryPlanOptions& options = cut.options;
  if (options.is_bucket_given) {
    return options.bucket_bytes;
  }
  const std::int64_t budget = options.memory_bytes();
  if (budget != kUnlimited) {
    return std::min(options.bucket_bytes, std::clamp(budget / kBucketsPerBudget,
                                                     kTiniestBucketBytes, kSmallestBucketBytes));
  }
  std::int64_t trainable_bytes = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    trainable_bytes += cut.is_trainable(i) ? as_int(cut.layouts[i].full_bytes()) : 0;
  }
  return std::min(options.bucket_bytes, std::max(trainable_bytes / 4, kSmallestBucketBytes));
}

std::vector<std::int64_t> possible_bucket_bytes(const CutModel& cut) {
  const MemoryPlanOptions& options = cut.options;
  if (options.is_bucket_given || options.memory_bytes() == kUnlimited) {
    return {choose_bucket_bytes(cut)};
  }
  std::vector<std::int64_t> possible;
  for (std::int64_t bytes = kSmallestBucketBytes; bytes >= kTiniestBucketBytes; bytes /= 2) {
    possible.push_back(std::min(bytes, options.bucket_bytes));
  }
  return possible;
}

BucketNumel most_bucket_numel(const CutModel& cut, std::int64_t bucket_bytes) {
  BucketNumel all;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    if (cut.is_trainable(i)) {
      (cut.model.params[i].dynamic ? all.dynamic_numel : all.static_numel) +=
          rounded_up(cut.layouts[i].shard_numel(), cut.options.reductions(0).block_numel());
    }
  }
  const std::int64_t wire = as_int(bytes_of(cut.options.wire_dtype));
  // A gradient on NVMe is cut at steps, however small buckets are.
  const std::int64_t capacity =
      std::max(grad::kPieceStep, bucket_bytes / (wire * cut.options.num_ranks));
  return {std::min(capacity, all.static_numel), std::min(capacity, all.dynamic_numel)};
}

std::int64_t most_reduction_bytes(const CutModel& cut, std::int64_t bucket_bytes,
                                  std::int64_t num_micro_batches) {
  if (!cut.options.sends_gradients()) {
    return 0;
  }
  const BucketNumel most = most_bucket_numel(cut, bucket_bytes);
  const DType wire = cut.options.wire_dtype;
  const grad::ReplicaSums replicas = replica_sums(cut, num_micro_batches);
  const grad::ReducerOptions reductions = cut.options.reductions(bucket_bytes);
  const auto slots = [&](std::int64_t numel, bool has_totals) {
    return 2 * (taken_bytes(as_int(
                    grad::bucket_buffer_bytes(numel, cut.options.num_ranks, wire, has_totals))) +
                taken_bytes(as_int(grad::partial_bytes(numel, reductions))) +
                taken_bytes(numel * as_int(bytes_of(wire))));
  };
  return reductions_staging(most, cut, replicas).total() +
         taken_bytes(as_int(grad::quant_scratch_bytes(
             std::max(most.static_numel, most.dynamic_numel), reductions))) +
         (reductions.blocks ? charged_bytes(cut.options, Tier::kPinned,
                                            as_int(grad::quant_sums_bytes(cut.num_params())))
                            : 0) +
         slots(most.static_numel, replicas.has_totals()) +
         slots(most.dynamic_numel, replicas.has_dynamic_totals());
}

GradientCost gradient_cost(const CutModel& cut, const Placements& placements,
                           std::int64_t bucket_bytes, std::int64_t num_micro_batches) {
  const int num_ranks = cut.options.num_ranks;
  std::vector<grad::GradientShape> shapes;
  std::vector<grad::BucketParam> params;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    const ParamShape& param = cut.model.params[i];
    const Tier home = placements[i].gradient;
    shapes.push_back({param.numel, param.trainable, param.dynamic, home});
    if (param.trainable) {
      params.push_back({static_cast<int>(i), cut.layouts[i].shard_numel(), param.dynamic, home});
    }
  }
  const grad::ReducerOptions reductions = cut.options.reductions(bucket_bytes);
  GradientCost cost;
  cost.bytes = grad::gradient_bytes(shapes, num_ranks, reductions, cut.model.dtype,
                                    replica_sums(cut, num_micro_batches));
  if (cut.options.sends_gradients()) {
    const std::size_t wire = bytes_of(cut.options.wire_dtype);
    const grad::BucketSizes sizes =
        grad::bucket_sizes(params, num_ranks, bucket_bytes, wire, reductions.block_numel());
    cost.staging = reductions_staging({sizes.largest_shard_numel, sizes.largest_dynamic_numel}, cut,
                                      replica_sums(cut, num_micro_batches));
  }
  if (cut.options.is_discrete) {
    cost.bytes.shards = 0;
  }
  return cost;
}

bool has_agreed_groups(const MemoryPlanOptions& options) {
  return options.num_reduction_hosts > 1 || options.num_gather_hosts > 1;
}

std::int64_t reduction_staging(std::int64_t shard_numel, const MemoryPlanOptions& options) {
  if (shard_numel == 0 || options.num_ranks == 1) {
    return 0;
  }
  return as_int(
      options.gradient_blocks
          ? comm::encoded_reduce_scatter_staging_bytes(
                quant::wire_bytes(*options.gradient_blocks, shard_numel), options.num_ranks)
          : comm::reduce_scatter_staging_bytes(shard_numel, options.wire_dtype, options.num_ranks,
                                               options.call_memory));
}

std::int64_t most_kept_gradients(const CutModel& cut) {
  std::int64_t largest = 0;
  std::int64_t all = 0;
  for (std::size_t i = 0; i < cut.num_params(); ++i) {
    const std::int64_t bytes = cut.full_gradient_bytes(i);
    largest = std::max(largest, bytes);
    all += bytes;
  }
  const std::int64_t wanted =
      std::min(grad::kMostKeptBytes, cut.options.device_bytes / kKeptGradientsPerBudget);
  return std::min(all, std::max(wanted, largest));
}

std::vector<LedgerLine> Lines::take() const {
  std::vector<LedgerLine> lines;
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    for (std::size_t role = 0; role < kNumRoles; ++role) {
      if (bytes_[tier][role] > 0) {
        lines.push_back({static_cast<Tier>(tier), static_cast<Role>(role), bytes_[tier][role]});
      }
    }
  }
  return lines;
}

// What is summed over replicas from where it is, is one sum in fp32.
bool has_total(const CutModel& cut, std::int64_t num_micro_batches, const ParamShape& param) {
  const grad::ReplicaSums replicas = replica_sums(cut, num_micro_batches);
  return cut.options.is_discrete && param.trainable &&
         (param.dynamic ? replicas.has_dynamic_totals() : replicas.has_totals());
}

// Lists name it as often as ranks use it: what is on the device, and on the host, is one sum in
// fp32.
bool is_summed_by_lists(const CutModel& cut, const ParamShape& param) {
  return cut.options.is_discrete && param.trainable && param.dynamic &&
         cut.options.sends_gradients();
}

bool is_host_sum(const CutModel& cut, std::int64_t num_micro_batches, const ParamShape& param) {
  return has_total(cut, num_micro_batches, param) || is_summed_by_lists(cut, param);
}

bool needs_totals(const CutModel& cut, std::int64_t num_micro_batches) {
  return std::any_of(
      cut.model.params.begin(), cut.model.params.end(),
      [&](const ParamShape& param) { return has_total(cut, num_micro_batches, param); });
}

int host_gradient_buffers(const CutModel& cut, std::int64_t num_micro_batches, HostGradients kind) {
  const DType dtype = reduced_dtype(cut);
  return kind == HostGradients::kGood ? grad::good_host_buffers(dtype, num_micro_batches)
                                      : grad::least_host_buffers(dtype, num_micro_batches);
}

std::int64_t secondary_shard_bytes(const CutModel& cut, std::size_t id) {
  const MemoryPlanOptions& options = cut.options;
  const bool has_one = options.num_secondary_ranks > 1 && !cut.model.params[id].dynamic;
  return has_one ? as_int(piece_of(cut, id).wire_bytes) *
                       (options.num_ranks / options.num_secondary_ranks)
                 : 0;
}

comm::GatherPiece piece_of(const CutModel& cut, std::size_t id) {
  const std::int64_t encoded = encoded_shard_bytes(cut, id);
  return encoded > 0
             ? comm::GatherPiece{static_cast<std::size_t>(encoded), true}
             : comm::GatherPiece{cut.layouts[id].shard_bytes(), cut.layouts[id].is_encoded()};
}

MemoryCost::MemoryCost(const CutModel& cut, std::int64_t num_micro_batches,
                       HostGradients host_gradients)
    : cut_(cut),
      options_(cut.options),
      num_micro_batches_(num_micro_batches),
      host_gradients_(host_gradients) {}

std::int64_t MemoryCost::reduced_bytes_per_element() const {
  return as_int(bytes_of(reduced_dtype(cut_)));
}

std::int64_t MemoryCost::device_gradient_bytes_per_element(std::size_t id) const {
  return num_micro_batches_ == 1 && !is_summed_by_lists(cut_, cut_.model.params[id])
             ? reduced_bytes_per_element()
             : as_int(sizeof(float));
}

std::int64_t MemoryCost::host_gradient_bytes(std::size_t id) const {
  const auto charged = [&](std::int64_t element_bytes) {
    return charged_bytes(options_, Tier::kPinned, cut_.layouts[id].shard_numel() * element_bytes);
  };
  return is_host_sum(cut_, num_micro_batches_, cut_.model.params[id])
             ? charged(as_int(sizeof(float))) + charged(reduced_bytes_per_element())
             : host_gradient_buffers(cut_, num_micro_batches_, host_gradients_) *
                   charged(reduced_bytes_per_element());
}

std::int64_t MemoryCost::host_gradient_bytes_read(std::size_t id) const {
  return is_host_sum(cut_, num_micro_batches_, cut_.model.params[id])
             ? as_int(sizeof(float))
             : grad::host_addends_bytes(reduced_dtype(cut_), num_micro_batches_);
}

std::int64_t MemoryCost::slot_gradient_bytes() const {
  return num_micro_batches_ == 1 && !needs_totals(cut_, num_micro_batches_)
             ? 0
             : as_int(sizeof(float)) + 2 * reduced_bytes_per_element();
}

std::int64_t MemoryCost::kept_gradients(const Placements& placements) const {
  if (!options_.is_discrete) {
    return 0;
  }
  const bool adopts = !options_.sends_gradients() && num_micro_batches_ == 1;
  std::int64_t read = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const bool is_adopted = adopts && placements[i].gradient == Tier::kDevice;
    read += is_adopted ? 0 : cut_.full_gradient_bytes(i);
  }
  return std::min(read, most_kept_gradients(cut_));
}

bool MemoryCost::updates_in_place() const {
  return options_.is_discrete && num_micro_batches_ == 1 &&
         !needs_totals(cut_, num_micro_batches_) && !optim::is_own_master(cut_.model.dtype) &&
         (!options_.sends_gradients() || options_.wire_dtype == cut_.model.dtype);
}

bool MemoryCost::stays_on_device_once(std::size_t id, const Placement& placement) const {
  return placement.parameter == Tier::kHost && placement.updater == Updater::kDevice &&
         cut_.is_trainable(id) && !is_summed_by_lists(cut_, cut_.model.params[id]) &&
         updates_in_place();
}

Lines MemoryCost::shard_lines(const Placements& placements, const GradientCost& gradients) const {
  // Beside NVMe, and beside a device that streams them, states in memory have the layout of NVMe.
  const bool has_blocks = options_.is_discrete || uses_nvme(placements);
  Lines lines;
  const auto charge = [&](Tier tier, Role role, std::int64_t bytes) {
    lines.add(tier, role, charged_bytes(options_, tier, bytes));
  };
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const shard::Layout& layout = cut_.layouts[i];
    const Placement& each = placements[i];
    const std::int64_t shard_bytes = as_int(layout.shard_bytes());
    charge(charged_tier(options_, each.parameter, options_.parameters, true), Role::kShard,
           shard_bytes);
    charge(charged_tier(options_, each.secondary, std::nullopt, true), Role::kShard,
           secondary_shard_bytes(cut_, i));
    charge(Tier::kDevice, Role::kShard, encoded_shard_bytes(cut_, i));
    if (!cut_.is_trainable(i)) {
      continue;
    }
    const bool on_device = each.updater == Updater::kDevice;
    if (each.gradient == Tier::kNvme) {
      charge(Tier::kNvme, Role::kGradient, 4 * layout.shard_numel());
    }
    if (options_.is_discrete && each.gradient == Tier::kDevice) {
      // What one rank adopts has no padding.
      charge(Tier::kDevice, Role::kGradient,
             (options_.sends_gradients() ? layout.shard_numel() : layout.numel()) *
                 device_gradient_bytes_per_element(i));
    } else if (options_.is_discrete && each.gradient == Tier::kHost) {
      lines.add(Tier::kPinned, Role::kGradient, host_gradient_bytes(i));
    }
    if (options_.is_discrete && !on_device && each.parameter == Tier::kDevice) {
      charge(Tier::kPinned, Role::kStaging, shard_bytes);  // new values, before their copy H2D
    }
    // A wish for NVMe leaves no states in memory.
    const std::optional<Tier> wish =
        options_.optimizer == Tier::kHost ? options_.optimizer : std::nullopt;
    charge(charged_tier(options_, each.states, wish, on_device), Role::kOptimizer,
           has_blocks ? cut_.states_bytes(i) : cut_.num_state_tensors() * 4 * layout.shard_numel());
  }
  charge(Tier::kDevice, Role::kOther, encoding_sums_bytes(cut_));
  charge(Tier::kPinned, Role::kOther, encoding_sums_bytes(cut_));
  lines.add(Tier::kDevice, Role::kGradient,
            gradients.bytes.shards + gradients.bytes.slots + gradients.bytes.quant_error);
  lines.add(Tier::kHost, Role::kGradient, gradients.bytes.block_sums);
  lines.add(Tier::kPinned, Role::kOther, gradients.bytes.quant_sums);
  return lines;
}

std::int64_t encoded_shard_bytes(const CutModel& cut, std::size_t id) {
  const MemoryPlanOptions& options = cut.options;
  return options.weight_bits > 0 && options.num_ranks > 1 && !cut.layouts[id].is_encoded()
             ? as_int(quant::wire_bytes({options.weight_bits, options.block_numel},
                                        cut.layouts[id].shard_numel()))
             : 0;
}

std::int64_t encoding_sums_bytes(const CutModel& cut) {
  constexpr std::int64_t kSums = 2 * sizeof(double);
  return cut.options.weight_bits > 0 && cut.options.num_ranks > 1 ? kSums * as_int(cut.num_params())
                                                                  : 0;
}

std::int64_t encoding_bytes(const CutModel& cut) {
  const std::int64_t sums = encoding_sums_bytes(cut);
  std::int64_t bytes =
      charged_bytes(cut.options, Tier::kDevice, sums) +
      (cut.options.is_discrete ? 0 : charged_bytes(cut.options, Tier::kPinned, sums));
  for (std::size_t id = 0; id < cut.num_params(); ++id) {
    bytes += charged_bytes(cut.options, Tier::kDevice, encoded_shard_bytes(cut, id));
  }
  return bytes;
}

std::int64_t secondary_bytes(const CutModel& cut, const Placements& placements, Tier tier) {
  const Tier charged = tier == Tier::kHost ? Tier::kPinned : tier;
  std::int64_t bytes = 0;
  for (std::size_t id = 0; id < placements.size(); ++id) {
    bytes += placements[id].secondary == tier
                 ? charged_bytes(cut.options, charged, secondary_shard_bytes(cut, id))
                 : 0;
  }
  return bytes;
}

AccumulationNumel MemoryCost::accumulation(const Placements& placements) const {
  AccumulationNumel numel;
  for (std::size_t i = 0; options_.is_discrete && i < placements.size(); ++i) {
    if (!cut_.is_trainable(i)) {
      continue;
    }
    const std::int64_t shard_numel = cut_.layouts[i].shard_numel();
    switch (placements[i].gradient) {
      case Tier::kHost:
        (is_host_sum(cut_, num_micro_batches_, cut_.model.params[i]) ? numel.host_sums
                                                                     : numel.host_copies) +=
            shard_numel;
        break;
      case Tier::kNvme:
        numel.nvme_sums += shard_numel;
        break;
      default:
        numel.device_sums +=
            num_micro_batches_ > 1 || is_summed_by_lists(cut_, cut_.model.params[i]) ? shard_numel
                                                                                     : 0;
    }
  }
  return numel;
}

void MemoryCost::complete(MemoryPlan& plan) const {
  const GradientCost gradients =
      gradient_cost(cut_, plan.params, plan.bucket_bytes, num_micro_batches_);
  plan.uses_nvme = uses_nvme(plan.params);
  plan.adopts_gradients =
      options_.is_discrete && !options_.sends_gradients() && num_micro_batches_ == 1;
  plan.updates_in_place = updates_in_place();
  plan.slot_gradient_bytes = plan.num_update_slots > 0 ? slot_gradient_bytes() : 0;
  plan.accumulation = accumulation(plan.params);
  const bool has_copies = plan.accumulation.host_copies > 0;
  plan.num_gradient_copies =
      has_copies ? host_gradient_buffers(cut_, num_micro_batches_, host_gradients_) : 0;
  plan.adds_gradients_on_host =
      has_copies &&
      num_micro_batches_ > grad::least_host_buffers(reduced_dtype(cut_), num_micro_batches_);
  Lines lines = shard_lines(plan.params, gradients);
  lines.add(Tier::kDevice, Role::kFull, charged_bytes(options_, Tier::kDevice, plan.arena_bytes));
  lines.add(Tier::kDevice, Role::kStaging, plan.num_update_slots * plan.update_slot_bytes);
  lines.add(io_tier(options_), Role::kStaging,
            pool_bytes(options_, plan.gradient_pool_bytes) +
                pool_bytes(options_, plan.optimizer_pool_bytes) +
                feed_pool_bytes(options_, plan.parameter_pool_bytes));
  lines.add(Tier::kHost, Role::kOther, checksum_bytes(options_, lines.bytes(Tier::kNvme)));
  plan.ledger = lines.take();
  plan.secondary_device_bytes = secondary_bytes(cut_, plan.params, Tier::kDevice);
  plan.secondary_host_bytes = secondary_bytes(cut_, plan.params, Tier::kHost);
  plan.encoded_bytes = 0;
  for (std::size_t i = 0; i < cut_.num_params(); ++i) {
    plan.encoded_bytes += charged_bytes(options_, Tier::kDevice, encoded_shard_bytes(cut_, i));
  }
  plan.staging = gradients.staging;
  GatherCost(cut_, plan.bucket_bytes).add_staging(plan.arena_bytes, plan.staging);
  plan.comm_bytes = plan.staging.total();
  plan.chunk_bytes = options_.chunk_bytes();
  plan.chunk_tier = options_.group_memory.tier;
  plan.kept_gradient_bytes = kept_gradients(plan.params);
  plan.full_gradient_bytes = 0;
  for (std::size_t i = 0; i < cut_.num_params(); ++i) {
    plan.full_gradient_bytes = std::max(plan.full_gradient_bytes, cut_.full_gradient_bytes(i));
  }
  plan.full_gradient_bytes += plan.kept_gradient_bytes;
  count_step(plan);
}

void MemoryCost::count_step(MemoryPlan& plan) const {
  const optim::SubGroupPlan groups = sub_groups(cut_, plan.params, plan.sub_group_numel);
  StepBytes& step = plan.step;
  step = {};
  plan.link = {};
  plan.update = {};
  step.states_read = as_int(groups.states_read_bytes + groups.parameters_read_bytes);
  step.states_written = as_int(groups.states_written_bytes);
  (cut_.model.dtype == DType::kFloat32 ? step.states_written : step.parameters_written) +=
      as_int(groups.parameters_written_bytes);
  // Every unit that needs a parameter brings it in forward and in backward, unless all stay.
  const bool holds_all =
      options_.is_discrete && plan.live_limit_bytes >= gathered_bytes(cut_, plan.params);
  const std::int64_t num_uses = holds_all ? 1 : 2 * num_micro_batches_;
  std::vector<std::int64_t> num_units(cut_.num_params(), holds_all ? 1 : 0);
  for (const std::vector<int>& unit : cut_.model.units) {
    for (const int id : unit) {
      num_units[static_cast<std::size_t>(id)] += holds_all ? 0 : 1;
    }
  }
  // Shards that fit into the window of the loader (coordinator/shard_loader.h) go there from the
  // update: in time, where the disk is what the update waits for.
  const auto window = as_int(
      coordinator::loader_sizes(static_cast<std::size_t>(plan.parameter_pool_bytes)).window_bytes);
  for (std::size_t i = 0; i < cut_.num_params(); ++i) {
    const shard::Layout& layout = cut_.layouts[i];
    const Placement& each = plan.params[i];
    const std::int64_t bytes = block_bytes(as_int(layout.shard_bytes()));
    const std::int64_t num_gathers = num_units[i] * num_uses;
    const std::int64_t secondary = secondary_shard_bytes(cut_, i);
    // Behind the first, gathers come from secondary shards, or from what was encoded for it.
    const bool loads_once = secondary > 0 || encoded_shard_bytes(cut_, i) > 0;
    const std::int64_t num_loads =
        loads_once ? std::min<std::int64_t>(num_gathers, 1) : num_gathers;
    if (each.secondary == Tier::kHost && num_loads > 0) {
      plan.link.d2h += secondary;
      plan.link.h2d += (num_gathers - num_loads) * secondary;
    }
    if (each.parameter == Tier::kNvme) {
      step.parameters_read += num_loads * bytes;
      step.parameters_from_update += cut_.is_trainable(i) && bytes <= window ? bytes : 0;
      const bool from_device = cut_.is_trainable(i) && each.updater == Updater::kDevice;
      step.parameters_written += from_device ? bytes : 0;
    }
    if (each.gradient == Tier::kNvme) {
      const std::int64_t gradient_bytes = block_bytes(4 * layout.shard_numel());
      step.gradients_written += gradient_bytes * num_micro_batches_;
      step.gradients_read += gradient_bytes * num_micro_batches_;  // by additions and the update
    }
    if (options_.is_discrete && each.parameter != Tier::kDevice) {
      const std::int64_t num_copied = stays_on_device_once(i, each) ? num_units[i] : 0;
      plan.link.h2d +=
          std::max<std::int64_t>(num_loads - num_copied, 0) * as_int(layout.shard_bytes());
    }
    if (options_.is_discrete && cut_.is_trainable(i)) {
      count_update(i, each, plan);
    }
  }
}

void MemoryCost::count_update(std::size_t id, const Placement& placement, MemoryPlan& plan) const {
  const shard::Layout& layout = cut_.layouts[id];
  const std::int64_t numel = layout.shard_numel();
  const std::int64_t shard_bytes = as_int(layout.shard_bytes());
  const bool is_elsewhere = placement.parameter != Tier::kDevice;
  const std::int64_t gradient_numel = options_.sends_gradients() ? numel : layout.numel();
  const std::int64_t copies_bytes = gradient_numel * reduced_bytes_per_element();
  const bool is_summed_over_replicas =
      options_.num_copies > 1 && has_total(cut_, num_micro_batches_, cut_.model.params[id]);
  if (placement.gradient != Tier::kDevice && is_summed_over_replicas) {
    // To the device and back; a micro-batch that is alone goes as it came. Where the last one is
    // known, what was put before it is loaded and added to it there.
    plan.link.h2d +=
        numel * (num_micro_batches_ == 1 ? reduced_bytes_per_element() : as_int(sizeof(float)));
    plan.link.d2h += numel * as_int(sizeof(float));
    plan.link.d2h += copies_bytes * (num_micro_batches_ - (cut_.model.params[id].dynamic ? 0 : 1));
  } else if (placement.gradient != Tier::kDevice) {
    plan.link.d2h += copies_bytes * num_micro_batches_;
  }
  if (placement.updater == Updater::kCpu) {
    plan.update.cpu += numel;
    plan.link.h2d += is_elsewhere ? 0 : shard_bytes;
    return;
  }
  plan.link.d2h += is_elsewhere ? shard_bytes : 0;
  if (placement.states != Tier::kHost) {
    plan.update.resident += numel;
    return;
  }
  plan.update.streamed += numel;
  const std::int64_t states_bytes =
      4 * cut_.num_state_tensors() * rounded_up(numel, optim::kStreamedStep);
  const bool brings_master = optim::is_own_master(layout.dtype()) && is_elsewhere;
  plan.link.h2d +=
      states_bytes + (brings_master ? shard_bytes : 0) +
      (placement.gradient == Tier::kHost ? gradient_numel * host_gradient_bytes_read(id) : 0);
  plan.link.d2h += states_bytes;
}

}  // namespace tessera::planner
