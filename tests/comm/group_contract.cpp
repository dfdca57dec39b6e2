#include "tests/comm/group_contract.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <random>

#include "tessera/core/error.h"
#include "tests/comm/reference.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

using Bytes = std::vector<std::byte>;

// 0, 1, odd, around the block of the sum, and more than a socket takes in one write or a
// reduce-scatter in one chunk. The largest is used where the reference, which is slow, need not
// compute it often.
constexpr std::size_t kSizes[] = {0, 1, 3, 17, 1023, 2049, 1100003};
constexpr std::size_t kLargeNumel = 100000;

// Compares without printing megabytes.
void expect_same(const Bytes& got, const Bytes& expected, const std::string& where) {
  ASSERT_EQ(got.size(), expected.size()) << where;
  if (got == expected) {
    return;
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], expected[i]) << where << ", byte " << i << " of " << got.size();
  }
}

TEST_P(GroupContract, AllGatherWritesThePiecesInRankOrder) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (const std::size_t numel : kSizes) {
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kUInt8}) {
          if (numel > kLargeNumel && (dtype != DType::kFloat32 || group.size() > 2)) {
            continue;
          }
          const Bytes shard = reference::array(numel, group.rank(), 0, numel, dtype);
          Bytes full(shard.size() * static_cast<std::size_t>(group.size()), std::byte{0xee});
          const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(numel), dtype};
          group.start_all_gather({&gather, 1}).wait();
          expect_same(full, reference::arrays(numel, group.size(), numel, dtype),
                      std::to_string(numel));
        }
      }
    });
  }
}

TEST_P(GroupContract, OneAllGatherTakesManyTensorsOfAllSizesAndTypes) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8};
      std::vector<Bytes> shards;
      std::vector<Bytes> fulls;
      std::vector<Gather> gathers;
      std::vector<std::size_t> numels;
      for (std::size_t i = 0; i < 40; ++i) {
        const std::size_t numel = i % 9 == 8 ? 30011 : (i * i) % 101;  // large ones among small
        const DType dtype = dtypes[i % 4];
        shards.push_back(reference::array(i, group.rank(), 0, numel, dtype));
        fulls.emplace_back(shards.back().size() * static_cast<std::size_t>(group.size()));
        numels.push_back(numel);
      }
      for (std::size_t i = 0; i < shards.size(); ++i) {
        gathers.push_back({shards[i].data(), fulls[i].data(), static_cast<std::int64_t>(numels[i]),
                           dtypes[i % 4]});
      }
      group.start_all_gather(gathers).wait();
      for (std::size_t i = 0; i < shards.size(); ++i) {
        expect_same(fulls[i], reference::arrays(i, group.size(), numels[i], dtypes[i % 4]),
                    "tensor " + std::to_string(i));
      }
    });
  }
}

TEST_P(GroupContract, AllGatherWorksInPlace) {
  run(3, [](Group& group) {
    for (const std::size_t numel : {std::size_t{5}, std::size_t{70001}}) {
      const Bytes shard = reference::array(9, group.rank(), 0, numel, DType::kFloat32);
      Bytes full(shard.size() * 3);
      std::byte* slot = full.data() + shard.size() * static_cast<std::size_t>(group.rank());
      std::memcpy(slot, shard.data(), shard.size());
      const Gather gather{slot, full.data(), static_cast<std::int64_t>(numel), DType::kFloat32};
      group.start_all_gather({&gather, 1}).wait();
      expect_same(full, reference::arrays(9, 3, numel, DType::kFloat32), std::to_string(numel));
    }
  });
}

