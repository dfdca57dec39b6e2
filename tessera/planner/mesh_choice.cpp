#include "tessera/planner/mesh_choice.h"

#include <algorithm>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/grad/bucket.h"
#include "tessera/planner/memory_cost.h"
#include "tessera/planner/memory_planner.h"

namespace tessera::planner {
namespace {

// Everything in the memory of the device.
MemoryPlanOptions resident(const MemoryPlanOptions& given, const comm::Mesh& mesh) {
  MemoryPlanOptions options = given;
  options.num_ranks = mesh.shard_size();
  options.num_copies = mesh.num_replicas();
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

}  // namespace

MeshChoice mesh_choice(const comm::Mesh& mesh, const ModelShapes& model,
                       const MemoryPlanOptions& options, const MeshQuestion& question) {
  TESSERA_INVARIANT(question.num_gathers.size() == model.params.size(), "gathers of ",
                    question.num_gathers.size(), " parameters, not ", model.params.size());
  const MemoryPlanOptions cut_options = resident(options, mesh);
  const CutModel cut(model, cut_options);
  const MemoryPlan plan = plan_memory(model, cut_options, question.num_micro_batches);

  comm::StepVolume volume;
  std::vector<grad::BucketParam> params;
  for (std::size_t id = 0; id < cut.num_params(); ++id) {
    volume.gathered_bytes += question.num_gathers[id] * as_int(cut.layouts[id].full_bytes());
    if (cut.is_trainable(id)) {
      params.push_back({static_cast<int>(id), cut.layouts[id].shard_numel(),
                        model.params[id].dynamic, Tier::kDevice});
    }
  }
  const std::size_t wire_bytes = bytes_of(options.wire_dtype);
  const grad::BucketLayout buckets =
      grad::plan_buckets(params, mesh.shard_size(), plan.bucket_bytes, wire_bytes);
  std::vector<std::int64_t> bucket_numel;
  bucket_numel.reserve(buckets.buckets.size());
  for (const grad::Bucket& bucket : buckets.buckets) {
    bucket_numel.push_back(bucket.shard_numel * mesh.shard_size());
  }
  volume.bucket_numel = bucket_numel;
  volume.num_micro_batches = question.num_micro_batches;
  volume.wire_element_bytes = as_int(wire_bytes);

  MeshChoice choice;
  choice.mesh = mesh;
  choice.memory_bytes = options.is_discrete ? plan.device_memory_bytes() : plan.memory_bytes();
  choice.fits =
      choice.memory_bytes <= (options.is_discrete ? options.device_bytes : options.memory_bytes());
  choice.bytes = comm::step_bytes(mesh, volume);
  return choice;
}

std::vector<MeshChoice> mesh_choices(const ModelShapes& model, const MemoryPlanOptions& options,
                                     const MeshQuestion& question) {
  comm::MeshOptions world = question.world;
  world.hierarchical = false;
  std::vector<MeshChoice> choices;
  for (const int size : comm::possible_shard_sizes(world)) {
    world.shard_size = size;
    world.hierarchical = false;
    const comm::Mesh flat = comm::plan_mesh(world);
    choices.push_back(mesh_choice(flat, model, options, question));
    if (flat.hosts_per_group() > 1 && flat.inside_size() > 1) {
      world.hierarchical = true;
      choices.push_back(mesh_choice(comm::plan_mesh(world), model, options, question));
    }
  }
  return choices;
}

double communication_s(const MeshChoice& choice, const LinkRates& rates) {
  const auto inside_s = [&](const comm::SentBytes& sent) {
    return over(sent.inside, rates.inside);
  };
  const auto across_s = [&](const comm::SentBytes& sent) {
    return over(sent.across * choice.mesh.ranks_per_host(), rates.across);
  };
  const comm::MeshBytes& bytes = choice.bytes;
  double time_s = choice.mesh.hierarchical()
                      ? inside_s(bytes.gathers) + across_s(bytes.gathers)
                      : std::max(inside_s(bytes.gathers), across_s(bytes.gathers));
  for (const comm::SentBytes& sent : {bytes.reduce_scatters, bytes.replica_sums}) {
    time_s += std::max(inside_s(sent), across_s(sent));
  }
  return time_s;
}

std::optional<std::size_t> best_mesh(std::span<const MeshChoice> choices, const LinkRates& rates) {
  std::optional<std::size_t> best;
  std::tuple<double, std::int64_t> least;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const std::tuple cost(communication_s(choices[i], rates), choices[i].memory_bytes);
    if (choices[i].fits && (!best || cost < least)) {
      best = i;
      least = cost;
    }
  }
  return best;
}

}  // namespace tessera::planner
