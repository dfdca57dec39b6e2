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

#include "tests/coordinator/feed_world.h"
#include "tests/support/expect_names.h"

namespace tessera::coordinator {
namespace {

using device::Completion;
using device::Pending;
using shard::kShardStep;
using tessera::support::expect_names;
using tessera::support::StoreCall;

TEST(ShardFeedForgets, AShardThatIsReadAgain) {
  FeedWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(4));
  feed.read_ahead(std::vector<int>{0, 1});
  world.set_version(0, 2);
  world.set_version(1, 2);
  feed.forget(0);
  world.expect_bring(0);
  const auto stale = world.start_bring(1);
  stale->brought.wait();
  world.expect_version(1, *stale, 1);  // nobody said that it had changed
  feed.forget(1);                      // what is not there
  feed.forget_all();
}

TEST(ShardFeedForgets, AllBeforeAnUpdate) {
  FeedWorld world;
  for (int i = 0; i < 4; ++i) {
    world.add(kBlockNumel);
  }
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(3));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  feed.read_ahead(std::vector<int>{1, 2, 3});
  feed.forget_all();
  for (int id = 0; id < 4; ++id) {
    world.set_version(id, 3);
  }
  world.store().clear_seen();
  world.expect_bring(0);
  EXPECT_EQ(world.store().names_read(), std::vector<std::string>{world.extent_name(0)})
      << "the list is forgotten, too";
  EXPECT_EQ(world.offer(1, 4, kBlockNumel), 1) << "the window is empty";
  EXPECT_EQ(world.offer(2, 4, kBlockNumel), 1);
  EXPECT_EQ(world.offer(3, 4, kBlockNumel), 1);
}

TEST(ShardFeedForgets, WhatWasReadAheadButNotWhatTheUpdateHandedOver) {
  FeedWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(4));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  world.set_version(0, 2);
  feed.read_ahead(std::vector<int>{0, 1});
  feed.forget_read_ahead();
  world.store().clear_seen();
  world.expect_bring(0);
  world.expect_bring(1);
  EXPECT_EQ(world.store().names_read(), std::vector<std::string>{world.extent_name(1)});
}

TEST(ShardFeedForgets, OnlyAfterTheReadThatIsUnderWay) {
  for (const bool all : {false, true}) {
    FeedWorld world;
    world.add(kBlockNumel);
    ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(1));
    world.store().hold(StoreCall::kRead, "'p0'");
    feed.read_ahead(std::vector<int>{0});
    std::atomic<bool> is_released{false};
    std::thread forgets([&] {
      all ? feed.forget_all() : feed.forget(0);
      EXPECT_TRUE(is_released) << "memory that is being read into was given back";
    });
    let_others_run();
    is_released = true;
    world.store().release();
    forgets.join();
    EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1) << "its memory is free";
  }
}

TEST(ShardFeedFails, WithTheNameOfTheParameterThatCannotBeRead) {
  FeedWorld world;
  world.add(3 * kShardStep);
  world.add(3 * kShardStep);
  ShardFeed& feed = world.make_feed(kSmallestFeedBytes);
  world.store().fail(StoreCall::kRead, "'p0'");
  const auto failed = world.start_bring(0);
  const auto other = world.start_bring(1);
  expect_names<IoError>([&] { failed->brought.wait(); }, "'p0'");
  other->brought.wait();
  world.expect_version(1, *other, 1);
  std::vector<std::byte> to(world.shard_of(0, 1).size());
  expect_names<IoError>([&] { feed.read(world.params()[0], to.data()); }, "'p0'");
  world.store().clear_rules();
  world.expect_bring(0);
}

