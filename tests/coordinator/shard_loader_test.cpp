// Shards are loaded with the right bytes, each read as often as it must be, in the order of use;
// and what a loader does when shards change, reads and writes fail, everything happens at once, or
// it has to go.
#include "tessera/coordinator/shard_loader.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/expect_names.h"

namespace tessera::coordinator {
namespace {

using shard::kShardStep;
using support::expect_names;
using Destinations = std::vector<std::unique_ptr<LoaderFixture::Destination>>;

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

TEST(LoaderSizes, BelowTheSmallestSumThereIsNoLoader) {
  LoaderFixture rank;
  EXPECT_THROW(rank.make_loader(kSmallestLoaderBytes - 1), InternalError);
}

// numel, ranks, rank, type, bytes of buffers
using Shape = std::tuple<std::int64_t, int, int, DType, std::size_t>;

class EveryShape : public ::testing::TestWithParam<Shape> {
 protected:
  EveryShape() : rank_(std::get<2>(GetParam()), std::get<1>(GetParam())) {
    rank_.add(7, std::get<3>(GetParam()));
    rank_.add(std::get<0>(GetParam()), std::get<3>(GetParam()));
    rank_.add(7, std::get<3>(GetParam()));
    rank_.make_loader(std::get<4>(GetParam()));
  }
  const shard::Param& param() { return rank_.params()[1]; }
  std::size_t shard_bytes() { return param().layout().shard_bytes(); }
  bool fits_window() { return tier::whole_blocks(shard_bytes()) <= rank_.loader().window_bytes(); }

