#include "tessera/planner/mesh_choice.h"

#include <algorithm>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tessera/comm/shm_backend.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/shard/layout.h"
#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

MeshQuestion asked(const ModelShapes& model, int num_ranks, int ranks_per_host,
                   std::int64_t num_micro_batches = 1) {
  MeshQuestion question;
  question.world = {num_ranks, ranks_per_host, 0, false};
  question.num_micro_batches = num_micro_batches;
  question.num_gathers.assign(model.params.size(), 2);
  return question;
}

MemoryPlanOptions on_gpus(std::int64_t device_bytes = kUnlimited) {
  MemoryPlanOptions options;
  options.is_discrete = true;
  options.device_bytes = device_bytes;
  options.is_device_given = device_bytes != kUnlimited;
  options.wire_dtype = DType::kBFloat16;
  return options;
}

const MeshChoice& of_size(const std::vector<MeshChoice>& choices, int size, bool hierarchical) {
  const auto found = std::find_if(choices.begin(), choices.end(), [&](const MeshChoice& each) {
    return each.mesh.shard_size() == size && each.mesh.hierarchical() == hierarchical &&
           each.modes.secondary_size == 1 && each.modes.is_exact();
  });
  EXPECT_NE(found, choices.end()) << size;
  return *found;
}

std::vector<MeshChoice> exact_of(std::vector<MeshChoice> choices) {
  std::erase_if(choices, [](const MeshChoice& each) { return !each.modes.is_exact(); });
  return choices;
}

std::string name_of(const MeshChoice& each) {
  const TrafficModes& modes = each.modes;
  return std::to_string(each.mesh.shard_size()) +
         (each.mesh.hierarchical() ? " hierarchical" : "") +
         (modes.secondary_size > 1 ? " hpZ" + std::to_string(modes.secondary_size) : "") +
         (modes.weight_bits > 0 ? " qwZ" + std::to_string(modes.weight_bits) : "") +
         (modes.encodes_gradients() ? " qgZ" + std::to_string(modes.gradient_bits_across) : "");
}

TEST(MeshChoice, HasEveryPossibleMeshOnce) {
  const ModelShapes model = large_gpt();
  std::vector<std::string> names;
  const std::vector<MeshChoice> choices = mesh_choices(model, on_gpus(), asked(model, 12, 4));
  for (const MeshChoice& each : exact_of(choices)) {
    names.push_back(name_of(each));
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"1", "2", "4", "12", "12 hierarchical", "12 hpZ2", "12 hpZ4",
                                      "12 hierarchical hpZ2", "12 hierarchical hpZ4"}));
  std::set<std::string> others;
  const std::size_t num_exact = names.size();
  for (std::size_t i = num_exact; i < choices.size(); ++i) {
    EXPECT_FALSE(choices[i].modes.is_exact()) << "exact ones come first";
    others.insert(name_of(choices[i]));
  }
  std::set<std::string> expected;
  names.erase(names.begin());  // a whole copy gathers and reduces nothing
  for (const std::string& exact : names) {
    for (const char* const encoded : {" qwZ8", " qgZ8", " qgZ4", " qwZ8 qgZ8", " qwZ8 qgZ4"}) {
      expected.insert(exact + encoded);
    }
  }
  EXPECT_EQ(others, expected);
  EXPECT_EQ(choices.size(), num_exact + expected.size());
  const std::vector<MeshChoice> one_rank_per_host =
      mesh_choices(model, on_gpus(), asked(model, 4, 1));
  EXPECT_EQ(one_rank_per_host.size(), 3U + 2U * 5U) << "both gathers are the same there";
  EXPECT_EQ(mesh_choices(model, on_gpus(), asked(model, 4, 0)).size(), 3U + 2U * 5U)
      << "nothing crosses hosts";
  EXPECT_EQ(mesh_choices(model, on_gpus(), asked(model, 1, 0)).size(), 1U);
}

