// What a feed does when shards change, reads and writes fail, everything happens at once, or it has
// to go.
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/loader_world.h"
#include "tests/support/expect_names.h"

namespace tessera::coordinator {
namespace {

using device::Completion;
using device::Pending;
using shard::kShardStep;
using tessera::support::expect_names;
using tessera::support::StoreCall;

TEST(ShardLoaderForgets, AShardThatIsReadAgain) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(4));
  loader.read_ahead(std::vector<int>{0, 1});
  world.set_version(0, 2);
  world.set_version(1, 2);
  loader.forget(0);
  world.expect_load(0);
  const auto stale = world.start_load(1);
  stale->loaded.wait();
  world.expect_version(1, *stale, 1);  // nobody said that it had changed
  loader.forget(1);                      // what is not there
  loader.forget_all();
}

TEST(ShardLoaderForgets, AllBeforeAnUpdate) {
  LoaderWorld world;
  for (int i = 0; i < 4; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(3));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  loader.read_ahead(std::vector<int>{1, 2, 3});
  loader.forget_all();
  for (int id = 0; id < 4; ++id) {
    world.set_version(id, 3);
  }
  world.store().clear_seen();
  world.expect_load(0);
  EXPECT_EQ(world.store().names_read(), std::vector<std::string>{world.extent_name(0)})
      << "the list is forgotten, too";
  EXPECT_EQ(world.offer(1, 4, kBlockNumel), 1) << "the window is empty";
  EXPECT_EQ(world.offer(2, 4, kBlockNumel), 1);
  EXPECT_EQ(world.offer(3, 4, kBlockNumel), 1);
}

TEST(ShardLoaderForgets, WhatWasReadAheadButNotWhatTheUpdateHandedOver) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(4));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  world.set_version(0, 2);
  loader.read_ahead(std::vector<int>{0, 1});
  loader.forget_read_ahead();
  world.store().clear_seen();
  world.expect_load(0);
  world.expect_load(1);
  EXPECT_EQ(world.store().names_read(), std::vector<std::string>{world.extent_name(1)});
}

TEST(ShardLoaderForgets, OnlyAfterTheReadThatIsUnderWay) {
  for (const bool all : {false, true}) {
    LoaderWorld world;
    world.add(kBlockNumel);
    ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(1));
    world.store().hold(StoreCall::kRead, "'p0'");
    loader.read_ahead(std::vector<int>{0});
    std::atomic<bool> is_released{false};
    std::thread forgets([&] {
      all ? loader.forget_all() : loader.forget(0);
      EXPECT_TRUE(is_released) << "memory that is being read into was given back";
    });
    let_others_run();
    is_released = true;
    world.store().release();
    forgets.join();
    EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1) << "its memory is free";
  }
}

TEST(ShardLoaderFails, WithTheNameOfTheParameterThatCannotBeRead) {
  LoaderWorld world;
  world.add(3 * kShardStep);
  world.add(3 * kShardStep);
  ShardLoader& loader = world.make_loader(kSmallestLoaderBytes);
  world.store().fail(StoreCall::kRead, "'p0'");
  const auto failed = world.start_load(0);
  const auto other = world.start_load(1);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  other->loaded.wait();
  world.expect_version(1, *other, 1);
  std::vector<std::byte> to(world.shard_of(0, 1).size());
  expect_names<IoError>([&] { loader.read(world.params()[0], to.data()); }, "'p0'");
  world.store().clear_rules();
  world.expect_load(0);
}

TEST(ShardLoaderFails, NotForAReadAheadThatNobodyAskedFor) {
  LoaderWorld world;
  for (int i = 0; i < 3; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(3));
  world.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector<int>{0, 1, 2});
  world.expect_load(0);
  world.expect_load(2);
  const auto failed = world.start_load(1);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p1'");
  loader.read_ahead(std::vector<int>{1});
  world.store().clear_rules();
  world.expect_load(1);  // read ahead in vain, read again
  world.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector<int>{1});
  loader.forget_all();
}

TEST(ShardLoaderFails, WithTheNameOfTheParameterThatCouldNotBeWritten) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(4));
  world.store().fail(StoreCall::kWrite, "'p0'");
  world.write_version(0, 2);
  loader.read_ahead(std::vector<int>{0, 1});
  EXPECT_TRUE(world.store().names_read().empty()) << "bytes of two versions";
  const auto failed = world.start_load(0);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  EXPECT_EQ(failed->bytes[0], std::byte{0x5a});
  world.expect_load(1);
  const std::vector<std::byte> bytes = world.shard_of(1, 2);
  world.store().fail(StoreCall::kWrite, "'p1'");
  expect_names<IoError>([&] { loader.write(world.params()[1], 0, kBlockNumel, bytes.data()); },
                        "'p1'");
}

TEST(ShardLoaderFails, AsTheUpdateDidOrThePlace) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.make_loader(LoaderWorld::buffer_for_blocks(1));
  const Pending no_place =
      Pending::failed(std::make_exception_ptr(DeviceError("the place is no more")));
  const auto first = world.start_load(0, no_place);
  expect_names<DeviceError>([&] { first->loaded.wait(); }, "no more");
  world.params()[0].set_updated(
      Pending::failed(std::make_exception_ptr(ConfigError("the update went wrong"))));
  world.loader().read_ahead(std::vector<int>{0});
  const auto second = world.start_load(0);
  expect_names<ConfigError>([&] { second->loaded.wait(); }, "the update went wrong");
}