TEST_P(GroupContract, ReduceScatterIsTheSumInRankOrderToTheBit) {
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kBFloat16, DType::kBFloat16},
                                            {DType::kFloat16, DType::kFloat32}};
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run(num_ranks, [&](Group& group) {
      for (const std::size_t numel : kSizes) {
        for (const auto& [dtype, out_dtype] : dtypes) {
          if (numel > kLargeNumel && (dtype != DType::kFloat32 || group.size() > 2)) {
            continue;
          }
          const std::size_t total = numel * static_cast<std::size_t>(group.size());
          const Bytes input = reference::array(numel, group.rank(), 0, total, dtype);
          Bytes output(numel * bytes_of(out_dtype));
          group
              .start_reduce_scatter(input.data(), output.data(), static_cast<std::int64_t>(numel),
                                    dtype, out_dtype)
              .wait();
          const auto begin = numel * static_cast<std::size_t>(group.rank());
          expect_same(
              output,
              reference::rank_order_sum(numel, group.size(), begin, numel, dtype, out_dtype),
              std::to_string(numel));
        }
      }
    });
  }
}

TEST_P(GroupContract, AllReduceGivesEveryRankTheSameBits) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (const std::size_t numel :
           {std::size_t{0}, std::size_t{1}, std::size_t{1023}, std::size_t{16387}}) {
        for (const DType dtype :
             {DType::kFloat32, DType::kFloat64, DType::kInt64, DType::kBFloat16}) {
          Bytes data = reference::array(numel, group.rank(), 0, numel, dtype);
          group.start_all_reduce(data.data(), static_cast<std::int64_t>(numel), dtype).wait();
          expect_same(data, reference::rank_order_sum(numel, group.size(), 0, numel, dtype, dtype),
                      std::to_string(numel));
        }
      }
    });
  }
}

TEST_P(GroupContract, MaxAndMinPickTheExtremesAndKeepNaN) {
  run(3, [](Group& group) {
    const auto rank = static_cast<float>(group.rank());
    std::vector<float> highest = {rank, -rank, group.rank() == 1 ? NAN : 7.0F};
    std::vector<float> lowest = highest;
    group.start_all_reduce(highest.data(), 3, DType::kFloat32, Reduction::kMax).wait();
    group.start_all_reduce(lowest.data(), 3, DType::kFloat32, Reduction::kMin).wait();
    EXPECT_EQ(highest[0], 2.0F);
    EXPECT_EQ(highest[1], 0.0F);
    EXPECT_TRUE(std::isnan(highest[2]));
    EXPECT_EQ(lowest[0], 0.0F);
    EXPECT_EQ(lowest[1], -2.0F);
    EXPECT_TRUE(std::isnan(lowest[2]));
  });
}

TEST_P(GroupContract, BroadcastCopiesTheRootsBytesFromEveryRoot) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (int root = 0; root < group.size(); ++root) {
        for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, std::size_t{20011}}) {
          Bytes data = reference::array(3, group.rank(), 0, numel, DType::kFloat32);
          group
              .start_broadcast(data.data(), static_cast<std::int64_t>(numel), DType::kFloat32, root)
              .wait();
          expect_same(data, reference::array(3, root, 0, numel, DType::kFloat32),
                      "root " + std::to_string(root));
        }
      }
    });
  }
}

TEST_P(GroupContract, BytesOfTheHostAreBroadcastFromTheRoot) {
  run(3, [](Group& group) {
    std::int64_t number = group.rank() + 7;
    group.broadcast_host(&number, sizeof(number), 1);
    EXPECT_EQ(number, 8);
  });
}

TEST_P(GroupContract, AllToAllTransposesThePieces) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, std::size_t{20011}}) {
        const auto num = static_cast<std::size_t>(group.size());
        const Bytes send = reference::array(5, group.rank(), 0, numel * num, DType::kBFloat16);
        Bytes receive(send.size());
        group
            .start_all_to_all(send.data(), receive.data(), static_cast<std::int64_t>(numel),
                              DType::kBFloat16)
            .wait();
        Bytes expected;
        for (int from = 0; from < group.size(); ++from) {
          const Bytes piece = reference::array(
              5, from, numel * static_cast<std::size_t>(group.rank()), numel, DType::kBFloat16);
          expected.insert(expected.end(), piece.begin(), piece.end());
        }
        expect_same(receive, expected, std::to_string(numel));
      }
    });
  }
}

TEST_P(GroupContract, NobodyLeavesABarrierBeforeAllHaveEntered) {
  std::atomic<int> entered{0};
  run(4, [&](Group& group) {
    for (int round = 1; round <= 20; ++round) {
      ++entered;
      group.start_barrier().wait();
      EXPECT_GE(entered.load(), 4 * round);
      group.start_barrier().wait();
    }
  });
}

