#include "tessera/engine/engine_context.h"

#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/host_tier_device.h"
#include "tessera/grad/reducer.h"
#include "tessera/quant/block_codec.h"

namespace tessera::engine {
namespace {

// The group of the outermost BuildScope, else the runtime's.
comm::Group& choose_group(Runtime& runtime) {
  if (comm::Group* given = BuildScope::current().group) {
    return *given;
  }
  if (runtime.num_ranks() == 1) {
    const int world = comm::find_rendezvous(comm::process_environment()).world_size;
    TESSERA_CHECK(world == 1, ConfigError, "the engine has a group of one rank in a world of ",
                  world,
                  ": every rank would hold the whole model and train it alone. Give the "
                  "runtime the world's group; if one rank is meant, say so with "
                  "BuildScope({.group = &group})");
  }
  return runtime.group();
}

std::unique_ptr<device::Device> choose_shard_device(Runtime& runtime) {
  if (BuildScope::has_overruled()) {
    runtime.logger().warn(
        "an inner build scope names a group or tier; the outermost scope decides both");
  }
  const bool is_asked_for = BuildScope::current().tier == "host";
  const bool is_discrete = runtime.device().is_discrete();
  TESSERA_CHECK(!is_asked_for || !is_discrete, ConfigError,
                "build scope: tier='host' says nothing of where gradients and states of an engine "
                "on ",
                runtime.device().name(), " go; set place.parameters = host in its config");
  if (is_discrete || (!is_asked_for && runtime.config().get_string("place.parameters") != "host")) {
    return nullptr;  // a device with memory of its own has homes for shards
  }
  return std::make_unique<HostTierDevice>(runtime.device());
}

std::unique_ptr<const comm::Codec> make_gradient_codec(Runtime& runtime) {
  const auto blocks = grad::ReducerOptions::from(runtime.config(), DType::kFloat32).blocks;
  return !blocks             ? nullptr
         : runtime.on_cuda() ? quant::make_cuda_block_codec(*blocks, runtime.device())
                             : quant::make_cpu_block_codec(*blocks);
}

std::unique_ptr<comm::Codec> make_weight_codec(Runtime& runtime) {
  if (!runtime.config().get_bool("quant.weights")) {
    return nullptr;
  }
  const quant::BlockFormat format{8, runtime.config().get_int("quant.block_numel")};
  return runtime.on_cuda() ? quant::make_cuda_block_codec(format, runtime.device())
                           : quant::make_cpu_block_codec(format);
}

}  // namespace

EngineContext::EngineContext(Runtime& given, const EngineOptions& options)
    : runtime(given),
      shard_device(choose_shard_device(given)),
      gradient_codec(make_gradient_codec(given)),
      group(choose_group(given)),
      mesh(given, group),
      params(mesh.shard_index(), mesh.mesh().shard_size(),
             shard_device ? *shard_device : given.device()),
      tiers(given, mesh, params, {options.shapes, options.step, options.planning}),
      weight_codec(make_weight_codec(given)),
      coordinator(
          {mesh.gathers(), given.device(), params, given.clock(), given.spans(), given.logger(),
           mesh.phases(), &group, mesh.ranks_of_copy(), mesh.secondary(), weight_codec.get()},
          coordinator::CoordinatorOptions::from(given.config())) {
  if (group.rank() == 0 && group.size() > 1) {
    runtime.logger().info(mesh.mesh().describe());
  }
  if (group.rank() == 0 && gradient_codec && mesh.mesh().shard_size() > 1) {
    runtime.logger().info("gradients travel as ", gradient_codec->name(),
                          mesh.mesh().two_hops() ? ", quantised inside hosts and across"
                          : mesh.mesh().has_uneven_hosts()
                              ? ", in one hop: hosts are not equal blocks of ranks"
                              : "",
                          " (quant.gradients): numbers differ from exact training; metrics have "
                          "grad_quant_error");
  } else if (group.rank() == 0 && gradient_codec) {
    runtime.logger().info("quant.gradients = true changes nothing: every rank holds all shards");
  }
  if (group.rank() == 0 && weight_codec) {
    runtime.logger().info(
        mesh.mesh().shard_size() > 1
            ? detail::concat("parameters are gathered as ", weight_codec->name(),
                             " (quant.weights): this changes numbers; each step measures the error")
            : std::string("quant.weights: every rank holds all parameters, so nothing is gathered "
                          "and nothing is quantised"));
  }
  tiers.reserve_staging();  // if the plan is made already
}

EngineContext::~EngineContext() { tiers.release_staging(); }

}  // namespace tessera::engine
