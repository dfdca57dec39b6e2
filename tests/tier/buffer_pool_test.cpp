#include "tessera/tier/buffer_pool.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/tier/io_engine.h"

namespace tessera::tier {
namespace {

class BufferPoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<BufferPool> make_pool(std::size_t num_blocks) {
    return std::make_unique<BufferPool>(*device_, Tier::kHost, num_blocks * kBlockBytes,
                                        "test buffers");
  }
  // What has begun to wait is in the queue: num_waits() counts it there.
  static void until_waiting(const BufferPool& pool, std::size_t num_waits) {
    while (pool.num_waits() < num_waits) {
      std::this_thread::yield();
    }
  }

  Ledger ledger_;
  std::unique_ptr<device::Device> device_ =
      device::make_cpu_device({.ledger = &ledger_, .notice = {}});
};

TEST_F(BufferPoolTest, TakesItsWholeBlocksOnceAndChargesThem) {
  {
    BufferPool pool(*device_, Tier::kHost, 5000, "test buffers");
    EXPECT_EQ(pool.capacity_bytes(), 8192U);
    EXPECT_EQ(ledger_.current_bytes(Tier::kHost, Role::kStaging), 8192U);
    const Lease lease = pool.acquire(1);
    EXPECT_EQ(ledger_.current_bytes(Tier::kHost), 8192U);
  }
  EXPECT_EQ(ledger_.current_bytes(Tier::kHost), 0U);
}

TEST_F(BufferPoolTest, LeasesAreWholeBlocksAndAligned) {
  const auto pool = make_pool(8);
  const Lease small = pool->acquire(1);
  const Lease exact = pool->acquire(2 * kBlockBytes);
  const Lease above = pool->acquire(2 * kBlockBytes + 1);
  EXPECT_EQ(small.bytes(), kBlockBytes);
  EXPECT_EQ(exact.bytes(), 2 * kBlockBytes);
  EXPECT_EQ(above.bytes(), 3 * kBlockBytes);
  for (const Lease* lease : {&small, &exact, &above}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease->data()) % kBlockBytes, 0U);
  }
  EXPECT_EQ(pool->free_bytes(), 2 * kBlockBytes);
  EXPECT_EQ(pool->num_waits(), 0U);
}

TEST_F(BufferPoolTest, ALeaseComesBackOnceHoweverOftenItMoves) {
  const auto pool = make_pool(4);
  Lease first = pool->acquire(kBlockBytes);
  Lease second = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): what a move leaves
  EXPECT_EQ(pool->free_bytes(), 3 * kBlockBytes);
  second = pool->acquire(2 * kBlockBytes);  // the first block comes back
  EXPECT_EQ(pool->free_bytes(), 2 * kBlockBytes);
  second.reset();
  second.reset();
  EXPECT_EQ(pool->free_bytes(), 4 * kBlockBytes);
  EXPECT_EQ(pool->peak_bytes(), 3 * kBlockBytes);
}

TEST_F(BufferPoolTest, NothingIsALeaseOfZeroBytes) {
  const auto pool = make_pool(1);
  const Lease all = pool->acquire(kBlockBytes);
  EXPECT_EQ(pool->acquire(0).bytes(), 0U);
  EXPECT_TRUE(pool->try_acquire(0).has_value());
  EXPECT_EQ(make_pool(0)->capacity_bytes(), 0U);
}

TEST_F(BufferPoolTest, RefusesAtOnceWhatCanNeverFit) {
  const auto pool = make_pool(2);
  for (const std::size_t bytes : {2 * kBlockBytes + 1, ~std::size_t{0}}) {
    try {
      const Lease lease = pool->acquire(bytes);
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("test buffers"), std::string::npos) << text;
      EXPECT_NE(text.find("has 8192"), std::string::npos) << text;
    }
    EXPECT_THROW(static_cast<void>(pool->try_acquire(bytes)), ConfigError);
  }
}

