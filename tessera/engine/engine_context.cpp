#include "tessera/engine/engine_context.h"

#include "tessera/comm/rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/host_tier_device.h"

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

// Reductions must not stand in one order with gathers: see Runtime::reduce_group().
std::unique_ptr<comm::Group> split_for_reductions(Runtime& runtime, comm::Group& group) {
  return &group == &runtime.group() ? nullptr : group.split(0, group.name() + ".reduce");
}

}  // namespace

EngineContext::EngineContext(Runtime& given, const EngineOptions& options)
    : runtime(given),
      shard_device(choose_shard_device(given)),
      group(choose_group(given)),
      params(group.rank(), group.size(), shard_device ? *shard_device : given.device()),
      tiers(given, group, params, {options.shapes, options.step, options.planning}),
      own_reduce_group(split_for_reductions(given, group)),
      reduce_group(own_reduce_group ? *own_reduce_group : given.reduce_group()),
      coordinator({group, given.device(), params, given.clock(), given.spans(), given.logger()},
                  coordinator::CoordinatorOptions::from(given.config())) {
  tiers.reserve_staging(reduce_group);  // if the plan is made already
}

EngineContext::~EngineContext() { tiers.release_staging(reduce_group); }

}  // namespace tessera::engine
