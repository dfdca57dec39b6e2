#include "tessera/planner/mesh_choice.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/grad/bucket.h"
#include "tessera/grad/reducer.h"
#include "tessera/planner/memory_cost.h"
#include "tessera/planner/memory_planner.h"
#include "tessera/quant/block_codec.h"

namespace tessera::planner {
namespace {

// Everything in the memory of the device.
MemoryPlanOptions resident(const MemoryPlanOptions& given, const comm::Mesh& mesh,
                           const TrafficModes& modes) {
  MemoryPlanOptions options = given;
  options.num_ranks = mesh.shard_size();
  options.num_copies = mesh.num_replicas();
  options.num_secondary_ranks = modes.secondary_size;
  options.weight_bits = modes.weight_bits;
  options.block_numel = modes.block_numel;
  options.gradient_blocks.reset();
  options.num_reduction_hosts = 1;
  options.num_gather_hosts = mesh.hierarchical() ? mesh.hosts_per_group() : 1;
  if (modes.encodes_gradients()) {
    options.gradient_blocks = {modes.gradient_bits_across, modes.block_numel};
    options.num_reduction_hosts = mesh.inside_size() > 1 ? mesh.hosts_per_group() : 1;
  }
  const bool is_shared = options.call_memory == comm::CallMemory::kShared;
  if (mesh.shard_size() == 1 || (mesh.hosts_per_group() > 1 && is_shared)) {
    options.call_memory = comm::CallMemory::kReached;
    options.group_memory = {};
  }
  options.has_nvme = false;
  options.device_bytes = kUnlimited;
  options.host_bytes = kUnlimited;
  options.is_device_given = false;
  options.is_host_given = false;
  options.parameters.reset();
  options.optimizer.reset();
  return options;
}

double over(std::int64_t bytes, double rate) {
  return bytes == 0 ? 0 : static_cast<double>(bytes) / rate;
}

comm::EncodedBytes encoder(int bits, std::int64_t block_numel) {
  return [=](std::int64_t numel) { return as_int(quant::wire_bytes({bits, block_numel}, numel)); };
}

// The gathers of a step, which is not the first.
void count_gathers(const CutModel& cut, const comm::Mesh& mesh, const TrafficModes& modes,
                   std::span<const std::int64_t> num_gathers, comm::StepVolume& volume,
                   MeshChoice& choice) {
  volume.secondary_size = modes.secondary_size;
  for (std::size_t id = 0; id < cut.num_params(); ++id) {
    const shard::Layout& layout = cut.layouts[id];
    const std::int64_t secondary = secondary_shard_bytes(cut, id);
    // Behind an update the first comes from shards; what is frozen was gathered in the first step.
    const std::int64_t num_first = cut.is_trainable(id) ? 1 : 0;
    const std::int64_t num_whole =
        secondary > 0 ? std::min(num_gathers[id], num_first) : num_gathers[id];
    const std::int64_t encoded = encoded_shard_bytes(cut, id);
    const std::int64_t shard_bytes = encoded > 0 ? encoded : as_int(layout.shard_bytes());
    choice.encoded_bytes += encoded;
    volume.gathered_bytes += num_whole * shard_bytes * mesh.shard_size();
    volume.secondary_bytes += (num_gathers[id] - num_whole) * secondary * modes.secondary_size;
    choice.secondary_bytes += secondary;
  }
}

}  // namespace

TrafficModes TrafficModes::from(const Config& config, const comm::Mesh& mesh) {
  TrafficModes modes;
  modes.secondary_size = comm::secondary_size(config, mesh);
  modes.weight_bits = config.get_bool("quant.weights") ? 8 : 0;
  modes.gradient_bits_inside = config.get_bool("quant.gradients")
                                   ? static_cast<int>(config.get_int("quant.gradient_bits"))
                                   : 0;
  modes.gradient_bits_across = modes.gradient_bits_inside;
  modes.block_numel = config.get_int("quant.block_numel");
  return modes;
}

MeshChoice mesh_choice(const comm::Mesh& mesh, const TrafficModes& modes, const ModelShapes& model,
                       const MemoryPlanOptions& options, const MeshQuestion& question) {
  TESSERA_INVARIANT(question.num_gathers.size() == model.params.size(), "gathers of ",
                    question.num_gathers.size(), " parameters, not ", model.params.size());
  const MemoryPlanOptions cut_options = resident(options, mesh, modes);
  const CutModel cut(model, cut_options);
  const MemoryPlan plan = plan_memory(model, cut_options, question.num_micro_batches);

  MeshChoice choice;
  choice.mesh = mesh;
  choice.modes = modes;
  comm::StepVolume volume;
  count_gathers(cut, mesh, modes, question.num_gathers, volume, choice);
  std::vector<grad::BucketParam> params;
  for (std::size_t id = 0; id < cut.num_params(); ++id) {
    if (cut.is_trainable(id)) {
      params.push_back({static_cast<int>(id), cut.layouts[id].shard_numel(),
                        model.params[id].dynamic, Tier::kDevice});
    }
  }
  const std::size_t wire_bytes = bytes_of(options.wire_dtype);
  const grad::BucketLayout buckets =
      grad::plan_buckets(params, mesh.shard_size(), plan.bucket_bytes, wire_bytes,
                         cut_options.reductions(plan.bucket_bytes).block_numel());
  std::vector<std::int64_t> bucket_numel;
  bucket_numel.reserve(buckets.buckets.size());
  for (const grad::Bucket& bucket : buckets.buckets) {
    bucket_numel.push_back(bucket.shard_numel * mesh.shard_size());
  }
  volume.bucket_numel = bucket_numel;
  volume.num_micro_batches = question.num_micro_batches;
  volume.wire_element_bytes = as_int(wire_bytes);
  if (modes.encodes_gradients()) {
    volume.hop_inside = encoder(modes.gradient_bits_inside, modes.block_numel);
    volume.hop_across = encoder(modes.gradient_bits_across, modes.block_numel);
  }
  choice.memory_bytes = options.is_discrete ? plan.device_memory_bytes() : plan.memory_bytes();
  choice.fits =
      choice.memory_bytes <= (options.is_discrete ? options.device_bytes : options.memory_bytes());
  choice.bytes = comm::step_bytes(mesh, volume);
  return choice;
}

std::vector<MeshChoice> mesh_choices(const ModelShapes& model, const MemoryPlanOptions& options,
                                     const MeshQuestion& question) {
  std::vector<MeshChoice> choices;
  const auto add = [&](const comm::Mesh& mesh, TrafficModes modes) {
    modes.block_numel = question.block_numel;
    choices.push_back(mesh_choice(mesh, modes, model, options, question));
  };
  comm::MeshOptions world = question.world;
  world.hierarchical = false;
  std::vector<comm::Mesh> meshes;
  for (const int size : comm::possible_shard_sizes(world)) {
    world.shard_size = size;
    world.hierarchical = false;
    meshes.push_back(comm::plan_mesh(world));
    if (meshes.back().hosts_per_group() > 1 && meshes.back().inside_size() > 1) {
      world.hierarchical = true;
      meshes.push_back(comm::plan_mesh(world));
    }
  }
  const auto secondary_sizes = [](const comm::Mesh& mesh) {
    return mesh.hosts_per_group() > 1 ? comm::possible_secondary_sizes(mesh) : std::vector<int>();
  };
  for (const comm::Mesh& mesh : meshes) {
    add(mesh, {});
  }
  for (const comm::Mesh& mesh : meshes) {
    for (const int second : secondary_sizes(mesh)) {
      add(mesh, {.secondary_size = second});
    }
  }
  for (const comm::Mesh& mesh : meshes) {
    if (mesh.shard_size() == 1) {
      continue;
    }
    std::vector<int> seconds = secondary_sizes(mesh);
    seconds.insert(seconds.begin(), 1);
    for (const int second : seconds) {
      for (const auto& [weights, gradients] : {std::pair(8, 0), {0, 8}, {0, 4}, {8, 8}, {8, 4}}) {
        add(mesh, {second, weights, gradients, gradients});
      }
    }
  }
  return choices;
}

double communication_s(const MeshChoice& choice, const LinkRates& rates) {
  const auto time_s = [&](const comm::SentBytes& sent, bool has_phases) {
    const double inside_s = over(sent.inside, rates.inside);
    const double across_s = over(sent.across * choice.mesh.ranks_per_host(), rates.across);
    return has_phases ? inside_s + across_s : std::max(inside_s, across_s);
  };
  const comm::MeshBytes& bytes = choice.bytes;
  return time_s(bytes.gathers, choice.mesh.hierarchical()) +
         time_s(bytes.secondary_gathers, false) +
         time_s(bytes.reduce_scatters, choice.modes.encodes_gradients()) +
         time_s(bytes.replica_sums, false);
}

std::optional<std::size_t> best_mesh(std::span<const MeshChoice> choices, const LinkRates& rates,
                                     Exactness exactness) {
  std::optional<std::size_t> best;
  std::tuple<double, std::int64_t> least;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const std::tuple cost(communication_s(choices[i], rates), choices[i].memory_bytes);
    const bool may_be = choices[i].modes.is_exact() || exactness == Exactness::kAny;
    if (choices[i].fits && may_be && (!best || cost < least)) {
      best = i;
      least = cost;
    }
  }
  return best;
}

}  // namespace tessera::planner
