// Ways to spoil a collective, by processes that talk over Gloo. Arguments: the culprit's rank, and
// the time limit in milliseconds. The others say what they were told, so that tests can see it: the
// launcher shows one rank's error only.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/core/error.h"
#include "testing/mock_device.h"
#include "tests/launch/rank_program.h"

namespace tessera::testing {
namespace {

using Deed = std::function<void(comm::Group&)>;

comm::CallOptions labelled() {
  comm::CallOptions options;
  options.label = {"h.3", "attn.weight"};
  return options;
}

void reduce(comm::Group& group) {
  std::vector<float> data(1000, 1.0F);
  group.start_all_reduce(data.data(), 1000, DType::kFloat32, comm::Reduction::kSum, labelled())
      .wait();
  TESSERA_CHECK(data.back() == static_cast<float>(group.size()), CommError,
                "a wrong sum: ", data.back());
}

// `device`: whose memory calls are copied from; null: they are not.
comm::World join(RankContext& context, device::Device* device) {
  comm::WorldOptions options;
  options.group.device = device;
  options.group.timeout = std::chrono::milliseconds(context.number(1));
  options.group.heartbeat = std::chrono::milliseconds(100);
  comm::World world = comm::join_world(context.rendezvous, options);
  context.process.set_status(world.status);
  return world;
}

void reduce_and_tell(const RankContext& context, comm::Group& group) {
  try {
    reduce(group);
  } catch (const CommError& error) {
    say("rank " + std::to_string(context.rank()) + " was told: " + error.what());
    throw;
  }
}

// Everybody reduces twice; then the culprit does its deed while the others reduce. `device`: whose
// memory calls are copied from; null: they are not.
int spoil(RankContext& context, const Deed& deed, device::Device* device) {
  const comm::World world = join(context, device);
  reduce(*world.group);
  reduce(*world.group);
  if (context.is_culprit()) {
    say_ready(context.rank());
    deed(*world.group);
  }
  reduce_and_tell(context, *world.group);
  return 0;
}

Behaviour spoiled_by(const char* name, const Deed& deed) {
  return {name, [deed](RankContext& context) { return spoil(context, deed, nullptr); }};
}

// The same with calls that pass through pinned memory.
Behaviour copied_and_spoiled_by(const char* name, const Deed& deed) {
  return {name, [deed](RankContext& context) {
            device::MockDeviceOptions options;
            options.own_memory = true;
            const auto device = device::make_mock_device(std::move(options));
            return spoil(context, deed, device.get());
          }};
}

// Nobody else joins its call: the others reduce, this rank gathers.
void throw_in_flight(comm::Group& group) {
  auto data = std::make_shared<std::vector<float>>(1000, 1.0F);
  comm::CallOptions options = labelled();
  options.keep_alive = data;
  std::ignore =
      group.start_all_reduce(data->data(), 1000, DType::kFloat32, comm::Reduction::kMax, options);
  throw IoError("disk is full");
}

// A process in several worlds: two at once, and one when those are gone.
int join_again(RankContext& context) {
  comm::WorldOptions options;
  options.group.timeout = std::chrono::milliseconds(context.number(1));
  {
    const comm::World first = comm::join_world(context.rendezvous, options);
    const comm::World second = comm::join_world(context.rendezvous, options);
    reduce(*second.group);
    reduce(*first.group);
    reduce(*second.group);
  }
  const comm::World third = comm::join_world(context.rendezvous, options);
  reduce(*third.group);
  return 0;
}

// Groups of pretended hosts: each takes the network that its ranks have. Arguments: the time limit
// at its place, and ranks per host.
int pretend_hosts(RankContext& context) {
  comm::WorldOptions options;
  options.group.timeout = std::chrono::milliseconds(context.number(1));
  options.ranks_per_host = context.number(2);
  const comm::World world = comm::join_world(context.rendezvous, options);
  context.process.set_status(world.status);
  reduce(*world.group);
  const auto inside = world.group->split(context.rank() / options.ranks_per_host, "inside");
  const auto across = world.group->split(context.rank() % options.ranks_per_host, "across");
  reduce(*inside);
  reduce(*across);
  if (context.rank() == 0) {
    const auto name = [](const comm::Group& group) { return std::string(group.backend_name()); };
    say("world " + name(*world.group) + ", inside " + name(*inside) + ", across " + name(*across) +
        "; " + world.group->backend_note());
  }
  return 0;
}

// The culprit has taken fewer steps than the others, and ends as if all were well.
int end_early(RankContext& context) {
  const comm::World world = join(context, nullptr);
  reduce(*world.group);
  if (!context.is_culprit()) {
    reduce_and_tell(context, *world.group);
  }
  return 0;
}

}  // namespace

std::vector<Behaviour> collective_behaviours() {
  return {
      {"join-again", join_again},
      {"pretend-hosts", pretend_hosts},
      {"reduce-end-early", end_early},
      spoiled_by("reduce", [](comm::Group&) {}),
      spoiled_by("reduce-killed", [](comm::Group&) { raise(SIGKILL); }),
      spoiled_by("reduce-throw", [](comm::Group&) { throw IoError("disk is full"); }),
      spoiled_by("reduce-never", [](comm::Group&) { wait_for_the_end(); }),
      spoiled_by("reduce-other",
                 [](comm::Group& group) {
                   std::vector<float> data(5000, 1.0F);
                   group.start_broadcast(data.data(), 5000, DType::kFloat32, 0, labelled()).wait();
                 }),
      spoiled_by("reduce-throw-in-flight", throw_in_flight),
      spoiled_by("reduce-leave", [](comm::Group&) { _Exit(0); }),
      copied_and_spoiled_by("copied-reduce", [](comm::Group&) {}),
      copied_and_spoiled_by("copied-reduce-killed", [](comm::Group&) { raise(SIGKILL); }),
      copied_and_spoiled_by("copied-reduce-throw-in-flight", throw_in_flight),
  };
}

}  // namespace tessera::testing
