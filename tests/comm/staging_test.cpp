// What calls hold as staging: how much, and from where.
#include "tessera/comm/staging.h"

#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tests/comm/contract.h"
#include "tests/comm/random_call.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

// Ranks as threads with memory of the host, each with books of its own.
class StagingTest : public Contract {
 protected:
  static std::size_t held_bytes(const ContractRank& here) {
    return here.ledger.current_bytes(Tier::kHost, Role::kStaging);
  }
  static std::size_t peak_bytes(const ContractRank& here) {
    return here.ledger.peak_bytes(Tier::kHost, Role::kStaging);
  }
  // What a call takes of a group that has made no other one.
  void expect_taken(int num_ranks, std::size_t bytes, const std::function<void(Group&)>& call) {
    run(num_ranks, [&](ContractRank& here) {
      call(here.group);
      EXPECT_EQ(peak_bytes(here), bytes);
    });
  }
};

ContractWorld staging_threads(const std::string& name, std::uint32_t max_delay_us) {
  return {.name = name, .make_network = [=](int num_ranks) {
            return make_thread_network(num_ranks, max_delay_us);
          }};
}
INSTANTIATE_TEST_SUITE_P(Threads, StagingTest,
                         ::testing::Values(staging_threads("InStep", 0),
                                           staging_threads("Late", 100)),
                         world_name);

constexpr int kNumCalls = support::rounds(60, 20);

TEST_P(StagingTest, ARegionIsAllThatManyCallsInFlightHold) {
  for (const int num_ranks : {2, 3}) {
    for (const std::size_t num_fitting : {1, 3}) {
      run(num_ranks, [&](ContractRank& here) {
        // It may be of another size on every rank.
        const std::size_t bytes = num_fitting * RandomCall::max_staging_bytes(num_ranks) +
                                  100 * static_cast<std::size_t>(here.group.rank());
        here.group.reserve_staging(bytes);
        EXPECT_EQ(held_bytes(here), bytes);
        run_random_calls(here, kNumCalls, kNumCalls);
        EXPECT_EQ(held_bytes(here), bytes);
        EXPECT_EQ(peak_bytes(here), bytes);
      });
    }
  }
}

TEST_P(StagingTest, ARegionReplacesIdleBuffersAndAnotherRegionAlsoWhileCallsAreInFlight) {
  run(2, [](ContractRank& here) {
    run_random_calls(here, 12, 12);
    EXPECT_GT(held_bytes(here), 0U);  // on the shelf
    std::size_t bytes = 0;
    run_random_calls(here, kNumCalls, kNumCalls, [&](int call) {
      if (call % 10 == 0) {
        bytes = RandomCall::max_staging_bytes(2) * static_cast<std::size_t>(1 + call / 10 % 3);
        here.group.reserve_staging(bytes);
        EXPECT_EQ(held_bytes(here), bytes);
      }
    });
    EXPECT_EQ(held_bytes(here), bytes);
    here.group.reserve_staging(0);
    EXPECT_EQ(held_bytes(here), 0U);
    run_random_calls(here, 12, 12);
    EXPECT_GT(held_bytes(here), 0U);
  });
}

TEST_P(StagingTest, ARegionLeavesALargerCallToMemoryOfItsOwn) {
  run(2, [](ContractRank& here) {
    constexpr std::size_t kBytes = 4096;
    constexpr std::int64_t kNumel = 2501;
    here.group.reserve_staging(kBytes);
    const std::vector<float> input(2 * kNumel);
    std::vector<float> output(kNumel);
    here.group
        .start_reduce_scatter(input.data(), output.data(), kNumel, DType::kFloat32, DType::kFloat32)
        .wait();
    here.group.start_barrier().wait();  // every rank has freed the call before it
    EXPECT_EQ(held_bytes(here), kBytes);
    EXPECT_EQ(peak_bytes(here), kBytes + reduce_scatter_staging_bytes(kNumel, DType::kFloat32, 2));
  });
}