  LoaderFixture rank_;
};

TEST_P(EveryShape, IsStreamedFromTheStoreAndReadOnce) {
  rank_.expect_load(1);
  EXPECT_EQ(rank_.store().stats().read_bytes, tier::whole_blocks(shard_bytes()));
  EXPECT_EQ(rank_.store().stats().written_bytes, 0U) << "nothing has changed";
  const LoaderStats stats = rank_.loader().take_stats(Tier::kNvme);
  EXPECT_EQ(stats.loaded_bytes, shard_bytes());
  EXPECT_EQ(stats.read_ahead_bytes, 0U);
  EXPECT_EQ(stats.from_update_bytes, 0U);
  EXPECT_EQ(rank_.loader().take_stats(Tier::kNvme).loaded_bytes, 0U) << "taken";
}

TEST_P(EveryShape, IsTakenFromTheWindowIfItWasReadAhead) {
  rank_.loader().read_ahead(std::vector{1});
  const std::size_t read = rank_.store().stats().read_bytes;
  EXPECT_EQ(read, fits_window() ? tier::whole_blocks(shard_bytes()) : 0U);
  rank_.expect_load(1);
  EXPECT_EQ(rank_.store().stats().read_bytes, tier::whole_blocks(shard_bytes()));
  EXPECT_EQ(rank_.loader().take_stats(Tier::kNvme).read_ahead_bytes,
            fits_window() ? shard_bytes() : 0U);
  rank_.expect_load(1);
  EXPECT_EQ(rank_.store().stats().read_bytes, 2 * tier::whole_blocks(shard_bytes()))
      << "its room in the window was given back";
}

TEST_P(EveryShape, IsTakenFromItsUpdateAndNotRead) {
  for (const std::int64_t step : {param().layout().shard_numel() + 1, kShardStep}) {
    rank_.store().clear_seen();
    const bool offers = fits_window() && param().range().numel > 0;
    const int num_taken = rank_.pass_on(1, 2, step);
    EXPECT_EQ(num_taken, offers ? (param().range().numel + step - 1) / step : 0);
    rank_.set_version(1, 2);
    rank_.expect_load(1);
    EXPECT_EQ(rank_.store().stats().read_bytes, offers ? 0U : tier::whole_blocks(shard_bytes()));
    EXPECT_EQ(rank_.loader().take_stats(Tier::kNvme).from_update_bytes,
              offers ? shard_bytes() : 0U);
  }
}

TEST_P(EveryShape, IsWrittenAndReadFromOutsideOfAStep) {
  const std::vector<std::byte> bytes = rank_.shard_of(1, 5);
  const std::int64_t real = param().range().numel;
  const std::int64_t first = std::min(real, 2 * kShardStep);
  const std::size_t element = bytes_of(param().layout().dtype());
  rank_.loader().write(param(), 0, first, bytes.data());
  if (first < real) {
    rank_.loader().write(param(), first, real - first,
                         bytes.data() + static_cast<std::size_t>(first) * element);
  }
  EXPECT_EQ(rank_.store().stats().written_bytes, tier::whole_blocks(shard_bytes()));
  std::vector<std::byte> to(bytes.size());
  rank_.loader().read(param(), to.data());
  EXPECT_EQ(to, bytes);
  rank_.expect_load(0);
  rank_.expect_load(2);
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
  LoaderFixture rank;
  rank.add(2 * kShardStep);
  rank.add(kShardStep);
  ShardLoader& loader = rank.make_loader_for_blocks(5);
  const std::vector<std::byte> first = rank.shard_of(0, 2);
  const std::byte* second = first.data() + kShardStep * 4;
  EXPECT_FALSE(loader.receive(0, kShardStep, kShardStep, second)) << "not from the beginning";
  EXPECT_TRUE(loader.receive(0, 0, kShardStep, first.data()));
  EXPECT_FALSE(loader.receive(0, 0, kShardStep, first.data())) << "again";
  EXPECT_FALSE(loader.receive(1, 0, kShardStep, first.data())) << "one block is left, it needs two";
  rank.set_version(0, 2);
  rank.expect_load(0);
  EXPECT_EQ(loader.take_stats(Tier::kNvme).from_update_bytes, 0U) << "half of it was offered";
  EXPECT_TRUE(loader.receive(0, kShardStep, kShardStep, second));
  rank.store().clear_seen();
  rank.expect_load(0);
  EXPECT_EQ(rank.store().stats().read_bytes, 0U);
  EXPECT_TRUE(loader.receive(1, 0, kShardStep, rank.shard_of(1, 2).data()))
      << "there is room again";
}

TEST(ShardLoader, RefusesAnUpdateOfWhatIsBeingRead) {
  LoaderFixture rank;
  rank.add(8);
  ShardLoader& loader = rank.make_loader_for_blocks(4);
  loader.read_ahead(std::vector{0});
  EXPECT_EQ(rank.pass_on(0, 2, 8), 0);
}

TEST(ShardLoader, ReadsAheadInTheOrderOfUseAsFarAsTheWindowGoes) {
  LoaderFixture rank;
  rank.add_blocks(6);
  ShardLoader& loader = rank.make_loader_for_blocks(3);
  loader.read_ahead(std::vector{4, 1, 5, 0, 2});
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({4, 1, 5}));
  loader.read_ahead(std::vector{4, 1, 5, 0, 2});
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({4, 1, 5})) << "they are there";
  rank.expect_load(4);
  loader.wait_idle();
  rank.store().wait_for_seen(4);
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({4, 1, 5, 0}))
      << "as soon as there is room";
  rank.expect_load(2);  // not in the order that was foretold
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({4, 1, 5, 0, 2}));
  for (const int id : {1, 5, 0}) {
    rank.expect_load(id);
  }
  EXPECT_EQ(rank.store().names_read().size(), 5U) << "none is read twice";
  EXPECT_EQ(loader.take_stats(Tier::kNvme).read_ahead_bytes, 4U * 4096);
}

TEST(ShardLoader, ReadsStopAtTheFirstShardThatCannotBeReadYet) {
  LoaderFixture rank;
  rank.add_blocks(3);
  rank.add(9 * kBlockNumel);
  ShardLoader& loader = rank.make_loader_for_blocks(8);
  const std::vector<int> order{0, 1, 2};
  auto update = std::make_shared<Completion>();
  rank.params()[1].set_updated(Pending(update));
  loader.read_ahead(order);
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({0})) << "the update of p1 is not done";
  rank.store().hold(StoreCall::kWrite, "'p1'");
  rank.write_version(1, 2);
  update->succeed();
  loader.read_ahead(order);
  EXPECT_EQ(rank.store().names_read().size(), 1U) << "p1 is not written";
  rank.store().release();
  loader.read_ahead(order);
  EXPECT_EQ(rank.store().names_read().size(), 3U);
  rank.expect_load(1);
  loader.read_ahead(std::vector{3, 1});
  EXPECT_EQ(rank.store().names_read().size(), 3U) << "p3 is larger than the window";
}

