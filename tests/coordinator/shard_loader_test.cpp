// Shards get to their place with the right bytes, each read as often as it must be, in the order of
// use. Failures, forgetting and threads: shard_loader_failure_test.cpp.
#include "tessera/coordinator/shard_loader.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/loader_world.h"

namespace tessera::coordinator {
namespace {

using device::Completion;
using device::Pending;
using shard::kShardStep;
using tessera::support::StoreCall;

using Places = std::vector<std::unique_ptr<LoaderWorld::Place>>;

TEST(LoaderSizes, AddUpToWhatWasGivenAndNoMore) {
  for (std::size_t bytes = kSmallestLoaderBytes; bytes < (std::size_t{80} << 20);
       bytes += bytes / 3 + 1) {
    const LoaderSizes sizes = loader_sizes(bytes);
    EXPECT_GE(sizes.tile_bytes, kSmallestLoaderBytes / 2) << bytes;
    EXPECT_LE(sizes.tile_bytes, std::size_t{4} << 20) << bytes;
    EXPECT_EQ(sizes.tile_bytes % (kShardStep * sizeof(float)), 0U) << bytes;
    EXPECT_EQ(sizes.window_bytes % tier::kBlockBytes, 0U) << bytes;
    EXPECT_LE(2 * sizes.tile_bytes + sizes.window_bytes, bytes);
    EXPECT_GT(2 * sizes.tile_bytes + sizes.window_bytes + tier::kBlockBytes, bytes);
  }
}

TEST(LoaderSizes, BelowTheSmallestSumThereIsNoFeed) {
  LoaderWorld world;
  EXPECT_THROW(world.make_loader(kSmallestLoaderBytes - 1), InternalError);
}

// numel, ranks, rank, type, bytes of buffers
using Shape = std::tuple<std::int64_t, int, int, DType, std::size_t>;

class EveryShape : public ::testing::TestWithParam<Shape> {
 protected:
  EveryShape() : world_(std::get<2>(GetParam()), std::get<1>(GetParam())) {
    world_.add(7, std::get<3>(GetParam()));
    world_.add(std::get<0>(GetParam()), std::get<3>(GetParam()));
    world_.add(7, std::get<3>(GetParam()));
    world_.make_loader(std::get<4>(GetParam()));
  }
  const shard::Param& param() { return world_.params()[1]; }
  std::size_t shard_bytes() { return param().layout().shard_bytes(); }
  bool fits_window() { return tier::whole_blocks(shard_bytes()) <= world_.loader().window_bytes(); }