// Of all values of the options: what the config, the mesh and the modes take, and what makes a
// difference.
TEST(MeshChoice, HasWhatARunAccepts) {
  const ModelShapes model = small_gpt(128, 1, 500, DType::kBFloat16);
  struct World {
    int ranks;
    int per_host;
  };
  for (const World world : {World{12, 4}, World{8, 2}, World{8, 8}, World{6, 1}}) {
    SCOPED_TRACE(::testing::Message() << world.ranks << " ranks, " << world.per_host);
    std::set<std::string> accepted;
    std::set<std::string> refused;
    for (int option = 0; option < world.ranks * world.ranks * 12; ++option) {
      const int size = option % world.ranks + 1;
      const int second = option / world.ranks % world.ranks + 1;
      const int modes = option / world.ranks / world.ranks;
      Config config;
      const auto set = [&](const char* name, int value) {
        config.apply_flag(std::string(name) + "=" + std::to_string(value));
      };
      set("shard.group_size", size);
      set("shard.secondary_group_size", second);
      set("quant.gradient_bits", modes % 3 == 2 ? 4 : 8);
      config.set("shard.hierarchical_gather", modes >= 6);
      config.set("quant.weights", modes / 3 % 2 == 1);
      config.set("quant.gradients", modes % 3 > 0);
      MeshChoice choice;
      try {
        config.check();
        choice.mesh = comm::plan_mesh(comm::MeshOptions::from(config, world.ranks, world.per_host));
        choice.modes = TrafficModes::from(config, choice.mesh);
      } catch (const ConfigError&) {
        refused.insert(std::to_string(option));
        continue;
      }
      const bool changes_nothing = (size == 1 && !choice.modes.is_exact()) ||
                                   (second > 1 && choice.mesh.hosts_per_group() == 1) ||
                                   (choice.mesh.hierarchical() && choice.mesh.inside_size() == 1);
      if (!changes_nothing) {
        accepted.insert(name_of(choice));
      }
    }
    EXPECT_FALSE(refused.empty());
    std::set<std::string> listed;
    for (const MeshChoice& each :
         mesh_choices(model, on_gpus(), asked(model, world.ranks, world.per_host))) {
      EXPECT_TRUE(listed.insert(name_of(each)).second) << name_of(each) << " twice";
    }
    EXPECT_EQ(listed, accepted);
  }
}

// One bucket, two gathers of each parameter, 2 hosts of 4 ranks.
TEST(TrafficModes, SendWhatIsCountedByHand) {
  constexpr std::int64_t kNumel = 1 << 20;
  ModelMaker maker(DType::kBFloat16);
  maker.unit("a", {kNumel}).unit("frozen", {kNumel / 2}, false);
  const ModelShapes model = maker.make();
  MemoryPlanOptions options = on_gpus();
  options.bucket_bytes = kGiB;
  options.is_bucket_given = true;
  const comm::Mesh mesh = comm::plan_mesh({8, 4, 8, false});
  const MeshQuestion question = asked(model, 8, 4);
  const auto bytes_of_modes = [&](const TrafficModes& modes) {
    return mesh_choice(mesh, modes, model, options, question);
  };
  const MeshChoice plain = bytes_of_modes({});
  EXPECT_EQ(plain.bytes.gathers, (comm::SentBytes{3 * 6 * kNumel / 8, 4 * 6 * kNumel / 8}));
  EXPECT_EQ(plain.bytes.reduce_scatters, (comm::SentBytes{3 * kNumel / 4, kNumel}));

  // The frozen one does not change: it is gathered inside hosts alone.
  const MeshChoice second = bytes_of_modes({.secondary_size = 4});
  EXPECT_EQ(second.bytes.gathers, (comm::SentBytes{3 * kNumel / 4, kNumel}));
  EXPECT_EQ(second.bytes.secondary_gathers, (comm::SentBytes{3 * kNumel / 2 + 3 * kNumel / 2, 0}));
  EXPECT_EQ(second.secondary_bytes, kNumel / 2 + kNumel / 4);
  EXPECT_EQ(second.memory_bytes, plain.memory_bytes + second.secondary_bytes);

  // 131072 and 65536 elements of a rank: 1 byte each, and 2 for every 128.
  constexpr std::int64_t kEncoded = 131072 + 2048 + 65536 + 1024;
  const MeshChoice weights = bytes_of_modes({.weight_bits = 8});
  EXPECT_EQ(weights.bytes.gathers, (comm::SentBytes{3 * 2 * kEncoded, 4 * 2 * kEncoded}));
  EXPECT_EQ(weights.bytes.reduce_scatters, plain.bytes.reduce_scatters);
  EXPECT_EQ(weights.encoded_bytes, kEncoded);
  EXPECT_EQ(weights.memory_bytes, plain.memory_bytes + kEncoded + 2 * 16) << "and measures";

  // Two shards inside the host, one across.
  const MeshChoice gradients = bytes_of_modes({1, 0, 8, 4});
  EXPECT_EQ(gradients.bytes.gathers, plain.bytes.gathers);
  EXPECT_EQ(gradients.bytes.reduce_scatters, (comm::SentBytes{3 * (262144 + 4096), 65536 + 2048}));

  const MeshChoice all = bytes_of_modes({4, 8, 4, 4});
  EXPECT_EQ(all.bytes.gathers, (comm::SentBytes{3 * 133120, 4 * 133120}));
  // Wires of two ranks each: what is trained once, what is frozen twice.
  EXPECT_EQ(all.bytes.secondary_gathers, (comm::SentBytes{3 * 2 * (133120 + 2 * 66560), 0}));
  EXPECT_EQ(all.secondary_bytes, 2 * (133120 + 66560));
  EXPECT_EQ(all.bytes.reduce_scatters, (comm::SentBytes{3 * (131072 + 4096), 65536 + 2048}));
}