TEST(ShardLoader, WhatWasReadInVainMakesRoom) {
  LoaderFixture rank;
  rank.add_blocks(6);
  ShardLoader& loader = rank.make_loader_for_blocks(3);
  EXPECT_EQ(rank.pass_on(5, 2), 1);
  loader.read_ahead(std::vector{0, 1});
  loader.read_ahead(std::vector{1, 2, 3, 4});
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({0, 1, 2}))
      << "p0 goes; p1 is on the list, p5 came from its update";
  rank.store().clear_seen();
  rank.set_version(5, 2);
  for (const int id : {1, 2, 5}) {
    rank.expect_load(id);
  }
  EXPECT_EQ(loader.take_stats(Tier::kNvme).from_update_bytes, 4096U);
  const std::vector<std::string> read = rank.store().names_read();
  for (const int id : {1, 2, 5}) {
    EXPECT_EQ(std::count(read.begin(), read.end(), rank.extent_name(id)), 0) << id;
  }
}

TEST(ShardLoader, ALoadWaitsForTheUpdateItsWritesAndTheDestination) {
  LoaderFixture rank;
  rank.add(3 * kShardStep);
  ShardLoader& loader = rank.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  auto ready = std::make_shared<Completion>();
  rank.params()[0].set_updated(Pending(update));
  const auto destination = rank.start_load(0, Pending(ready));
  ready->succeed();
  let_others_run();
  EXPECT_FALSE(destination->loaded.done()) << "the update is not done";
  rank.store().hold(StoreCall::kWrite, "'p0'");
  rank.write_version(0, 2);
  update->succeed();
  let_others_run();
  EXPECT_FALSE(destination->loaded.done()) << "its write is not done";
  EXPECT_TRUE(rank.store().names_read().empty());
  rank.store().release();
  destination->loaded.wait();
  rank.expect_version(0, *destination, 2);

  auto later = std::make_shared<Completion>();
  rank.store().clear_seen();
  const auto second = rank.start_load(0, Pending(later));
  let_others_run();
  EXPECT_FALSE(second->loaded.done());
  EXPECT_EQ(second->bytes[0], std::byte{0x5a}) << "others still use the memory";
  later->succeed();
  loader.wait_idle();
  EXPECT_TRUE(second->loaded.done());
  rank.expect_version(0, *second, 2);
}

TEST(ShardLoader, WhatItsUpdateHandsOverNeedsNoWrite) {
  LoaderFixture rank;
  rank.add(kBlockNumel);
  rank.make_loader_for_blocks(1);
  rank.store().hold(StoreCall::kWrite, "'p0'");
  EXPECT_EQ(rank.pass_on(0, 2), 1);
  rank.write_version(0, 2);
  rank.expect_load(0);  // while the write is held
  EXPECT_TRUE(rank.store().names_read().empty());
  rank.store().release();
  rank.expect_load(0);
  EXPECT_EQ(rank.store().names_read().size(), 1U);
}

TEST(ShardLoader, LoadsAreCarriedOutInTheOrderOfTheirCalls) {
  LoaderFixture rank;
  rank.add_blocks(3);
  ShardLoader& loader = rank.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  rank.params()[2].set_updated(Pending(update));
  Destinations destinations;
  for (const int id : {1, 2, 0}) {
    destinations.push_back(rank.start_load(id));
  }
  destinations[0]->loaded.wait();
  let_others_run();
  EXPECT_FALSE(destinations[1]->loaded.done());
  EXPECT_FALSE(destinations[2]->loaded.done()) << "p0 could be read, but it is not its turn";
  EXPECT_EQ(rank.store().names_read().size(), 1U);
  update->succeed();
  loader.wait_idle();
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({1, 2, 0}));
  EXPECT_TRUE(destinations[2]->loaded.done());
}

