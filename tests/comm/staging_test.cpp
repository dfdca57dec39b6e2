// What calls hold as scratch: how much, from where, and who waits for room.
#include "tessera/comm/staging.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/thread_backend.h"
#include "tests/comm/reference.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

using Bytes = std::vector<std::byte>;

std::size_t held_bytes(const Ledger& ledger) {
  return ledger.current_bytes(Tier::kHost, Role::kStaging);
}
std::size_t peak_bytes(const Ledger& ledger) {
  return ledger.peak_bytes(Tier::kHost, Role::kStaging);
}

// Ranks as threads, each with books of its own.
void run_with_ledgers(int num_ranks, std::uint32_t max_delay_us,
                      const std::function<void(Group&, Ledger&)>& body) {
  std::vector<Ledger> ledgers(static_cast<std::size_t>(num_ranks));
  ThreadWorld world(ThreadWorldOptions{num_ranks, max_delay_us, 5, {}});
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(rank);
  }
  std::vector<std::thread> threads;
  for (const int rank : ranks) {
    threads.emplace_back([&, rank] {
      Ledger& ledger = ledgers[static_cast<std::size_t>(rank)];
      GroupOptions options = patient();
      options.ledger = &ledger;
      try {
        Group group(world.make_backend(rank), "world", ranks, options);
        body(group, ledger);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Ledger& ledger : ledgers) {
    EXPECT_EQ(held_bytes(ledger), 0U);
  }
}

// One of several calls in flight: its memory, and what must be in it at the end.
class CallInFlight {
 public:
  virtual ~CallInFlight() = default;
  virtual void start(Group& group) = 0;
  void expect_result() {
    pending_.wait();
    EXPECT_TRUE(result() == expected_) << "a call's numbers are wrong";
  }

 protected:
  virtual const Bytes& result() const = 0;
  Pending pending_;
  Bytes expected_;
};

constexpr std::size_t kPackedNumel = 301;
constexpr std::size_t kNumPacked = 3;

class PackedGather final : public CallInFlight {
 public:
  explicit PackedGather(std::uint64_t seed) : seed_(seed) {}
  void start(Group& group) override {
    std::vector<Gather> gathers;
    shard_ = reference::array(seed_, group.rank(), 0, kPackedNumel, DType::kFloat32);
    full_.resize(shard_.size() * static_cast<std::size_t>(group.size()) * kNumPacked);
    for (std::size_t i = 0; i < kNumPacked; ++i) {
      gathers.push_back({shard_.data(), full_.data() + i * full_.size() / kNumPacked, kPackedNumel,
                         DType::kFloat32});
      for (int rank = 0; rank < group.size(); ++rank) {
        const Bytes piece = reference::array(seed_, rank, 0, kPackedNumel, DType::kFloat32);
        expected_.insert(expected_.end(), piece.begin(), piece.end());
      }
    }
    pending_ = seed_ % 2 == 0 ? group.start_all_gather(gathers)
                              : Pending::all(group.start_all_gathers(gathers));
  }

 private:
  const Bytes& result() const override { return full_; }
  const std::uint64_t seed_;
  Bytes shard_;
  Bytes full_;
};

constexpr std::size_t kReducedNumel = 2501;

class ReduceScatter final : public CallInFlight {
 public:
  explicit ReduceScatter(std::uint64_t seed) : seed_(seed) {}
  void start(Group& group) override {
    const std::size_t all = kReducedNumel * static_cast<std::size_t>(group.size());
    input_ = reference::array(seed_, group.rank(), 0, all, DType::kFloat32);
    output_.resize(kReducedNumel * sizeof(float));
    expected_ = reference::rank_order_sum(seed_, group.size(),
                                          kReducedNumel * static_cast<std::size_t>(group.rank()),
                                          kReducedNumel, DType::kFloat32, DType::kFloat32);
    pending_ = group.start_reduce_scatter(input_.data(), output_.data(), kReducedNumel,
                                          DType::kFloat32, DType::kFloat32);
  }

 private:
  const Bytes& result() const override { return output_; }
  const std::uint64_t seed_;
  Bytes input_;
  Bytes output_;
};

// The small one is gathered; the large one, of which no number of ranks is a divisor, is padded.
constexpr std::size_t kSmallNumel = 7;
constexpr std::size_t kHugeNumel = 8209;

class AllReduce final : public CallInFlight {
 public:
  AllReduce(std::uint64_t seed, std::size_t numel) : seed_(seed), numel_(numel) {}
  void start(Group& group) override {
    data_ = reference::array(seed_, group.rank(), 0, numel_, DType::kFloat32);
    expected_ =
        reference::rank_order_sum(seed_, group.size(), 0, numel_, DType::kFloat32, DType::kFloat32);
    pending_ =
        group.start_all_reduce(data_.data(), static_cast<std::int64_t>(numel_), DType::kFloat32);
  }

 private:
  const Bytes& result() const override { return data_; }
  const std::uint64_t seed_;
  const std::size_t numel_;
  Bytes data_;
};

std::unique_ptr<CallInFlight> make_call(std::uint64_t seed) {
  switch (seed % 4) {
    case 0:
      return std::make_unique<ReduceScatter>(seed);
    case 1:
      return std::make_unique<AllReduce>(seed, kSmallNumel);
    case 2:
      return std::make_unique<AllReduce>(seed, kHugeNumel);
    default:
      return std::make_unique<PackedGather>(seed / 4);
  }
}

// Of the largest of these calls.
std::size_t largest_call_bytes(int num_ranks) {
  const std::array<std::size_t, kNumPacked> shards = {4 * kPackedNumel, 4 * kPackedNumel,
                                                      4 * kPackedNumel};
  return std::max({all_gather_staging_bytes(shards, GroupOptions().pack_below_bytes, num_ranks),
                   reduce_scatter_staging_bytes(kReducedNumel, DType::kFloat32, num_ranks),
                   all_reduce_staging_bytes(kSmallNumel, DType::kFloat32, num_ranks),
                   all_reduce_staging_bytes(kHugeNumel, DType::kFloat32, num_ranks)});
}

void start_all_then_wait(Group& group, std::uint64_t num_calls) {
  std::vector<std::unique_ptr<CallInFlight>> calls;
  for (std::uint64_t seed = 0; seed < num_calls; ++seed) {
    calls.push_back(make_call(seed));
    calls.back()->start(group);
  }
  for (const auto& call : calls) {
    call->expect_result();
  }
}

TEST(StagingRegion, IsAllThatManyCallsInFlightHold) {
  for (const int num_ranks : {2, 3}) {
    for (const std::uint32_t max_delay_us : {0U, 100U}) {
      for (const std::size_t num_fitting : {1, 3}) {
        run_with_ledgers(num_ranks, max_delay_us, [&](Group& group, Ledger& ledger) {
          const std::size_t bytes = num_fitting * largest_call_bytes(num_ranks);
          group.reserve_staging(bytes);
          EXPECT_EQ(held_bytes(ledger), bytes);
          start_all_then_wait(group, 60);
          EXPECT_EQ(held_bytes(ledger), bytes);
          EXPECT_EQ(peak_bytes(ledger), bytes);
        });
      }
    }
  }
}

TEST(StagingRegion, MayBeOfAnotherSizeOnEveryRank) {
  run_with_ledgers(3, 50, [](Group& group, Ledger& ledger) {
    const std::size_t bytes =
        largest_call_bytes(3) * static_cast<std::size_t>(1 + 2 * group.rank()) + 100;
    group.reserve_staging(bytes);
    start_all_then_wait(group, 60);
    EXPECT_EQ(peak_bytes(ledger), bytes);
  });
}

TEST(StagingRegion, TakesThePlaceOfIdleBuffersAndOfAnotherRegion) {
  run_with_ledgers(2, 0, [](Group& group, Ledger& ledger) {
    start_all_then_wait(group, 12);
    EXPECT_GT(held_bytes(ledger), 0U);  // on the shelf
    const std::size_t one = largest_call_bytes(2);
    for (const std::size_t bytes : {one, 3 * one, std::size_t{1000}}) {
      group.reserve_staging(bytes);
      EXPECT_EQ(held_bytes(ledger), bytes);
      start_all_then_wait(group, 8);
    }
    group.reserve_staging(0);
    EXPECT_EQ(held_bytes(ledger), 0U);
    start_all_then_wait(group, 8);
    EXPECT_GT(held_bytes(ledger), 0U);
  });
}

TEST(StagingRegion, WhileCallsAreInFlightIsReplacedWithoutMixingThem) {
  run_with_ledgers(2, 50, [](Group& group, Ledger& ledger) {
    std::vector<std::unique_ptr<CallInFlight>> calls;
    std::size_t bytes = 0;
    for (std::uint64_t seed = 0; seed < 80; ++seed) {
      if (seed % 10 == 0) {
        bytes = largest_call_bytes(2) * (1 + seed % 3);
        group.reserve_staging(bytes);
        EXPECT_EQ(held_bytes(ledger), bytes);
      }
      calls.push_back(make_call(seed));
      calls.back()->start(group);
    }
    for (const auto& call : calls) {
      call->expect_result();
    }
    EXPECT_EQ(held_bytes(ledger), bytes);
  });
}

TEST(StagingRegion, LeavesALargerCallToMemoryOfItsOwn) {
  run_with_ledgers(2, 0, [](Group& group, Ledger& ledger) {
    constexpr std::size_t kBytes = 4096;
    group.reserve_staging(kBytes);
    ReduceScatter call(1);
    call.start(group);
    call.expect_result();
    group.start_barrier().wait();  // every rank has let go of the call before it
    EXPECT_EQ(held_bytes(ledger), kBytes);
    EXPECT_EQ(peak_bytes(ledger),
              kBytes + reduce_scatter_staging_bytes(kReducedNumel, DType::kFloat32, 2));
  });
}

// What a call takes of a group that has made no other one.
void expect_taken(int num_ranks, std::size_t bytes, const std::function<void(Group&)>& call) {
  run_with_ledgers(num_ranks, 0, [&](Group& group, Ledger& ledger) {
    call(group);
    EXPECT_EQ(peak_bytes(ledger), bytes);
  });
}

TEST(StagingBytes, AreWhatAGroupTakes) {
  for (const int num_ranks : {2, 3}) {
    const auto num = static_cast<std::size_t>(num_ranks);
    const auto rounded = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
    expect_taken(num_ranks, rounded(num * 1000 * 2), [&](Group& group) {
      std::vector<BFloat16> input(1000 * num);
      std::vector<float> output(1000);
      group
          .start_reduce_scatter(input.data(), output.data(), 1000, DType::kBFloat16,
                                DType::kFloat32)
          .wait();
    });
    for (const std::int64_t numel : {0, 1, 2048, 24000, 24001, 24002}) {
      const std::size_t data_bytes = 4 * static_cast<std::size_t>(numel);
      const std::size_t piece_bytes = (static_cast<std::size_t>(numel) + num - 1) / num * 4;
      const std::size_t expected = data_bytes * num <= 65536 ? rounded(data_bytes * num)
                                   : piece_bytes * num == data_bytes
                                       ? rounded(data_bytes)
                                       : 2 * rounded(piece_bytes * num);
      EXPECT_EQ(all_reduce_staging_bytes(numel, DType::kFloat32, num_ranks), expected);
      expect_taken(num_ranks, expected, [&](Group& group) {
        std::vector<float> data(static_cast<std::size_t>(numel) + 1);
        group.start_all_reduce(data.data(), numel, DType::kFloat32).wait();
      });
    }
  }
}

struct GatherCase {
  std::vector<std::size_t> shard_bytes;
  std::size_t piece_bytes;  // of the pack
};

TEST(StagingBytes, OfAGatherAreThoseOfItsPack) {
  const std::vector<GatherCase> cases = {{{}, 0},
                                         {{10}, 0},            // one alone
                                         {{0, 10, 70000}, 0},  // the same
                                         {{70000, 65536}, 0},  // none is small
                                         {{10, 17}, 16 + 32},  //
                                         {{65535, 0, 65536, 1}, 65536 + 16}};
  for (const GatherCase& each : cases) {
    for (const int num_ranks : {2, 3}) {
      const auto num = static_cast<std::size_t>(num_ranks);
      const std::size_t expected = staging_room(each.piece_bytes * num);
      EXPECT_EQ(all_gather_staging_bytes(each.shard_bytes, 65536, num_ranks), expected);
      const GatherToStaging to_one{num_ranks, 1, false, false};
      EXPECT_EQ(gather_to_staging_bytes(each.shard_bytes, 65536, to_one),
                staging_room(each.piece_bytes));
      std::size_t sent = 0;
      for (const std::size_t bytes : each.shard_bytes) {
        sent += bytes > 0 && bytes < 65536 && each.piece_bytes > 0 ? packed_bytes(bytes) : bytes;
      }
      const GatherToStaging to_two{num_ranks, 2, true, true};
      EXPECT_EQ(gather_to_staging_bytes(each.shard_bytes, 65536, to_two),
                expected + staging_room(2 * sent));

      const auto gather_with = [&](const auto& start) {
        std::vector<Bytes> shards;
        std::vector<Bytes> fulls;
        std::vector<Gather> gathers;
        for (const std::size_t bytes : each.shard_bytes) {
          shards.emplace_back(bytes + 1);
          fulls.emplace_back(bytes * num + 1);
          gathers.push_back({shards.back().data(), fulls.back().data(),
                             static_cast<std::int64_t>(bytes), DType::kUInt8});
        }
        start(gathers).wait();
      };
      expect_taken(num_ranks, expected, [&](Group& group) {
        gather_with([&](const auto& gathers) { return group.start_all_gather(gathers); });
      });
      run_with_ledgers(num_ranks, 0, [&](Group& group, Ledger& ledger) {
        const bool receives = group.rank() == 1;
        gather_with([&](const auto& gathers) {
          std::vector<std::uint8_t> wants(num, 0);
          wants[1] = 1;
          return group.start_gather_to(gathers, wants);
        });
        EXPECT_EQ(peak_bytes(ledger), receives ? expected : staging_room(each.piece_bytes));
      });
    }
  }
}

TEST(StagingBytes, OneRankStagesNoReduction) {
  EXPECT_EQ(reduce_scatter_staging_bytes(1000, DType::kFloat32, 1), 0U);
  EXPECT_EQ(all_reduce_staging_bytes(100000, DType::kFloat32, 1), 0U);
}

}  // namespace
}  // namespace tessera::comm