TEST(ShardFeedFails, NotForAReadAheadThatNobodyAskedFor) {
  FeedWorld world;
  for (int i = 0; i < 3; ++i) {
    world.add(kBlockNumel);
  }
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(3));
  world.store().fail(StoreCall::kRead, "'p1'");
  feed.read_ahead(std::vector<int>{0, 1, 2});
  world.expect_bring(0);
  world.expect_bring(2);
  const auto failed = world.start_bring(1);
  expect_names<IoError>([&] { failed->brought.wait(); }, "'p1'");
  feed.read_ahead(std::vector<int>{1});
  world.store().clear_rules();
  world.expect_bring(1);  // read ahead in vain, read again
  world.store().fail(StoreCall::kRead, "'p1'");
  feed.read_ahead(std::vector<int>{1});
  feed.forget_all();
}

TEST(ShardFeedFails, WithTheNameOfTheParameterThatCouldNotBeWritten) {
  FeedWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(4));
  world.store().fail(StoreCall::kWrite, "'p0'");
  world.write_version(0, 2);
  feed.read_ahead(std::vector<int>{0, 1});
  EXPECT_TRUE(world.store().names_read().empty()) << "bytes of two versions";
  const auto failed = world.start_bring(0);
  expect_names<IoError>([&] { failed->brought.wait(); }, "'p0'");
  EXPECT_EQ(failed->bytes[0], std::byte{0x5a});
  world.expect_bring(1);
  const std::vector<std::byte> bytes = world.shard_of(1, 2);
  world.store().fail(StoreCall::kWrite, "'p1'");
  expect_names<IoError>([&] { feed.write(world.params()[1], 0, kBlockNumel, bytes.data()); },
                        "'p1'");
}

TEST(ShardFeedFails, AsTheUpdateDidOrThePlace) {
  FeedWorld world;
  world.add(kBlockNumel);
  world.make_feed(FeedWorld::buffer_for_blocks(1));
  const Pending no_place =
      Pending::failed(std::make_exception_ptr(DeviceError("the place is no more")));
  const auto first = world.start_bring(0, no_place);
  expect_names<DeviceError>([&] { first->brought.wait(); }, "no more");
  world.params()[0].set_updated(
      Pending::failed(std::make_exception_ptr(ConfigError("the update went wrong"))));
  world.feed().read_ahead(std::vector<int>{0});
  const auto second = world.start_bring(0);
  expect_names<ConfigError>([&] { second->brought.wait(); }, "the update went wrong");
}

TEST(ShardFeedFails, OnlyWhenItsOtherTileIsNoLongerReadInto) {
  FeedWorld world;
  world.add(3 * kShardStep);
  world.add(kShardStep);
  world.make_feed(kSmallestFeedBytes);
  // The first tile fails, the second is held.
  world.store().hold(StoreCall::kRead, "'p1'");
  auto place_of_p1 = world.start_bring(1);
  world.store().wait_for_seen(1);
  world.store().clear_rules();
  const auto failed = world.start_bring(0);
  auto later = std::make_shared<Completion>();
  const auto last = world.start_bring(1, Pending(later));
  world.store().fail_once(StoreCall::kRead, "'p0'");
  world.store().hold(StoreCall::kRead, "'p0'");
  EXPECT_TRUE(world.store().release_one());
  place_of_p1->brought.wait();
  world.store().wait_for_seen(3);
  let_others_run();
  EXPECT_FALSE(failed->brought.done());
  world.store().release();
  expect_names<IoError>([&] { failed->brought.wait(); }, "'p0'");
  later->succeed();
  last->brought.wait();
  world.expect_version(1, *last, 1);
}

TEST(ShardFeed, IsWrittenToFromOutsideWhileItBringsInTiles) {
  FeedWorld world;
  world.add(5 * kShardStep);
  world.add(8);
  ShardFeed& feed = world.make_feed(kSmallestFeedBytes);
  // The write of one block has a tile when the bring takes the other; when it is given back, the
  // place that is free must do for a tile.
  world.store().hold(StoreCall::kWrite, "'p1'");
  const std::vector<std::byte> bytes = world.shard_of(1, 2);
  std::thread writer([&] { feed.write(world.params()[1], 0, 8, bytes.data()); });
  world.store().wait_for_seen(1);
  const auto place = world.start_bring(0);
  world.store().wait_for_seen(2);
  world.store().release();
  writer.join();
  place->brought.wait();
  world.expect_version(0, *place, 1);
  world.set_version(1, 2);
  world.expect_bring(1);
}