TEST_P(GroupContract, ShardAndReplicaGroupsAreGroupsOfTheirOwn) {
  run(6, [](Group& world) {
    auto shard = world.split(world.rank() / 3, "shard");
    auto replica = world.split(world.rank() % 3, "replica");
    ASSERT_EQ(shard->size(), 3);
    ASSERT_EQ(replica->size(), 2);
    EXPECT_EQ(shard->rank(), world.rank() % 3);
    EXPECT_EQ(replica->rank(), world.rank() / 3);
    // In flight at the same time, on all three.
    std::int64_t in_world = 1LL << world.rank();
    std::int64_t in_shard = in_world;
    std::int64_t in_replica = in_world;
    const Pending first = world.start_all_reduce(&in_world, 1, DType::kInt64);
    const Pending second = shard->start_all_reduce(&in_shard, 1, DType::kInt64);
    const Pending third = replica->start_all_reduce(&in_replica, 1, DType::kInt64);
    third.wait();
    second.wait();
    first.wait();
    EXPECT_EQ(in_world, 0b111111);
    EXPECT_EQ(in_shard, world.rank() < 3 ? 0b000111 : 0b111000);
    EXPECT_EQ(in_replica, 0b001001 << (world.rank() % 3));
  });
}

TEST_P(GroupContract, AGroupOfOneIsMadeBySplitToo) {
  run(3, [](Group& world) {
    auto alone = world.split(world.rank(), "alone");
    EXPECT_EQ(alone->size(), 1);
    float value = 3.5F;
    alone->start_all_reduce(&value, 1, DType::kFloat32).wait();
    EXPECT_EQ(value, 3.5F);
    EXPECT_EQ(alone->wire_bytes().payload, 0U);
  });
}

TEST_P(GroupContract, WireBytesAreTheClosedForm) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    std::atomic<std::uint64_t> broadcast_total{0};
    run(num_ranks, [&](Group& group) {
      const auto peers = static_cast<std::uint64_t>(group.size() - 1);
      const auto num = static_cast<std::size_t>(group.size());
      constexpr std::size_t kNumel = 20011;  // larger than what is packed
      std::vector<float> shard(kNumel, 1.0F);
      std::vector<float> full(kNumel * num, 1.0F);
      std::vector<float> other(kNumel * num);
      auto sent = [&, before = std::uint64_t{0}]() mutable {
        const std::uint64_t now = group.wire_bytes().payload;
        return now - std::exchange(before, now);
      };
      const Gather gather{shard.data(), full.data(), kNumel, DType::kFloat32};
      group.start_all_gather({&gather, 1}).wait();
      EXPECT_EQ(sent(), peers * kNumel * 4);
      group
          .start_reduce_scatter(full.data(), shard.data(), kNumel, DType::kFloat32, DType::kFloat32)
          .wait();
      EXPECT_EQ(sent(), peers * kNumel * 4);
      group.start_all_to_all(full.data(), other.data(), kNumel, DType::kFloat32).wait();
      EXPECT_EQ(sent(), peers * kNumel * 4);
      group.start_all_reduce(full.data(), kNumel, DType::kFloat32).wait();
      EXPECT_EQ(sent(), peers * 2 * ((kNumel + num - 1) / num) * 4);
      group.start_barrier().wait();
      EXPECT_EQ(sent(), 0U);
      group.start_broadcast(full.data(), kNumel, DType::kFloat32, group.size() - 1).wait();
      broadcast_total += sent();
      EXPECT_EQ(group.wire_bytes().num_calls, 6U);
    });
    EXPECT_EQ(broadcast_total.load(), static_cast<std::uint64_t>(num_ranks - 1) * 20011 * 4);
  }
}