  LoaderWorld world_;
};

TEST_P(EveryShape, IsStreamedFromTheStoreAndReadOnce) {
  world_.expect_load(1);
  EXPECT_EQ(world_.store().stats().read_bytes, tier::whole_blocks(shard_bytes()));
  EXPECT_EQ(world_.store().stats().written_bytes, 0U) << "nothing has changed";
  const LoaderStats stats = world_.loader().take_stats(Tier::kNvme);
  EXPECT_EQ(stats.loaded_bytes, shard_bytes());
  EXPECT_EQ(stats.read_ahead_bytes, 0U);
  EXPECT_EQ(stats.from_update_bytes, 0U);
  EXPECT_EQ(world_.loader().take_stats(Tier::kNvme).loaded_bytes, 0U) << "taken";
}

TEST_P(EveryShape, IsTakenFromTheWindowIfItWasReadAhead) {
  world_.loader().read_ahead(std::vector<int>{1});
  const std::size_t read = world_.store().stats().read_bytes;
  EXPECT_EQ(read, fits_window() ? tier::whole_blocks(shard_bytes()) : 0U);
  world_.expect_load(1);
  EXPECT_EQ(world_.store().stats().read_bytes, tier::whole_blocks(shard_bytes()));
  EXPECT_EQ(world_.loader().take_stats(Tier::kNvme).read_ahead_bytes, fits_window() ? shard_bytes() : 0U);
  world_.expect_load(1);
  EXPECT_EQ(world_.store().stats().read_bytes, 2 * tier::whole_blocks(shard_bytes()))
      << "its room in the window was given back";
}

TEST_P(EveryShape, IsTakenFromItsUpdateAndNotRead) {
  for (const std::int64_t step : {param().layout().shard_numel() + 1, kShardStep}) {
    world_.store().clear_seen();
    const bool offers = fits_window() && param().range().numel > 0;
    const int num_taken = world_.offer(1, 2, step);
    EXPECT_EQ(num_taken, offers ? (param().range().numel + step - 1) / step : 0);
    world_.set_version(1, 2);
    world_.expect_load(1);
    EXPECT_EQ(world_.store().stats().read_bytes, offers ? 0U : tier::whole_blocks(shard_bytes()));
    EXPECT_EQ(world_.loader().take_stats(Tier::kNvme).from_update_bytes, offers ? shard_bytes() : 0U);
  }
}

TEST_P(EveryShape, IsWrittenAndReadFromOutsideOfAStep) {
  const std::vector<std::byte> bytes = world_.shard_of(1, 5);
  const std::int64_t real = param().range().numel;
  const std::int64_t first = std::min(real, 2 * kShardStep);
  const std::size_t element = bytes_of(param().layout().dtype());
  world_.loader().write(param(), 0, first, bytes.data());
  if (first < real) {
    world_.loader().write(param(), first, real - first,
                        bytes.data() + static_cast<std::size_t>(first) * element);
  }
  EXPECT_EQ(world_.store().stats().written_bytes, tier::whole_blocks(shard_bytes()));
  std::vector<std::byte> to(bytes.size());
  world_.loader().read(param(), to.data());
  EXPECT_EQ(to, bytes);
  world_.expect_load(0);
  world_.expect_load(2);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const std::size_t small = kSmallestLoaderBytes;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t numel : {std::int64_t{0}, std::int64_t{1}, kShardStep - 1, kShardStep,
                                     5 * kShardStep + 3, 20 * kShardStep + 2047}) {
      for (const std::size_t buffers : {small, small + 4 * tier::kBlockBytes, 32 * small}) {
        all.emplace_back(numel, 1, 0, dtype, buffers);
        all.emplace_back(numel, 3, 0, dtype, buffers);
        all.emplace_back(numel, 3, 2, dtype, buffers);  // with padding, or nothing else
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, EveryShape, ::testing::ValuesIn(shapes()));

TEST(ShardLoader, RefusesWhatIsNotTheNextPieceOfAnUpdate) {
  LoaderWorld world;
  world.add(2 * kShardStep);
  world.add(kShardStep);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(5));
  const std::vector<std::byte> first = world.shard_of(0, 2);
  const std::byte* second = first.data() + kShardStep * 4;
  EXPECT_FALSE(loader.receive(0, kShardStep, kShardStep, second)) << "not from the beginning";
  EXPECT_TRUE(loader.receive(0, 0, kShardStep, first.data()));
  EXPECT_FALSE(loader.receive(0, 0, kShardStep, first.data())) << "again";
  EXPECT_FALSE(loader.receive(1, 0, kShardStep, first.data())) << "one block is left, it needs two";
  world.set_version(0, 2);
  world.expect_load(0);
  EXPECT_EQ(loader.take_stats(Tier::kNvme).from_update_bytes, 0U) << "half of it was offered";
  EXPECT_TRUE(loader.receive(0, kShardStep, kShardStep, second));
  world.store().clear_seen();
  world.expect_load(0);
  EXPECT_EQ(world.store().stats().read_bytes, 0U);
  EXPECT_TRUE(loader.receive(1, 0, kShardStep, world.shard_of(1, 2).data())) << "there is room again";
}

TEST(ShardLoader, RefusesAnUpdateOfWhatIsBeingRead) {
  LoaderWorld world;
  world.add(8);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(4));
  loader.read_ahead(std::vector<int>{0});
  EXPECT_EQ(world.offer(0, 2, 8), 0);
}

TEST(ShardLoader, ReadsAheadInTheOrderOfUseAsFarAsTheWindowGoes) {
  LoaderWorld world;
  for (int i = 0; i < 6; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(3));
  const auto names = [&](const std::vector<int>& ids) {
    std::vector<std::string> all;
    for (const int id : ids) {
      all.push_back(world.extent_name(id));
    }
    return all;
  };
  loader.read_ahead(std::vector<int>{4, 1, 5, 0, 2});
  EXPECT_EQ(world.store().names_read(), names({4, 1, 5}));
  loader.read_ahead(std::vector<int>{4, 1, 5, 0, 2});
  EXPECT_EQ(world.store().names_read(), names({4, 1, 5})) << "they are there";
  world.expect_load(4);
  loader.wait_idle();
  world.store().wait_for_seen(4);
  EXPECT_EQ(world.store().names_read(), names({4, 1, 5, 0})) << "as soon as there is room";
  world.expect_load(2);  // not in the order that was foretold
  EXPECT_EQ(world.store().names_read(), names({4, 1, 5, 0, 2}));
  for (const int id : {1, 5, 0}) {
    world.expect_load(id);
  }
  EXPECT_EQ(world.store().names_read().size(), 5U) << "none is read twice";
  EXPECT_EQ(loader.take_stats(Tier::kNvme).read_ahead_bytes, 4U * 4096);
}

TEST(ShardLoader, ReadsStopAtTheFirstShardThatCannotBeReadYet) {
  LoaderWorld world;
  for (int i = 0; i < 3; ++i) {
    world.add(kBlockNumel);
  }
  world.add(9 * kBlockNumel);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(8));
  const std::vector<int> order{0, 1, 2};
  auto update = std::make_shared<Completion>();
  world.params()[1].set_updated(Pending(update));
  loader.read_ahead(order);
  EXPECT_EQ(world.store().names_read(), std::vector<std::string>{world.extent_name(0)})
      << "the update of p1 is not done";
  world.store().hold(StoreCall::kWrite, "'p1'");
  world.write_version(1, 2);
  update->succeed();
  loader.read_ahead(order);
  EXPECT_EQ(world.store().names_read().size(), 1U) << "p1 is not written";
  world.store().release();
  loader.read_ahead(order);
  EXPECT_EQ(world.store().names_read().size(), 3U);
  world.expect_load(1);
  loader.read_ahead(std::vector<int>{3, 1});
  EXPECT_EQ(world.store().names_read().size(), 3U) << "p3 is larger than the window";
}