TEST(ShardLoader, AnUpdateThatComesAfterALoadWasAskedForIsNotWaitedFor) {
  LoaderFixture rank;
  rank.add(kBlockNumel);
  rank.make_loader(kSmallestLoaderBytes);
  auto first = std::make_shared<Completion>();
  rank.params()[0].set_updated(Pending(first));
  const auto destination = rank.start_load(0);
  rank.params()[0].set_updated(Pending(std::make_shared<Completion>()));
  first->succeed();
  destination->loaded.wait();
  rank.expect_version(0, *destination, 1);
}

TEST(ShardLoader, WhileATileIsCopiedTheNextIsRead) {
  LoaderFixture rank;
  rank.add(6 * kShardStep);
  rank.make_loader(kSmallestLoaderBytes);
  rank.store().hold(StoreCall::kRead, "'p0'");
  const auto destination = rank.start_load(0);
  rank.store().wait_for_seen(2);
  let_others_run();
  EXPECT_EQ(rank.store().names_read().size(), 2U) << "two tiles are all there is";
  EXPECT_TRUE(rank.store().release_one());
  rank.store().wait_for_seen(3);
  EXPECT_FALSE(destination->loaded.done());
  for (std::size_t tile = 3; tile < 6; ++tile) {
    EXPECT_TRUE(rank.store().release_one());
    rank.store().wait_for_seen(tile + 1);
  }
  rank.store().release();
  destination->loaded.wait();
  rank.expect_version(0, *destination, 1);
}

TEST(ShardLoaderForgets, AShardThatIsReadAgain) {
  LoaderFixture rank;
  rank.add_blocks(2);
  ShardLoader& loader = rank.make_loader_for_blocks(4);
  loader.read_ahead(std::vector{0, 1});
  rank.set_version(0, 2);
  rank.set_version(1, 2);
  loader.forget(0);
  rank.expect_load(0);
  const auto stale = rank.start_load(1);
  stale->loaded.wait();
  rank.expect_version(1, *stale, 1);  // nobody said that it had changed
  loader.forget(1);                   // what is not there
  loader.forget_all();
}

TEST(ShardLoaderForgets, AllBeforeAnUpdate) {
  LoaderFixture rank;
  rank.add_blocks(4);
  ShardLoader& loader = rank.make_loader_for_blocks(3);
  EXPECT_EQ(rank.pass_on(0, 2), 1);
  loader.read_ahead(std::vector{1, 2, 3});
  loader.forget_all();
  for (int id = 0; id < 4; ++id) {
    rank.set_version(id, 3);
  }
  rank.store().clear_seen();
  rank.expect_load(0);
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({0})) << "the list is forgotten, too";
  EXPECT_EQ(rank.pass_on(1, 4), 1) << "the window is empty";
  EXPECT_EQ(rank.pass_on(2, 4), 1);
  EXPECT_EQ(rank.pass_on(3, 4), 1);
}

TEST(ShardLoaderForgets, WhatWasReadAheadButNotWhatTheUpdateHandedOver) {
  LoaderFixture rank;
  rank.add_blocks(2);
  ShardLoader& loader = rank.make_loader_for_blocks(4);
  EXPECT_EQ(rank.pass_on(0, 2), 1);
  rank.set_version(0, 2);
  loader.read_ahead(std::vector{0, 1});
  loader.forget_read_ahead();
  rank.store().clear_seen();
  rank.expect_load(0);
  rank.expect_load(1);
  EXPECT_EQ(rank.store().names_read(), rank.extent_names({1}));
}

TEST(ShardLoaderForgets, OnlyAfterTheReadThatIsUnderWay) {
  for (const bool all : {false, true}) {
    LoaderFixture rank;
    rank.add(kBlockNumel);
    ShardLoader& loader = rank.make_loader_for_blocks(1);
    rank.store().hold(StoreCall::kRead, "'p0'");
    loader.read_ahead(std::vector{0});
    std::atomic<bool> is_released{false};
    std::thread forgets([&] {
      all ? loader.forget_all() : loader.forget(0);
      EXPECT_TRUE(is_released) << "memory that is being read into was given back";
    });
    let_others_run();
    is_released = true;
    rank.store().release();
    forgets.join();
    EXPECT_EQ(rank.pass_on(0, 2), 1) << "its memory is free";
  }
}