TEST(TrafficModes, TogetherCrossHostsWithAtMostThreeTenthsOfPlainZero3) {
  struct World {
    int ranks;
    int per_host;
  };
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const std::vector<ModelShapes> models = {small_gpt(128, 4, 2000, dtype),
                                             small_gpt(768, 12, 50304, dtype),
                                             small_gpt(5120, 40, 50304, dtype)};
    for (std::size_t i = 0; i < models.size(); ++i) {
      for (const World& world : {World{4, 2}, {16, 4}, {64, 8}, {1024, 8}}) {
        for (const std::int64_t num_micro : {1, 4}) {
          for (const int bits : {4, 8}) {
            if (i == 0 && world.ranks > 64) {
              continue;  // less than an element of a bias for each rank
            }
            MeshQuestion question = asked(models[i], world.ranks, world.per_host, num_micro);
            question.num_gathers.assign(models[i].params.size(), 2 * num_micro);
            MemoryPlanOptions options = on_gpus();
            options.wire_dtype = dtype;
            const comm::Mesh mesh =
                comm::plan_mesh({world.ranks, world.per_host, world.ranks, false});
            const auto across = [&](const TrafficModes& modes) {
              return static_cast<double>(
                  mesh_choice(mesh, modes, models[i], options, question).bytes.host_across(mesh));
            };
            EXPECT_LE(across({world.per_host, 8, bits, bits}) / across({}), 0.3)
                << "model " << i << ", " << world.ranks << " ranks, int" << bits;
          }
        }
      }
    }
  }
}

// By the sum over parameters.
TEST(MeshChoice, CountsTheBytesOfEveryParameter) {
  ModelMaker maker(DType::kBFloat16);
  maker.unit("a", {100001, 17}).unit("frozen", {5000}, false).unit("b", {70000});
  const ModelShapes model = maker.make();
  MemoryPlanOptions options = on_gpus();
  options.bucket_bytes = kGiB;
  options.is_bucket_given = true;
  MeshQuestion question = asked(model, 8, 4, 3);
  question.num_gathers = {2, 1, 3, 2};
  for (const MeshChoice& each : mesh_choices(model, options, question)) {
    if (!(each.modes == TrafficModes())) {
      continue;
    }
    const int size = each.mesh.shard_size();
    SCOPED_TRACE(size);
    std::int64_t gathered = 0;
    std::int64_t reduced = 0;
    for (std::size_t id = 0; id < model.params.size(); ++id) {
      const shard::Layout layout(model.params[id].numel, size, model.dtype);
      gathered += question.num_gathers[id] * layout.padded_numel() * 2;
      reduced += model.params[id].trainable ? layout.padded_numel() : 0;
    }
    EXPECT_EQ(each.bytes.gathers, comm::gather_bytes(each.mesh, gathered));
    comm::SentBytes scattered = comm::reduce_scatter_bytes(each.mesh, reduced * 2);
    scattered.inside *= 3;
    scattered.across *= 3;
    EXPECT_EQ(each.bytes.reduce_scatters, scattered);
    EXPECT_EQ(each.bytes.replica_sums, comm::replica_sum_bytes(each.mesh, reduced / size, 4));
  }
}

