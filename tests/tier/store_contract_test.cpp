// What every store promises, wherever its bytes are.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/tier/store.h"
#include "tests/tier/blocks.h"
#include "tests/tier/store_case.h"

namespace tessera::tier {
namespace {

using testing::Blocks;
using testing::kStoreRole;
using testing::StoreCase;
using testing::StoreKind;
using testing::StoreMaker;

class StoreContract : public ::testing::TestWithParam<StoreCase> {
 protected:
  void SetUp() override {
    try {
      store_ = maker_.make();
    } catch (const ConfigError& error) {
      GTEST_SKIP() << error.what();
    }
  }

  void write(std::uint64_t offset, const Blocks& from) {
    store_->start_write(offset, from.data(), from.bytes()).wait();
  }
  Blocks read(std::uint64_t offset, std::size_t num_blocks) {
    Blocks to(num_blocks, 0xa5);
    store_->start_read(offset, to.data(), to.bytes()).wait();
    return to;
  }

  StoreMaker maker_{GetParam()};
  std::unique_ptr<Store> store_;
};

TEST_P(StoreContract, RoomIsWholeBlocksBehindEverythingSoFar) {
  EXPECT_EQ(store_->bytes(), 0U);
  EXPECT_EQ(store_->allocate(1, "a"), 0U);
  EXPECT_EQ(store_->allocate(0, "nothing"), kBlockBytes);
  EXPECT_EQ(store_->allocate(kBlockBytes, "b"), kBlockBytes);
  EXPECT_EQ(store_->allocate(2 * kBlockBytes + 1, "c"), 2 * kBlockBytes);
  EXPECT_EQ(store_->bytes(), 5 * kBlockBytes);
  const std::vector<StoreExtent>& extents = store_->extents();
  ASSERT_EQ(extents.size(), 4U);
  EXPECT_EQ(extents[1].bytes, 0U);
  EXPECT_EQ(extents[3].offset, 2 * kBlockBytes);
  EXPECT_EQ(extents[3].bytes, 3 * kBlockBytes);
  EXPECT_EQ(extents[3].name, "c");
}

TEST_P(StoreContract, NewBytesAreZeroAndGrowthKeepsTheOld) {
  Blocks written(3);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const std::uint64_t offset = store_->allocate(written.bytes(), "extent");
    EXPECT_EQ(read(offset, 3), Blocks(3)) << "extent " << i;
    written.number(i);
    write(offset, written);
    for (std::uint64_t old = 0; old <= i; ++old) {
      written.number(old);
      EXPECT_EQ(read(old * written.bytes(), 3), written) << "extent " << old << " of " << i;
    }
  }
}

// All ranges of a small store against a plain array, over the borders of extents and stripes.
TEST_P(StoreContract, EveryRangeReadsWhatWasWrittenLast) {
  constexpr std::size_t kBlocks = 9;
  for (const std::size_t blocks : {1, 3, 2, 3}) {
    store_->allocate(blocks * kBlockBytes, "extent");
  }
  Blocks model(kBlocks);
  std::uint64_t seed = 0;
  for (std::size_t begin = 0; begin < kBlocks; ++begin) {
    for (std::size_t count = 1; begin + count <= kBlocks; ++count) {
      Blocks piece(count);
      piece.number(++seed);
      std::memcpy(model.block(begin), piece.data(), piece.bytes());
      write(begin * kBlockBytes, piece);
      EXPECT_EQ(read(begin * kBlockBytes, count), piece);
    }
    EXPECT_EQ(read(0, kBlocks), model);
  }
}

TEST_P(StoreContract, WhatIsThereCanBeWorkedOnInPlaceOrMustBeRead) {
  const bool in_memory = GetParam().kind != StoreKind::kFiles;
  const std::uint64_t offset = store_->allocate(2 * kBlockBytes, "extent");
  Blocks written(2);
  written.number(1);
  write(offset, written);
  ASSERT_EQ(store_->data() != nullptr, in_memory);
  if (in_memory) {
    EXPECT_EQ(std::memcmp(store_->data() + offset, written.data(), written.bytes()), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(store_->data()) % kBlockBytes, 0U);
    store_->data()[offset] = std::byte{77};
    EXPECT_EQ(read(offset, 1).data()[0], std::byte{77});
  }
}

TEST_P(StoreContract, CountsWholeBlocks) {
  store_->allocate(8 * kBlockBytes, "extent");
  write(0, Blocks(5));
  write(kBlockBytes, Blocks(1));
  read(0, 8);
  EXPECT_EQ(store_->stats().written_bytes, 6 * kBlockBytes);
  EXPECT_EQ(store_->stats().read_bytes, 8 * kBlockBytes);
}

TEST_P(StoreContract, ChargesTheLedgerExactlyWhatWasAllocated) {
  const Tier tier = store_->tier();
  EXPECT_EQ(tier == Tier::kNvme, GetParam().kind == StoreKind::kFiles);
  EXPECT_EQ(maker_.ledger().current_bytes(tier), 0U);
  store_->allocate(5, "a");
  store_->allocate(2 * kBlockBytes, "b");
  EXPECT_EQ(maker_.ledger().current_bytes(tier, kStoreRole), 3 * kBlockBytes);
  store_.reset();
  for (const Tier each : {Tier::kDevice, Tier::kPinned, Tier::kHost, Tier::kNvme}) {
    EXPECT_EQ(maker_.ledger().current_bytes(each), 0U);
  }
}

TEST_P(StoreContract, TakesWhatIsReservedAtOnceAndMoreWhenItIsNeeded) {
  store_.reset();
  store_ = maker_.make(3 * kBlockBytes - 1);
  const Tier tier = store_->tier();
  EXPECT_EQ(store_->bytes(), 0U);
  EXPECT_EQ(maker_.ledger().current_bytes(tier, kStoreRole), 3 * kBlockBytes);
  store_->allocate(3 * kBlockBytes, "reserved");
  Blocks written(3);
  written.number(1);
  write(0, written);
  EXPECT_EQ(maker_.ledger().peak_bytes(tier, kStoreRole), 3 * kBlockBytes);
  const std::uint64_t offset = store_->allocate(2 * kBlockBytes, "more");
  EXPECT_EQ(maker_.ledger().current_bytes(tier, kStoreRole), 5 * kBlockBytes);
  EXPECT_EQ(read(0, 3), written);
  EXPECT_EQ(read(offset, 2), Blocks(2));
}

TEST_P(StoreContract, RefusesWhatIsNotWholeBlocksInsideIt) {
  store_->allocate(2 * kBlockBytes, "extent");
  const Blocks memory(4);
  const auto refuses = [&](std::uint64_t offset, std::byte* data, std::size_t bytes) {
    EXPECT_THROW(static_cast<void>(store_->start_read(offset, data, bytes)), InternalError);
    EXPECT_THROW(static_cast<void>(store_->start_write(offset, data, bytes)), InternalError);
  };
  refuses(0, memory.data(), 100);
  refuses(100, memory.data(), kBlockBytes);
  refuses(0, memory.data() + 512, kBlockBytes);
  refuses(0, memory.data(), 3 * kBlockBytes);
  refuses(2 * kBlockBytes, memory.data(), kBlockBytes);
  refuses(~std::uint64_t{0} - kBlockBytes + 1, memory.data(), 2 * kBlockBytes);
  EXPECT_EQ(store_->stats().read_bytes, 0U);
  EXPECT_EQ(store_->stats().written_bytes, 0U);
}

TEST_P(StoreContract, ARangeOfNothingIsDone) {
  EXPECT_TRUE(store_->start_read(0, nullptr, 0).done());
  store_->allocate(kBlockBytes, "extent");
  EXPECT_TRUE(store_->start_write(kBlockBytes, nullptr, 0).done());
}

TEST_P(StoreContract, ManyRequestsAreUnderWayAtOnce) {
  constexpr std::size_t kRequests = 150;
  store_->allocate(kRequests * 2 * kBlockBytes, "extent");
  Blocks written(kRequests * 2);
  written.number(4);
  std::vector<Pending> pending;
  for (std::size_t i = 0; i < kRequests; ++i) {
    pending.push_back(
        store_->start_write(i * 2 * kBlockBytes, written.block(2 * i), 2 * kBlockBytes));
  }
  Pending::all(std::move(pending)).wait();
  Blocks got(kRequests * 2);
  pending.clear();
  for (std::size_t i = kRequests; i-- > 0;) {
    pending.push_back(store_->start_read(i * 2 * kBlockBytes, got.block(2 * i), 2 * kBlockBytes));
  }
  for (const Pending& each : pending) {
    each.wait();
  }
  EXPECT_EQ(got, written);
}

TEST_P(StoreContract, ThreadsReadAndWriteTheirOwnRanges) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kEach = 5;
  store_->allocate(kThreads * kEach * kBlockBytes, "extent");
  std::vector<std::thread> threads;
  std::vector<int> num_wrong(kThreads, 0);
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      Blocks written(kEach);
      for (std::uint64_t i = 0; i < 30; ++i) {
        written.number(t * 1000 + i);
        write(t * written.bytes(), written);
        const std::size_t begin = random() % kEach;
        const Blocks got = read(t * written.bytes() + begin * kBlockBytes, kEach - begin);
        num_wrong[t] += std::memcmp(got.data(), written.block(begin), got.bytes()) == 0 ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_wrong, std::vector<int>(kThreads, 0));
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, ::testing::ValuesIn(testing::all_store_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::tier