TEST_F(BufferPoolTest, JoinsNeighboursInWhicheverOrderTheyComeBack) {
  std::array<int, 4> order;
  std::iota(order.begin(), order.end(), 0);
  do {
    const auto pool = make_pool(4);
    std::array<Lease, 4> leases;
    for (Lease& lease : leases) {
      lease = pool->acquire(kBlockBytes);
    }
    EXPECT_FALSE(pool->try_acquire(1).has_value());
    for (const int i : order) {
      leases[static_cast<std::size_t>(i)].reset();
    }
    EXPECT_TRUE(pool->try_acquire(4 * kBlockBytes).has_value());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(BufferPoolTest, TakesTheSmallestPieceThatFits) {
  const auto pool = make_pool(8);
  Lease large = pool->acquire(4 * kBlockBytes);
  const Lease between = pool->acquire(kBlockBytes);
  Lease small = pool->acquire(2 * kBlockBytes);
  const Lease rest = pool->acquire(kBlockBytes);
  std::byte* const expected = small.data();
  large.reset();
  small.reset();
  EXPECT_EQ(pool->acquire(2 * kBlockBytes).data(), expected);
}

// A stupid model beside it: which lease each block belongs to.
TEST_F(BufferPoolTest, LeasesNeverOverlapAndNothingIsLost) {
  constexpr std::size_t kBlocks = 40;
  const auto pool = make_pool(kBlocks);
  std::byte* const base = pool->acquire(kBlocks * kBlockBytes).data();
  std::array<int, kBlocks> owner{};
  std::vector<std::pair<int, Lease>> leases;
  std::mt19937 random(7);
  for (int id = 1; id <= 4000; ++id) {
    if (random() % 2 == 0 && !leases.empty()) {
      std::swap(leases[random() % leases.size()], leases.back());
      for (int& cell : owner) {
        cell = cell == leases.back().first ? 0 : cell;
      }
      leases.pop_back();
    }
    const std::size_t blocks = 1 + random() % 9;
    std::size_t run = 0;
    std::size_t longest = 0;
    for (const int cell : owner) {
      run = cell == 0 ? run + 1 : 0;
      longest = std::max(longest, run);
    }
    std::optional<Lease> lease = pool->try_acquire(blocks * kBlockBytes);
    ASSERT_EQ(lease.has_value(), longest >= blocks);
    if (lease) {
      const auto begin = static_cast<std::size_t>(lease->data() - base) / kBlockBytes;
      for (std::size_t block = begin; block < begin + blocks; ++block) {
        ASSERT_EQ(owner[block], 0);
        owner[block] = id;
      }
      leases.emplace_back(id, std::move(*lease));
    }
    const auto free = static_cast<std::size_t>(std::count(owner.begin(), owner.end(), 0));
    ASSERT_EQ(pool->free_bytes(), free * kBlockBytes);
  }
}

TEST_F(BufferPoolTest, WaitsUntilEnoughIsFreeInOnePiece) {
  const auto pool = make_pool(3);
  Lease left = pool->acquire(kBlockBytes);
  Lease middle = pool->acquire(kBlockBytes);
  Lease right = pool->acquire(kBlockBytes);
  Lease got;
  std::thread waiter([&] { got = pool->acquire(2 * kBlockBytes); });
  until_waiting(*pool, 1);
  left.reset();
  right.reset();  // two blocks are free, and not in one piece
  EXPECT_EQ(pool->free_bytes(), 2 * kBlockBytes);
  middle.reset();
  waiter.join();
  EXPECT_EQ(got.bytes(), 2 * kBlockBytes);
  EXPECT_EQ(pool->num_waits(), 1U);
}

TEST_F(BufferPoolTest, ServesWaitersInTheOrderInWhichTheyCame) {
  constexpr int kWaiters = 6;
  const auto pool = make_pool(4);
  Lease all = pool->acquire(4 * kBlockBytes);
  std::mutex mutex;
  std::vector<int> order;  // guarded by mutex
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&, i] {
      // No two fit at once, so each has noted its turn before the next one comes.
      const Lease lease = pool->acquire((i % 2 == 0 ? 4 : 3) * kBlockBytes);
      const std::lock_guard lock(mutex);
      order.push_back(i);
    });
    until_waiting(*pool, static_cast<std::size_t>(i) + 1);
  }
  all.reset();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  std::vector<int> expected(kWaiters);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST_F(BufferPoolTest, OneLeaseThatComesBackServesAllForWhomItIsEnough) {
  constexpr std::ptrdiff_t kWaiters = 8;
  const auto pool = make_pool(kWaiters);
  Lease all = pool->acquire(kWaiters * kBlockBytes);
  std::barrier together(kWaiters);
  std::vector<std::thread> waiters;
  for (std::size_t i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&] {
      const Lease lease = pool->acquire(kBlockBytes);
      together.arrive_and_wait();  // none goes before all have theirs
    });
    until_waiting(*pool, i + 1);
  }
  all.reset();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  EXPECT_EQ(pool->free_bytes(), kWaiters * kBlockBytes);
}