TEST_P(StagingTest, SizesAreWhatAGroupTakes) {
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

TEST_P(StagingTest, SizesOfEncodedCallsAreTheirWires) {
  for (const int num_ranks : {2, 3}) {
    const auto num = static_cast<std::size_t>(num_ranks);
    const PlainCodec codec;
    constexpr std::int64_t kNumel = 60001;  // by itself
    const std::size_t wire = codec.wire_bytes(kNumel);
    const auto gather_with = [&](Group& group, bool receives) {
      const Bytes shard(wire);
      Bytes full(static_cast<std::size_t>(kNumel) * 2 * num);
      const Gather gather{shard.data(), full.data(), kNumel, DType::kBFloat16, "", &codec};
      std::vector<std::uint8_t> wants(num, 1);
      wants[0] = receives ? 1 : 0;
      group.start_gather_to({&gather, 1}, wants).wait();
    };
    const GatherPiece piece{wire, true};
    EXPECT_EQ(all_gather_staging_bytes({&piece, 1}, 65536, num_ranks), staging_room(num * wire));
    EXPECT_EQ(all_gather_staging_bytes({&piece, 1}, 65536, num_ranks, CallMemory::kShared),
              staging_room(num * wire));
    EXPECT_EQ(all_gather_staging_bytes({&piece, 1}, 65536, 1), 0U);
    expect_taken(num_ranks, staging_room(num * wire),
                 [&](Group& group) { gather_with(group, true); });
    run(num_ranks, [&](ContractRank& here) {
      gather_with(here.group, false);
      const GatherToStaging to_others{num_ranks, num_ranks - 1, here.group.rank() > 0, false};
      EXPECT_EQ(gather_to_staging_bytes({&piece, 1}, 65536, to_others), peak_bytes(here));
      EXPECT_EQ(peak_bytes(here), here.group.rank() > 0 ? staging_room(num * wire) : 0U);
    });
    expect_taken(num_ranks, 2 * staging_room(num * wire), [&](Group& group) {
      const std::vector<float> input(static_cast<std::size_t>(kNumel) * num);
      std::vector<float> output(static_cast<std::size_t>(kNumel));
      CallOptions options;
      options.codec = &codec;
      group
          .start_reduce_scatter(input.data(), output.data(), kNumel, DType::kFloat32,
                                DType::kFloat32, options)
          .wait();
    });
  }
}

struct GatherCase {
  std::vector<std::size_t> shard_bytes;
  std::size_t piece_bytes;  // of the pack
};

TEST_P(StagingTest, SizesOfAGatherAreThoseOfItsPack) {
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
      run(num_ranks, [&](ContractRank& here) {
        const bool receives = here.group.rank() == 1;
        gather_with([&](const auto& gathers) {
          std::vector<std::uint8_t> wants(num, 0);
          wants[1] = 1;
          return here.group.start_gather_to(gathers, wants);
        });
        EXPECT_EQ(peak_bytes(here), receives ? expected : staging_room(each.piece_bytes));
      });
    }
  }
}

// A call that is stuck in the network may free its staging at any time after its group.
TEST(Staging, IsOffTheLedgerWhenItsGroupGoesThoughACallStillHoldsIt) {
  const auto network = make_thread_network(2, 0);
  const auto backend = network->make_backend(0);
  for (const bool has_region : {false, true}) {
    auto ledger = std::make_unique<Ledger>();
    StagingLease lease(1000);
    auto staging = std::make_unique<Staging>(*backend, ledger.get());
    if (has_region) {
      staging->reserve(4000);
    }
    staging->take(lease, nullptr);
    EXPECT_GE(ledger->current_bytes(Tier::kHost, Role::kStaging), 1000U);
    staging.reset();
    EXPECT_EQ(ledger->current_bytes(Tier::kHost, Role::kStaging), 0U);
    ledger.reset();
    std::memset(lease.data(), 1, lease.bytes());
  }
}

TEST(StagingBytes, OneRankStagesNoReduction) {
  EXPECT_EQ(reduce_scatter_staging_bytes(1000, DType::kFloat32, 1), 0U);
  EXPECT_EQ(all_reduce_staging_bytes(100000, DType::kFloat32, 1), 0U);
}

}  // namespace
}  // namespace tessera::comm