TEST(ShardLoaderFails, OnlyWhenItsOtherTileIsNoLongerReadInto) {
  LoaderWorld world;
  world.add(3 * kShardStep);
  world.add(kShardStep);
  world.make_loader(kSmallestLoaderBytes);
  // The first tile fails, the second is held.
  world.store().hold(StoreCall::kRead, "'p1'");
  auto place_of_p1 = world.start_load(1);
  world.store().wait_for_seen(1);
  world.store().clear_rules();
  const auto failed = world.start_load(0);
  auto later = std::make_shared<Completion>();
  const auto last = world.start_load(1, Pending(later));
  world.store().fail_once(StoreCall::kRead, "'p0'");
  world.store().hold(StoreCall::kRead, "'p0'");
  EXPECT_TRUE(world.store().release_one());
  place_of_p1->loaded.wait();
  world.store().wait_for_seen(3);
  let_others_run();
  EXPECT_FALSE(failed->loaded.done());
  world.store().release();
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  later->succeed();
  last->loaded.wait();
  world.expect_version(1, *last, 1);
}

TEST(ShardLoader, IsWrittenToFromOutsideWhileItBringsInTiles) {
  LoaderWorld world;
  world.add(5 * kShardStep);
  world.add(8);
  ShardLoader& loader = world.make_loader(kSmallestLoaderBytes);
  // The write of one block has a tile when the bring takes the other; when it is given back, the
  // place that is free must do for a tile.
  world.store().hold(StoreCall::kWrite, "'p1'");
  const std::vector<std::byte> bytes = world.shard_of(1, 2);
  std::thread writer([&] { loader.write(world.params()[1], 0, 8, bytes.data()); });
  world.store().wait_for_seen(1);
  const auto place = world.start_load(0);
  world.store().wait_for_seen(2);
  world.store().release();
  writer.join();
  place->loaded.wait();
  world.expect_version(0, *place, 1);
  world.set_version(1, 2);
  world.expect_load(1);
}

TEST(ShardLoaderEnds, AfterWhatWasAskedFor) {
  LoaderWorld world;
  world.add(3 * kShardStep);
  world.add(kBlockNumel);
  world.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  world.params()[1].set_updated(Pending(update));
  const auto first = world.start_load(0);
  const auto second = world.start_load(1);
  std::thread updates([&] { update->succeed(); });
  world.destroy_loader();
  updates.join();
  EXPECT_TRUE(first->loaded.done());
  EXPECT_TRUE(second->loaded.done());
  world.expect_version(0, *first, 1);
  world.expect_version(1, *second, 1);
}

TEST(ShardLoaderEnds, AlsoWithFailuresAListAndAFullWindow) {
  LoaderWorld world;
  for (int i = 0; i < 5; ++i) {
    world.add(kBlockNumel);
  }
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(2));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  world.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector<int>{1, 2, 3});
  const auto failed = world.start_load(1);
  world.destroy_loader();
  EXPECT_THROW(failed->loaded.wait(), IoError);
}

TEST(ShardLoaderEnds, AfterTheReadsThatAreUnderWay) {
  LoaderWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(2));
  world.store().hold(StoreCall::kRead, "'p");
  loader.read_ahead(std::vector<int>{0, 1});
  std::atomic<bool> is_released{false};
  std::thread releases([&] {
    let_others_run();
    is_released = true;
    world.store().release();
  });
  world.destroy_loader();
  EXPECT_TRUE(is_released) << "memory that is being read into is gone";
  releases.join();
}

TEST(ShardLoaderEnds, WithoutHavingBeenUsed) {
  LoaderWorld world;
  world.make_loader(kSmallestLoaderBytes);
}

// An update that hands over and writes on a thread of its own, while shards are brought and read
// ahead: every bring sees the version that was current when it was asked for.
TEST(ShardLoader, BringsTheNewestVersionWhileUpdatesRun) {
  constexpr int kParams = 9;
  for (const std::size_t blocks : {0, 3, 20}) {
    LoaderWorld world;
    for (int i = 0; i < kParams; ++i) {
      world.add(i % 4 == 3 ? 3 * kShardStep + 5 : kBlockNumel - i * 100);
    }
    ShardLoader& loader = world.make_loader(LoaderWorld::buffer_for_blocks(blocks));
    for (int version = 2; version < 12; ++version) {
      std::array<std::shared_ptr<Completion>, kParams> updates;
      loader.forget_all();
      for (int id = 0; id < kParams; ++id) {
        updates[static_cast<std::size_t>(id)] = std::make_shared<Completion>();
        world.params()[id].set_updated(Pending(updates[static_cast<std::size_t>(id)]));
      }
      std::thread updater([&] {
        for (int id = 0; id < kParams; ++id) {
          std::ignore = world.offer(id, version, kShardStep);
          world.write_version(id, version);
          updates[static_cast<std::size_t>(id)]->succeed();
        }
      });
      std::vector<std::unique_ptr<LoaderWorld::Place>> places;
      for (int id = 0; id < kParams; ++id) {
        places.push_back(world.start_load(id));
        loader.read_ahead(std::vector<int>{(id + 1) % kParams, (id + 2) % kParams});
      }
      for (int id = 0; id < kParams; ++id) {
        places[static_cast<std::size_t>(id)]->loaded.wait();
        world.expect_version(id, *places[static_cast<std::size_t>(id)], version);
      }
      updater.join();
      for (int id = kParams; id-- > 0;) {
        world.expect_load(id);
      }
    }
    const LoaderStats stats = loader.take_stats(Tier::kNvme);
    std::uint64_t all = 0;
    for (int id = 0; id < kParams; ++id) {
      all += world.params()[id].layout().shard_bytes();
    }
    EXPECT_EQ(stats.loaded_bytes, 20 * all);
    EXPECT_LE(stats.from_update_bytes + stats.read_ahead_bytes, stats.loaded_bytes);
  }
}

}  // namespace
}  // namespace tessera::coordinator