TEST(ShardLoaderFails, WithTheNameOfTheParameterThatCannotBeRead) {
  LoaderFixture rank;
  rank.add(3 * kShardStep);
  rank.add(3 * kShardStep);
  ShardLoader& loader = rank.make_loader(kSmallestLoaderBytes);
  rank.store().fail(StoreCall::kRead, "'p0'");
  const auto failed = rank.start_load(0);
  const auto other = rank.start_load(1);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  other->loaded.wait();
  rank.expect_version(1, *other, 1);
  std::vector<std::byte> to(rank.shard_of(0, 1).size());
  expect_names<IoError>([&] { loader.read(rank.params()[0], to.data()); }, "'p0'");
  rank.store().clear_rules();
  rank.expect_load(0);
}

TEST(ShardLoaderFails, NotForAReadAheadThatNobodyAskedFor) {
  LoaderFixture rank;
  rank.add_blocks(3);
  ShardLoader& loader = rank.make_loader_for_blocks(3);
  rank.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector{0, 1, 2});
  rank.expect_load(0);
  rank.expect_load(2);
  const auto failed = rank.start_load(1);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p1'");
  loader.read_ahead(std::vector{1});
  rank.store().clear_rules();
  rank.expect_load(1);  // read ahead in vain, read again
  rank.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector{1});
  loader.forget_all();
}

TEST(ShardLoaderFails, WithTheNameOfTheParameterThatCouldNotBeWritten) {
  LoaderFixture rank;
  rank.add_blocks(2);
  ShardLoader& loader = rank.make_loader_for_blocks(4);
  rank.store().fail(StoreCall::kWrite, "'p0'");
  rank.write_version(0, 2);
  loader.read_ahead(std::vector{0, 1});
  EXPECT_TRUE(rank.store().names_read().empty()) << "bytes of two versions";
  const auto failed = rank.start_load(0);
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  EXPECT_EQ(failed->bytes[0], std::byte{0x5a});
  rank.expect_load(1);
  const std::vector<std::byte> bytes = rank.shard_of(1, 2);
  rank.store().fail(StoreCall::kWrite, "'p1'");
  expect_names<IoError>([&] { loader.write(rank.params()[1], 0, kBlockNumel, bytes.data()); },
                        "'p1'");
}

TEST(ShardLoaderFails, AsTheUpdateDidOrTheDestination) {
  LoaderFixture rank;
  rank.add(kBlockNumel);
  rank.make_loader_for_blocks(1);
  const Pending no_memory =
      Pending::failed(std::make_exception_ptr(DeviceError("the memory is no more")));
  const auto first = rank.start_load(0, no_memory);
  expect_names<DeviceError>([&] { first->loaded.wait(); }, "no more");
  rank.params()[0].set_updated(
      Pending::failed(std::make_exception_ptr(ConfigError("the update went wrong"))));
  rank.loader().read_ahead(std::vector{0});
  const auto second = rank.start_load(0);
  expect_names<ConfigError>([&] { second->loaded.wait(); }, "the update went wrong");
}

TEST(ShardLoaderFails, OnlyWhenItsOtherTileIsNoLongerReadInto) {
  LoaderFixture rank;
  rank.add(3 * kShardStep);
  rank.add(kShardStep);
  rank.make_loader(kSmallestLoaderBytes);
  // The first tile fails, the second is held.
  rank.store().hold(StoreCall::kRead, "'p1'");
  auto first = rank.start_load(1);
  rank.store().wait_for_seen(1);
  rank.store().clear_rules();
  const auto failed = rank.start_load(0);
  auto later = std::make_shared<Completion>();
  const auto last = rank.start_load(1, Pending(later));
  rank.store().fail_once(StoreCall::kRead, "'p0'");
  rank.store().hold(StoreCall::kRead, "'p0'");
  EXPECT_TRUE(rank.store().release_one());
  first->loaded.wait();
  rank.store().wait_for_seen(3);
  let_others_run();
  EXPECT_FALSE(failed->loaded.done());
  rank.store().release();
  expect_names<IoError>([&] { failed->loaded.wait(); }, "'p0'");
  later->succeed();
  last->loaded.wait();
  rank.expect_version(1, *last, 1);
}