TEST(MeshChoice, TakesTheMemoryThatIsPlannedForSoManyShards) {
  const ModelShapes model = large_gpt();
  for (const bool is_discrete : {false, true}) {
    MemoryPlanOptions options = on_gpus();
    options.is_discrete = is_discrete;
    std::int64_t last = kUnlimited;
    for (const MeshChoice& each : exact_of(mesh_choices(model, options, asked(model, 16, 0)))) {
      MemoryPlanOptions of_size = options;
      of_size.num_ranks = each.mesh.shard_size();
      of_size.num_copies = each.mesh.num_replicas();
      const MemoryPlan plan = plan_memory(model, of_size, asked(model, 16, 0).num_micro_batches);
      EXPECT_EQ(each.memory_bytes, is_discrete ? plan.device_memory_bytes() : plan.memory_bytes());
      if (each.mesh.shard_size() > 2) {  // a whole copy gathers nothing
        EXPECT_LT(each.memory_bytes, last);
      }
      EXPECT_TRUE(each.fits);
      last = each.memory_bytes;
    }
  }
}

TEST(MeshChoice, CountsTheStagingOfGroupsThatSpanHosts) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options;
  options.call_memory = comm::CallMemory::kShared;
  const auto bytes_with = [&](int ranks_per_host) {
    return of_size(mesh_choices(model, options, asked(model, 8, ranks_per_host)), 8, false)
        .memory_bytes;
  };
  EXPECT_EQ(bytes_with(0), bytes_with(8));
  EXPECT_GT(bytes_with(4), bytes_with(8));
}

TEST(MeshChoice, AWholeCopyHoldsNothingForGathers) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions options;
  const auto bytes_of_copy = [&] {
    return of_size(mesh_choices(model, options, asked(model, 8, 0)), 1, false).memory_bytes;
  };
  const std::int64_t alone = bytes_of_copy();
  options.call_memory = comm::CallMemory::kShared;
  options.group_memory = comm::kShmChunks;
  EXPECT_EQ(bytes_of_copy(), alone);
}

TEST(MeshChoice, FitsWhereItsMemoryIsWithinTheBudget) {
  const ModelShapes model = large_gpt();
  const MeshQuestion question = asked(model, 16, 0);
  const std::int64_t enough =
      of_size(mesh_choices(model, on_gpus(), question), 4, false).memory_bytes;
  for (const std::int64_t budget : {enough, enough - 1}) {
    const std::vector<MeshChoice> choices = mesh_choices(model, on_gpus(budget), question);
    EXPECT_EQ(of_size(choices, 4, false).fits, budget == enough);
    EXPECT_EQ(of_size(choices, 4, false).memory_bytes, enough) << "the same with a budget";
    EXPECT_TRUE(of_size(choices, 16, false).fits);
  }
}

TEST(MeshChoice, TimeIsThatOfTheSlowerLinkAndBothPhasesOfAGatherAddUp) {
  MeshChoice choice;
  choice.bytes.gathers = {600, 100};
  choice.bytes.reduce_scatters = {300, 400};
  choice.bytes.replica_sums = {50, 0};
  const LinkRates rates{100, 200};
  choice.mesh = comm::plan_mesh({8, 4, 8, false});
  // Inside: 6, 3 and 0.5 s. Across, of four ranks: 2, 8 and 0 s.
  EXPECT_DOUBLE_EQ(communication_s(choice, rates), 6 + 8 + 0.5);
  choice.mesh = comm::plan_mesh({8, 4, 8, true});
  EXPECT_DOUBLE_EQ(communication_s(choice, rates), 8 + 8 + 0.5);
  choice.bytes.secondary_gathers = {200, 0};
  choice.modes.gradient_bits_inside = 4;
  choice.modes.gradient_bits_across = 8;
  EXPECT_DOUBLE_EQ(communication_s(choice, rates), 8 + 2 + (3 + 8) + 0.5);
}