TEST_P(GroupContract, BadArgumentsAreErrorsBeforeAnythingIsSent) {
  run(2, [](Group& group) {
    float value = 1.0F;
    EXPECT_THROW(group.start_all_reduce(nullptr, 1, DType::kFloat32).wait(), ConfigError);
    EXPECT_THROW(group.start_all_reduce(&value, -1, DType::kFloat32).wait(), ConfigError);
    EXPECT_THROW(group.start_broadcast(&value, 1, DType::kFloat32, 2).wait(), ConfigError);
    EXPECT_THROW(
        group.start_reduce_scatter(&value, &value, 1, DType::kFloat32, DType::kBFloat16).wait(),
        ConfigError);
    EXPECT_EQ(group.wire_bytes().num_calls, 0U);
    group.start_all_reduce(&value, 1, DType::kFloat32).wait();
    EXPECT_EQ(value, 2.0F);
  });
}

// One random call, its input and what it must give. All ranks draw the same calls.
class RandomCall {
 public:
  RandomCall(Group& group, std::mt19937_64& random) : seed_(random()) {
    const auto num = static_cast<std::size_t>(group.size());
    const int rank = group.rank();
    const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const auto numel =
        static_cast<std::size_t>(random() % 7 == 0 ? random() % 9000 : random() % 200);
    const auto count = static_cast<std::int64_t>(numel);
    switch (random() % 5) {
      case 0: {
        in_ = reference::array(seed_, rank, 0, numel, dtype);
        out_.resize(in_.size() * num);
        expected_ = reference::arrays(seed_, group.size(), numel, dtype);
        const Gather gather{in_.data(), out_.data(), count, dtype};
        pending_ = group.start_all_gather({&gather, 1});
        break;
      }
      case 1:
        in_ = reference::array(seed_, rank, 0, numel * num, dtype);
        out_.resize(numel * 4);
        expected_ =
            reference::rank_order_sum(seed_, group.size(), numel * static_cast<std::size_t>(rank),
                                      numel, dtype, DType::kFloat32);
        pending_ =
            group.start_reduce_scatter(in_.data(), out_.data(), count, dtype, DType::kFloat32);
        break;
      case 2:
        out_ = reference::array(seed_, rank, 0, numel, dtype);
        expected_ = reference::rank_order_sum(seed_, group.size(), 0, numel, dtype, dtype);
        pending_ = group.start_all_reduce(out_.data(), count, dtype);
        break;
      case 3: {
        const int root = static_cast<int>(random() % num);
        out_ = reference::array(seed_, rank, 0, numel, dtype);
        expected_ = reference::array(seed_, root, 0, numel, dtype);
        pending_ = group.start_broadcast(out_.data(), count, dtype, root);
        break;
      }
      default:
        in_ = reference::array(seed_, rank, 0, numel * num, dtype);
        out_.resize(in_.size());
        for (int from = 0; from < group.size(); ++from) {
          const Bytes piece =
              reference::array(seed_, from, numel * static_cast<std::size_t>(rank), numel, dtype);
          expected_.insert(expected_.end(), piece.begin(), piece.end());
        }
        pending_ = group.start_all_to_all(in_.data(), out_.data(), count, dtype);
    }
  }

  void check(const std::string& where) {
    pending_.wait();
    expect_same(out_, expected_, where);
  }

 private:
  std::uint64_t seed_;
  Bytes in_;
  Bytes out_;
  Bytes expected_;
  Pending pending_;
};

TEST_P(GroupContract, ThousandsOfRandomCallsInFlightEqualTheReference) {
  for (const int num_ranks : {1, 2, 3, 5}) {
    run(num_ranks, [](Group& group) {
      std::mt19937_64 random(static_cast<std::uint64_t>(group.size()) * 977);
      std::vector<std::unique_ptr<RandomCall>> in_flight;
      for (int i = 0; i < support::rounds(400, 150); ++i) {
        in_flight.push_back(std::make_unique<RandomCall>(group, random));
        if (in_flight.size() >= 8) {  // a random one is waited for first
          const std::size_t pick = random() % in_flight.size();
          in_flight[pick]->check("call " + std::to_string(i));
          in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(pick));
        }
      }
      for (auto& call : in_flight) {
        call->check("at the end");
      }
    });
  }
}

}  // namespace
}  // namespace tessera::comm