TEST(ShardLoader, IsWrittenToFromOutsideWhileItLoadsInTiles) {
  LoaderFixture rank;
  rank.add(5 * kShardStep);
  rank.add(8);
  ShardLoader& loader = rank.make_loader(kSmallestLoaderBytes);
  // The write of one block has a tile when the load takes the other; when it is given back, the
  // lease that is free must do for a tile.
  rank.store().hold(StoreCall::kWrite, "'p1'");
  const std::vector<std::byte> bytes = rank.shard_of(1, 2);
  std::thread writer([&] { loader.write(rank.params()[1], 0, 8, bytes.data()); });
  rank.store().wait_for_seen(1);
  const auto destination = rank.start_load(0);
  rank.store().wait_for_seen(2);
  rank.store().release();
  writer.join();
  destination->loaded.wait();
  rank.expect_version(0, *destination, 1);
  rank.set_version(1, 2);
  rank.expect_load(1);
}

TEST(ShardLoaderEnds, AfterWhatWasAskedFor) {
  LoaderFixture rank;
  rank.add(3 * kShardStep);
  rank.add(kBlockNumel);
  rank.make_loader(kSmallestLoaderBytes);
  auto update = std::make_shared<Completion>();
  rank.params()[1].set_updated(Pending(update));
  const auto first = rank.start_load(0);
  const auto second = rank.start_load(1);
  std::thread updates([&] { update->succeed(); });
  rank.destroy_loader();
  updates.join();
  EXPECT_TRUE(first->loaded.done());
  EXPECT_TRUE(second->loaded.done());
  rank.expect_version(0, *first, 1);
  rank.expect_version(1, *second, 1);
}

TEST(ShardLoaderEnds, AlsoWithFailuresAListAndAFullWindow) {
  LoaderFixture rank;
  rank.add_blocks(5);
  ShardLoader& loader = rank.make_loader_for_blocks(2);
  EXPECT_EQ(rank.pass_on(0, 2), 1);
  rank.store().fail(StoreCall::kRead, "'p1'");
  loader.read_ahead(std::vector{1, 2, 3});
  const auto failed = rank.start_load(1);
  rank.destroy_loader();
  EXPECT_THROW(failed->loaded.wait(), IoError);
}

TEST(ShardLoaderEnds, AfterTheReadsThatAreUnderWay) {
  LoaderFixture rank;
  rank.add_blocks(2);
  ShardLoader& loader = rank.make_loader_for_blocks(2);
  rank.store().hold(StoreCall::kRead, "'p");
  loader.read_ahead(std::vector{0, 1});
  std::atomic<bool> is_released{false};
  std::thread releases([&] {
    let_others_run();
    is_released = true;
    rank.store().release();
  });
  rank.destroy_loader();
  EXPECT_TRUE(is_released) << "memory that is being read into is gone";
  releases.join();
}

TEST(ShardLoaderEnds, WithoutHavingBeenUsed) {
  LoaderFixture rank;
  rank.make_loader(kSmallestLoaderBytes);
}