TEST(MeshChoice, RecommendsSmallGroupsOnASlowNetworkAndTheLeastMemoryAmongEqual) {
  const ModelShapes model = large_gpt();
  const std::vector<MeshChoice> choices =
      exact_of(mesh_choices(model, on_gpus(), asked(model, 16, 4, 4)));
  const LinkRates slow_network{300e9, 1e9};
  const auto best = best_mesh(choices, slow_network, Exactness::kAny);
  ASSERT_TRUE(best);
  EXPECT_EQ(choices[*best].mesh.hosts_per_group(), 1);
  for (const MeshChoice& each : choices) {
    EXPECT_GE(communication_s(each, slow_network), communication_s(choices[*best], slow_network));
  }
  // Only the whole world fits: what is slower then is still the answer.
  const std::int64_t least = of_size(choices, 16, false).memory_bytes;
  const std::vector<MeshChoice> tight = mesh_choices(model, on_gpus(least), asked(model, 16, 4, 4));
  const auto forced = best_mesh(tight, slow_network, Exactness::kExact);
  ASSERT_TRUE(forced);
  EXPECT_EQ(tight[*forced].mesh.shard_size(), 16);
  EXPECT_TRUE(tight[*forced].mesh.hierarchical()) << "fewer bytes on the slow link";
  EXPECT_FALSE(best_mesh(mesh_choices(model, on_gpus(1000), asked(model, 16, 4)), slow_network,
                         Exactness::kAny));

  std::vector<MeshChoice> equal(3);
  equal[0].memory_bytes = 20;
  equal[1].memory_bytes = 10;
  equal[2].memory_bytes = 30;
  EXPECT_EQ(best_mesh(equal, slow_network, Exactness::kAny), 1U);
  equal[1].modes.weight_bits = 8;
  EXPECT_EQ(best_mesh(equal, slow_network, Exactness::kExact), 0U);
}

TEST(MeshChoice, WhatChangesNumbersIsFasterAcrossASlowLinkAndIsToldApart) {
  const ModelShapes model = large_gpt();
  // Nothing but a group of all ranks fits.
  const std::int64_t least =
      of_size(mesh_choices(model, on_gpus(), asked(model, 16, 4)), 16, false).memory_bytes;
  const std::vector<MeshChoice> choices =
      mesh_choices(model, on_gpus(least * 13 / 10), asked(model, 16, 4));
  const LinkRates slow_network{300e9, 1e9};
  const auto exact = best_mesh(choices, slow_network, Exactness::kExact);
  const auto any = best_mesh(choices, slow_network, Exactness::kAny);
  ASSERT_TRUE(exact && any);
  EXPECT_TRUE(choices[*exact].modes.is_exact());
  EXPECT_FALSE(choices[*any].modes.is_exact());
  EXPECT_LT(communication_s(choices[*any], slow_network),
            communication_s(choices[*exact], slow_network));
}

TEST(MeshChoice, AnswersForAMillionRanks) {
  const ModelShapes model = small_gpt(5120, 40, 50304, DType::kBFloat16);
  const std::vector<MeshChoice> choices = mesh_choices(model, on_gpus(), asked(model, 1 << 20, 8));
  // Groups of 2, 4 and 8 ranks are inside a host. Above, flat and hierarchical, secondary shards
  // are over 2, 4 or 8.
  constexpr std::size_t kSpread = std::size_t{17} * 2;
  EXPECT_EQ(choices.size(), 4U + kSpread * 4 + (3 + kSpread * 4) * 5);
  for (const MeshChoice& each : choices) {
    EXPECT_GT(each.memory_bytes, 0);
    EXPECT_GE(each.bytes.rank().across, 0);
  }
}

}  // namespace
}  // namespace tessera::planner