TEST(ShardFeedEnds, AfterWhatWasAskedFor) {
  FeedWorld world;
  world.add(3 * kShardStep);
  world.add(kBlockNumel);
  world.make_feed(kSmallestFeedBytes);
  auto update = std::make_shared<Completion>();
  world.params()[1].set_updated(Pending(update));
  const auto first = world.start_bring(0);
  const auto second = world.start_bring(1);
  std::thread updates([&] { update->succeed(); });
  world.destroy_feed();
  updates.join();
  EXPECT_TRUE(first->brought.done());
  EXPECT_TRUE(second->brought.done());
  world.expect_version(0, *first, 1);
  world.expect_version(1, *second, 1);
}

TEST(ShardFeedEnds, AlsoWithFailuresAListAndAFullWindow) {
  FeedWorld world;
  for (int i = 0; i < 5; ++i) {
    world.add(kBlockNumel);
  }
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(2));
  EXPECT_EQ(world.offer(0, 2, kBlockNumel), 1);
  world.store().fail(StoreCall::kRead, "'p1'");
  feed.read_ahead(std::vector<int>{1, 2, 3});
  const auto failed = world.start_bring(1);
  world.destroy_feed();
  EXPECT_THROW(failed->brought.wait(), IoError);
}

TEST(ShardFeedEnds, AfterTheReadsThatAreUnderWay) {
  FeedWorld world;
  world.add(kBlockNumel);
  world.add(kBlockNumel);
  ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(2));
  world.store().hold(StoreCall::kRead, "'p");
  feed.read_ahead(std::vector<int>{0, 1});
  std::atomic<bool> is_released{false};
  std::thread releases([&] {
    let_others_run();
    is_released = true;
    world.store().release();
  });
  world.destroy_feed();
  EXPECT_TRUE(is_released) << "memory that is being read into is gone";
  releases.join();
}

TEST(ShardFeedEnds, WithoutHavingBeenUsed) {
  FeedWorld world;
  world.make_feed(kSmallestFeedBytes);
}

// An update that hands over and writes on a thread of its own, while shards are brought and read
// ahead: every bring sees the version that was current when it was asked for.
TEST(ShardFeed, BringsTheNewestVersionWhileUpdatesRun) {
  constexpr int kParams = 9;
  for (const std::size_t blocks : {0, 3, 20}) {
    FeedWorld world;
    for (int i = 0; i < kParams; ++i) {
      world.add(i % 4 == 3 ? 3 * kShardStep + 5 : kBlockNumel - i * 100);
    }
    ShardFeed& feed = world.make_feed(FeedWorld::buffer_for_blocks(blocks));
    for (int version = 2; version < 12; ++version) {
      std::array<std::shared_ptr<Completion>, kParams> updates;
      feed.forget_all();
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
      std::vector<std::unique_ptr<FeedWorld::Place>> places;
      for (int id = 0; id < kParams; ++id) {
        places.push_back(world.start_bring(id));
        feed.read_ahead(std::vector<int>{(id + 1) % kParams, (id + 2) % kParams});
      }
      for (int id = 0; id < kParams; ++id) {
        places[static_cast<std::size_t>(id)]->brought.wait();
        world.expect_version(id, *places[static_cast<std::size_t>(id)], version);
      }
      updater.join();
      for (int id = kParams; id-- > 0;) {
        world.expect_bring(id);
      }
    }
    const FeedStats stats = feed.take_stats();
    std::uint64_t all = 0;
    for (int id = 0; id < kParams; ++id) {
      all += world.params()[id].layout().shard_bytes();
    }
    EXPECT_EQ(stats.brought_bytes, 20 * all);
    EXPECT_LE(stats.from_update_bytes + stats.read_ahead_bytes, stats.brought_bytes);
  }
}

}  // namespace
}  // namespace tessera::coordinator