TEST_F(BufferPoolTest, NobodyOvertakesAWaiterWhoNeedsMore) {
  const auto pool = make_pool(4);
  Lease one = pool->acquire(kBlockBytes);
  Lease three = pool->acquire(3 * kBlockBytes);
  std::mutex mutex;
  std::vector<char> order;  // guarded by mutex
  const auto take = [&](std::size_t blocks, char name) {
    const Lease lease = pool->acquire(blocks * kBlockBytes);
    const std::lock_guard lock(mutex);
    order.push_back(name);
  };
  std::thread large([&] { take(4, 'L'); });
  until_waiting(*pool, 1);
  one.reset();
  // There is a block, and it is not for those who came later.
  EXPECT_FALSE(pool->try_acquire(kBlockBytes).has_value());
  EXPECT_EQ(pool->acquire(0).bytes(), 0U);  // nobody is kept from nothing
  std::thread small([&] { take(1, 'S'); });
  until_waiting(*pool, 2);
  three.reset();
  large.join();
  small.join();
  EXPECT_EQ(order, (std::vector<char>{'L', 'S'}));
}

TEST_F(BufferPoolTest, ClosingWakesWhoeverWaitsAndRefusesAllThatComeLater) {
  const auto pool = make_pool(1);
  Lease all = pool->acquire(1);
  std::array<std::string, 3> heard;
  std::vector<std::thread> waiters;
  for (std::string& text : heard) {
    waiters.emplace_back([&] {
      try {
        const Lease lease = pool->acquire(1);
      } catch (const IoError& error) {
        text = error.what();
      }
    });
  }
  until_waiting(*pool, heard.size());
  pool->close(std::make_exception_ptr(IoError("the disk is gone")));
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  for (const std::string& text : heard) {
    EXPECT_EQ(text, "the disk is gone");
  }
  all.reset();
  pool->close(std::make_exception_ptr(std::runtime_error("a later consequence")));
  EXPECT_THROW(static_cast<void>(pool->acquire(1)), IoError);
  EXPECT_THROW(static_cast<void>(pool->try_acquire(1)), IoError);
  EXPECT_EQ(pool->free_bytes(), kBlockBytes);
}

TEST_F(BufferPoolTest, ThreadsThatShareItNeverShareAByte) {
  constexpr std::size_t kBlocks = 6;
  const auto pool = make_pool(kBlocks);
  std::array<std::thread, 4> threads;
  std::array<bool, 4> clean{};
  for (std::size_t t = 0; t < threads.size(); ++t) {
    threads[t] = std::thread([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      const auto mark = static_cast<int>(t + 1);
      bool ok = true;
      for (int i = 0; i < 300; ++i) {
        const Lease lease = pool->acquire((1 + random() % kBlocks) * kBlockBytes);
        std::memset(lease.data(), mark, lease.bytes());
        std::this_thread::yield();
        ok = ok && std::all_of(lease.data(), lease.data() + lease.bytes(),
                               [&](std::byte b) { return b == std::byte(mark); });
      }
      clean[t] = ok;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(std::count(clean.begin(), clean.end(), true), 4);
  EXPECT_EQ(pool->free_bytes(), kBlocks * kBlockBytes);
  EXPECT_LE(pool->peak_bytes(), pool->capacity_bytes());
}

}  // namespace
}  // namespace tessera::tier