TEST(ShardLoader, WhatWasReadInVainMakesRoom) {
  LoaderWorld world;
  for (int i = 0; i < 6; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(3));
  EXPECT_EQ(world.offer(5, 2, kBlockNumel), 1);
  loader.read_ahead(std::vector<int>{0, 1});
  loader.read_ahead(std::vector<int>{1, 2, 3, 4});
  EXPECT_EQ(
      world.store().names_read(),
      (std::vector<std::string>{world.extent_name(0), world.extent_name(1), world.extent_name(2)}))
      << "p0 goes; p1 is on the list, p5 came from its update";
  world.store().clear_seen();
  world.set_version(5, 2);
  for (const int id : {1, 2, 5}) {
    world.expect_load(id);
  }
  EXPECT_EQ(loader.take_stats(Tier::kNvme).from_update_bytes, 4096U);
  const std::vector<std::string> read = world.store().names_read();
  for (const int id : {1, 2, 5}) {
    EXPECT_EQ(std::count(read.begin(), read.end(), world.extent_name(id)), 0) << id;
  }
}

TEST(ShardLoader, ABringWaitsForTheUpdateItsWritesAndThePlace) {
  LoaderWorld world;
  world.add(3 * kShardStep);
  ShardLoader& loader = world.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  auto ready = std::make_shared<Completion>();
  world.params()[0].set_updated(Pending(update));
  const auto place = world.start_load(0, Pending(ready));
  ready->succeed();
  let_others_run();
  EXPECT_FALSE(place->loaded.done()) << "the update is not done";
  world.store().hold(StoreCall::kWrite, "'p0'");
  world.write_version(0, 2);
  update->succeed();
  let_others_run();
  EXPECT_FALSE(place->loaded.done()) << "its write is not done";
  EXPECT_TRUE(world.store().names_read().empty());
  world.store().release();
  place->loaded.wait();
  world.expect_version(0, *place, 2);

  auto later = std::make_shared<Completion>();
  world.store().clear_seen();
  const auto second = world.start_load(0, Pending(later));
  let_others_run();
  EXPECT_FALSE(second->loaded.done());
  EXPECT_EQ(second->bytes[0], std::byte{0x5a}) << "others still use the place";
  later->succeed();
  loader.wait_idle();
  EXPECT_TRUE(second->loaded.done());
  world.expect_version(0, *second, 2);
}