// An update that hands over and writes on a thread of its own, while shards are loaded and read
// ahead: every load sees the version that was current when it was asked for.
TEST(ShardLoader, LoadsTheNewestVersionWhileUpdatesRun) {
  constexpr int kParams = 9;
  for (const std::size_t blocks : {0, 3, 20}) {
    LoaderFixture rank;
    for (int i = 0; i < kParams; ++i) {
      rank.add(i % 4 == 3 ? 3 * kShardStep + 5 : kBlockNumel - i * 100);
    }
    ShardLoader& loader = rank.make_loader_for_blocks(blocks);
    for (int version = 2; version < 12; ++version) {
      std::array<std::shared_ptr<Completion>, kParams> updates;
      loader.forget_all();
      for (int id = 0; id < kParams; ++id) {
        updates[static_cast<std::size_t>(id)] = std::make_shared<Completion>();
        rank.params()[id].set_updated(Pending(updates[static_cast<std::size_t>(id)]));
      }
      std::thread updater([&] {
        for (int id = 0; id < kParams; ++id) {
          std::ignore = rank.pass_on(id, version, kShardStep);
          rank.write_version(id, version);
          updates[static_cast<std::size_t>(id)]->succeed();
        }
      });
      Destinations destinations;
      for (int id = 0; id < kParams; ++id) {
        destinations.push_back(rank.start_load(id));
        loader.read_ahead(std::vector{(id + 1) % kParams, (id + 2) % kParams});
      }
      for (int id = 0; id < kParams; ++id) {
        destinations[static_cast<std::size_t>(id)]->loaded.wait();
        rank.expect_version(id, *destinations[static_cast<std::size_t>(id)], version);
      }
      updater.join();
      for (int id = kParams; id-- > 0;) {
        rank.expect_load(id);
      }
    }
    const LoaderStats stats = loader.take_stats(Tier::kNvme);
    std::uint64_t all = 0;
    for (int id = 0; id < kParams; ++id) {
      all += rank.params()[id].layout().shard_bytes();
    }
    EXPECT_EQ(stats.loaded_bytes, 20 * all);
    EXPECT_LE(stats.from_update_bytes + stats.read_ahead_bytes, stats.loaded_bytes);
  }
}

// Shards in host memory, on a device with memory of its own.
class HostLoader : public ::testing::Test {
 protected:
  shard::Param& add(std::uint8_t value) {
    shard::Param& param = rank_.add_param(1000, Tier::kHost);
    std::memset(param.shard(), value, param.layout().shard_bytes());
    return param;
  }
  device::Memory allocate() { return device_.allocate(Tier::kDevice, 4096, Role::kFull); }
  Pending start_load(const shard::Param& param, const device::Memory& to) {
    return loader_.start_load(param, to.data(),
                              device_.stream(device::StreamKind::kGather).record());
  }
  std::uint64_t take_loaded_bytes() { return loader_.take_stats(Tier::kHost).loaded_bytes; }
  // New values on the device, which its shard has not got yet.
  shard::DeviceCopy make_copy(std::uint8_t value) {
    copies_.push_back(allocate());
    return {copies_.back().data(),
            device_.start_fill(copies_.back().data(), value, copies_.back().bytes(),
                               device_.stream(device::StreamKind::kReduce))};
  }
  // The first one waits for `update`.
  struct TwoLoads {
    shard::Param& first;
    const shard::Param& second;
    device::Memory to;
    device::Memory other;
    std::shared_ptr<Completion> update;
    Pending loaded;
    Pending behind;
  };
  TwoLoads start_two() {
    TwoLoads two{add(1), add(2), allocate(), allocate(), std::make_shared<Completion>(), {}, {}};
    two.first.set_updated(Pending(two.update));
    two.loaded = start_load(two.first, two.to);
    two.behind = start_load(two.second, two.other);
    return two;
  }
  static void expect_filled(const device::Memory& memory, const shard::Param& param,
                            std::uint8_t value) {
    const std::vector<std::uint8_t> expected(
        static_cast<std::size_t>(param.range().numel) * sizeof(float), value);
    EXPECT_EQ(std::memcmp(memory.data(), expected.data(), expected.size()), 0);
  }

  support::RankFixture rank_{0, 1, DeviceChoice::kRandom, /*is_discrete=*/true};
  device::Device& device_ = rank_.device();
  std::vector<device::Memory> copies_;
  ShardLoader loader_{rank_.params(), device_};
};

TEST_F(HostLoader, LoadsAShardWhoseUpdateIsDone) {
  const shard::Param& param = add(3);
  const device::Memory to = allocate();
  start_load(param, to).wait();
  expect_filled(to, param, 3);
  EXPECT_EQ(take_loaded_bytes(), param.layout().shard_bytes());
  EXPECT_EQ(take_loaded_bytes(), 0U);
}

