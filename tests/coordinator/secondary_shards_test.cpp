// Secondary shards: made of what was gathered, for one version, and refused for another.
#include "tessera/coordinator/secondary_shards.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/contains.h"

namespace tessera::coordinator {
namespace {

class SecondOn : public testing::TestWithParam<DeviceChoice> {};
INSTANTIATE_TEST_SUITE_P(Devices, SecondOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(SecondOn, GathersBringTheSameValuesAndOnlyTheFirstIsOfAllRanks) {
  using Mode = std::pair<Tier, bool>;
  for (const auto& [where, quantised] : {Mode{Tier::kDevice, false}, Mode{Tier::kHost, false},
                                         Mode{Tier::kDevice, true}, Mode{Tier::kHost, true}}) {
    const Tier tier = where;
    const bool is_quantised = quantised;
    for (const int second : {2, 3, 6}) {
      run_ranks(6, [&](Group& world) {
        const auto near = world.split(world.rank() / second, "near");
        Model model = mixed_model();
        model.secondary = tier;
        // Every use gathers.
        CoordinatorFixture rank(world, model, make_options(1 << 12, 0), GetParam(), nullptr, {},
                                near.get(), is_quantised);
        const auto num_near = static_cast<std::uint64_t>(second);
        const comm::PlainCodec codec;
        std::uint64_t piece_bytes = 0;
        for (int id = 0; id < rank.params().num_params(); ++id) {
          const shard::Layout& layout = rank.params()[id].layout();
          piece_bytes += is_quantised ? codec.wire_bytes(layout.shard_numel()) * (6 / num_near)
                                      : layout.full_bytes() / num_near;
        }
        std::uint64_t brought = 0;
        for (int step = 0; step < 4; ++step) {
          const std::uint64_t before = world.wire_bytes().payload;
          const std::uint64_t near_before = near->wire_bytes().payload;
          rank.train();
          const std::uint64_t in_first = world.wire_bytes().payload - before;
          rank.train();  // of the same values
          const std::uint64_t in_second = world.wire_bytes().payload - before - in_first;
          EXPECT_EQ(in_second, 0U) << "step " << step;
          const std::uint64_t near_sent = near->wire_bytes().payload - near_before;
          EXPECT_GT(near_sent, 0U);
          rank.end_step_and_update();
          const CoordinatorStats stats = rank.take_stats();
          EXPECT_EQ(near_sent, stats.secondary_wire_bytes / num_near * (num_near - 1));
          EXPECT_EQ(stats.secondary_wire_bytes < stats.secondary_bytes, is_quantised);
          brought += stats.brought_bytes;
          if (tier == Tier::kHost) {
            EXPECT_EQ(stats.brought_bytes, stats.secondary_wire_bytes / num_near);
            EXPECT_EQ(stats.kept_bytes, piece_bytes);
          }
        }
        EXPECT_EQ(brought > 0, tier == Tier::kHost);
        EXPECT_EQ(rank.ledger().current_bytes(Tier::kPinned, Role::kShard) >= piece_bytes,
                  tier == Tier::kHost);
      });
    }
  }
}

// What was read ahead in vain would be in the sum.
TEST_P(SecondOn, ShardsOnNvmeAreReadOnceForAllGathersOfAStep) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    for (const std::size_t blocks : {0, 4, 40}) {
      for (const bool passes_on : {false, true}) {
        run_ranks(4, [&](Group& world) {
          const auto near = world.split(world.rank() / 2, "near");
          Model model = equal_layers(4, 2 * kLayerNumel + 3);
          model.nvme = {{0, 1, 3}, kSmallestLoaderBytes + blocks * tier::kBlockBytes, passes_on};
          model.secondary = tier;
          CoordinatorFixture rank(world, model, make_options(1 << 12, 1 << 12), GetParam(), nullptr,
                                  {}, near.get());
          std::uint64_t once = 0;
          for (const int id : model.nvme.ids) {
            once += rank.params()[id].layout().shard_bytes();
          }
          constexpr int kSteps = 4;
          for (int step = 0; step < kSteps; ++step) {
            rank.train();
            rank.train();
            rank.end_step_and_update();
          }
          rank.coordinator().forget_copies();  // what the next step has begun with
          rank.loader().wait_idle();
          const LoaderStats loads = rank.loader().take_stats(Tier::kNvme);
          EXPECT_GE(loads.loaded_bytes, kSteps * once);
          EXPECT_LE(loads.loaded_bytes, (kSteps + 1) * once) << "one pass was begun";
          // Whole blocks; a shard is less than one.
          EXPECT_LE(rank.nvme().read_bytes(),
                    (kSteps + 1) * model.nvme.ids.size() * tier::kBlockBytes);
        });
      }
    }
  }
}

TEST(SecondaryShards, OfAnEarlierUpdateAreRefusedByName) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0));
    SecondaryShards second(world, rank.device(), rank.params());
    shard::Param& param = rank.params()[1];
    EXPECT_FALSE(second.has(param));
    std::vector<float> full(static_cast<std::size_t>(param.layout().padded_numel()));
    param.start_gather(full.data());
    param.finish_gather();
    second.keep(param, /*by_all=*/false);
    EXPECT_FALSE(second.has(param)) << "other ranks have not gathered it";
    second.keep(param, /*by_all=*/true);
    EXPECT_TRUE(second.has(param));
    param.release();
    param.set_updated(device::Pending());
    EXPECT_FALSE(second.has(param));
    try {
      std::ignore = second.start_gather(param, full.data(), nullptr,
                                        rank.device().stream(device::StreamKind::kGather));
      FAIL() << "a stale secondary shard was given";
    } catch (const InternalError& error) {
      EXPECT_HAS(std::string(error.what()), "secondary shard of parameter '" + param.name() + "'");
      EXPECT_HAS(std::string(error.what()), "is of update");
    }
  });
}

// The gather of an update leaves its wires over those of the one before.
TEST(SecondaryShards, OfWiresCountOnceTheGatherThatLeftThemIsWaitedFor) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0));
    const comm::PlainCodec codec(&rank.device());
    SecondaryShards second(world, rank.device(), rank.params());
    shard::Param& param = rank.params()[1];
    std::vector<float> full(static_cast<std::size_t>(param.layout().padded_numel()));
    device::Stream& stream = rank.device().stream(device::StreamKind::kGather);
    for (int update = 0; update < 2; ++update) {
      const comm::KeptWires wires = second.wires_to_keep(param, codec);
      EXPECT_EQ(wires.first, world.rank());
      EXPECT_EQ(wires.num, 1);
      EXPECT_FALSE(second.has(param));
      EXPECT_THROW(std::ignore = second.start_gather(param, full.data(), nullptr, stream),
                   InternalError);
      second.keep(param, /*by_all=*/true);
      EXPECT_TRUE(second.has(param));
      EXPECT_EQ(second.wires_to_keep(param, codec).num, 0) << "they are there";
      const comm::Gather gather = second.start_gather(param, full.data(), nullptr, stream);
      EXPECT_EQ(gather.codec, &codec);
      EXPECT_EQ(gather.shard, wires.to);
      param.set_updated(device::Pending());
    }
  });
}

}  // namespace
}  // namespace tessera::coordinator