TEST(ShardLoader, WhatItsUpdateHandsOverNeedsNoWrite) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.make_loader(LoaderWorld::buffer_for_blocks(1));
  world.store().hold(StoreCall::kWrite, "'p0'");
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  world.write_version(0, 2);
  world.expect_load(0);  // while the write is held
  EXPECT_TRUE(world.store().names_read().empty());
  world.store().release();
  world.expect_load(0);
  EXPECT_EQ(world.store().names_read().size(), 1U);
}

TEST(ShardLoader, BringsAreCarriedOutInTheOrderOfTheirCalls) {
  LoaderWorld world;
  for (int i = 0; i < 3; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  world.params()[2].set_updated(Pending(update));
  Places places;
  for (const int id : {1, 2, 0}) {
    places.push_back(world.start_load(id));
  }
  places[0]->loaded.wait();
  let_others_run();
  EXPECT_FALSE(places[1]->loaded.done());
  EXPECT_FALSE(places[2]->loaded.done()) << "p0 could be read, but it is not its turn";
  EXPECT_EQ(world.store().names_read().size(), 1U);
  update->succeed();
  loader.wait_idle();
  EXPECT_EQ(
      world.store().names_read(),
      (std::vector<std::string>{world.extent_name(1), world.extent_name(2), world.extent_name(0)}));
  EXPECT_TRUE(places[2]->loaded.done());
}

TEST(ShardLoader, AnUpdateThatComesAfterABringWasAskedForIsNotWaitedFor) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.make_loader(kSmallestLoaderBytes);
  auto first = std::make_shared<Completion>();
  world.params()[0].set_updated(Pending(first));
  const auto place = world.start_load(0);
  world.params()[0].set_updated(Pending(std::make_shared<Completion>()));
  first->succeed();
  place->loaded.wait();
  world.expect_version(0, *place, 1);
}

TEST(ShardLoader, WhileATileIsCopiedTheNextIsRead) {
  LoaderWorld world;
  world.add(6 * kShardStep);
  world.make_loader(kSmallestLoaderBytes);
  world.store().hold(StoreCall::kRead, "'p0'");
  const auto place = world.start_load(0);
  world.store().wait_for_seen(2);
  let_others_run();
  EXPECT_EQ(world.store().names_read().size(), 2U) << "two tiles are all there is";
  EXPECT_TRUE(world.store().release_one());
  world.store().wait_for_seen(3);
  EXPECT_FALSE(place->loaded.done());
  for (std::size_t tile = 3; tile < 6; ++tile) {
    EXPECT_TRUE(world.store().release_one());
    world.store().wait_for_seen(tile + 1);
  }
  world.store().release();
  place->loaded.wait();
  world.expect_version(0, *place, 1);
}

}  // namespace
}  // namespace tessera::coordinator