TEST_F(HostLoader, StartsNoCopyBeforeTheUpdateAndNoneAheadOfAnEarlierCall) {
  const auto [first, second, to, other, update, loaded, behind] = start_two();
  EXPECT_FALSE(loaded.done());
  EXPECT_FALSE(behind.done());
  std::memset(first.shard(), 7, first.layout().shard_bytes());  // what the update makes
  update->succeed();
  loaded.wait();
  behind.wait();
  expect_filled(to, first, 7);
  expect_filled(other, second, 2);
  loader_.wait_idle();
}

TEST_F(HostLoader, PassesTheFailureOfAnUpdateOnAndGoesOnWithTheNext) {
  const auto [first, second, to, other, update, loaded, behind] = start_two();
  update->fail(std::make_exception_ptr(IoError("the disk is gone")));
  EXPECT_THROW(loaded.wait(), IoError);
  EXPECT_THROW(std::ignore = loaded.state()->wait_handed_over(), IoError);
  behind.wait();
  expect_filled(other, second, 2);
}

TEST_F(HostLoader, TakesWhatTheDeviceStillHasFromThere) {
  shard::Param& param = add(3);
  param.set_updated(Pending(std::make_shared<Completion>()), make_copy(9));  // never done
  const device::Memory to = allocate();
  start_load(param, to).wait();
  expect_filled(to, param, 9);
  EXPECT_EQ(take_loaded_bytes(), 0U);
}

TEST_F(HostLoader, WaitsUntilTheUpdateIsHandedOver) {
  shard::Param& param = add(3);
  const auto made = std::make_shared<device::HandedOver>();
  shard::DeviceCopy copy = make_copy(9);
  const device::Pending filled = copy.made;
  copy.made = Pending(made);
  param.set_updated({}, copy);
  const device::Memory to = allocate();
  const Pending loaded = start_load(param, to);
  EXPECT_FALSE(loaded.done());
  made->hand_over(filled);
  loaded.wait();
  expect_filled(to, param, 9);
}

TEST_F(HostLoader, PassesTheFailureOfItsMakerOn) {
  shard::Param& param = add(3);
  const shard::Param& second = add(2);
  const auto made = std::make_shared<device::HandedOver>();
  param.set_updated({}, {allocate().data(), Pending(made)});
  const device::Memory to = allocate();
  const device::Memory other = allocate();
  const Pending loaded = start_load(param, to);
  const Pending behind = start_load(second, other);
  made->fail(std::make_exception_ptr(IoError("the disk is gone")));
  EXPECT_THROW(loaded.wait(), IoError);
  behind.wait();  // the gather stream has not failed
  device_.stream(device::StreamKind::kGather).synchronize();
}

TEST_F(HostLoader, LoadsTheShardWhereTheCopyWasForgottenBeforeItsTurn) {
  shard::Param& first = add(1);
  shard::Param& second = add(2);
  const auto update = std::make_shared<Completion>();
  first.set_updated(Pending(update));  // holds the queue up
  second.set_updated({}, make_copy(9));
  const device::Memory to = allocate();
  const device::Memory other = allocate();
  const Pending loaded = start_load(first, to);
  const Pending behind = start_load(second, other);
  loader_.forget_device_copies();
  device_.stream(device::StreamKind::kReduce).synchronize();
  copies_.clear();
  update->succeed();
  loaded.wait();
  behind.wait();
  expect_filled(other, second, 2);
  EXPECT_EQ(take_loaded_bytes(), 2 * second.layout().shard_bytes());
}

TEST_F(HostLoader, IsReadBeforeTheReduceStreamGoesOn) {
  shard::Param& param = add(9);  // as its home has it by then
  for (int round = 0; round < 20; ++round) {
    param.set_updated({}, make_copy(9));
    const device::Memory to = allocate();
    const Pending loaded = start_load(param, to);
    loader_.forget_device_copies();
    // Whoever gets the memory next writes to it behind the reduce stream.
    const device::Memory& copy = copies_.back();
    device_.start_fill(copy.data(), 77, copy.bytes(), device_.stream(device::StreamKind::kReduce))
        .wait();
    loaded.wait();
    expect_filled(to, param, 9);
  }
}

}  // namespace
}  // namespace tessera::coordinator
