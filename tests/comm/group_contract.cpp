// The part of the contract that is about ranks: whatever one of them does otherwise, every rank is
// told in the same words and nobody's memory is written; failures end all of them; and groups of
// groups are groups of their own.
#include <algorithm>
#include <atomic>
#include <utility>

#include "tessera/core/error.h"
#include "tests/comm/contract.h"
#include "tests/comm/forked_ranks.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

constexpr const char* kSameOrder = "; all ranks must call the same collectives in the same order";

// A gather of tensors of one size, so that only names tell two of them apart.
struct NamedGather {
  std::string unit = "h.3";
  std::vector<std::string> names = {"attn.weight", "mlp.weight", "mlp.bias"};
  std::uint64_t content_hash = 7;
};

class NamedGathers {
 public:
  static constexpr std::size_t kNumel = 257;
  static constexpr float kUntouched = -7.0F;

  explicit NamedGathers(const ContractRank& here)
      : here_(here), shard_(here, std::vector<float>(kNumel, 1.0F)) {}

  void run(const NamedGather& call) {
    const std::size_t full_numel = kNumel * static_cast<std::size_t>(here_.group.size());
    std::vector<Gather> gathers;
    fulls_.clear();
    for (const std::string& name : call.names) {
      fulls_.push_back(
          std::make_unique<CallValues<float>>(here_, std::vector<float>(full_numel, kUntouched)));
      gathers.push_back({shard_.data(), fulls_.back()->data(), static_cast<std::int64_t>(kNumel),
                         DType::kFloat32, name});
    }
    CallOptions options;
    options.label = {call.unit, call.names.front()};
    options.content_hash = call.content_hash;
    here_.group.start_all_gather(gathers, options).wait();
  }
  bool is_untouched() const {
    return std::all_of(fulls_.begin(), fulls_.end(), [](const auto& full) {
      const std::vector<float>& values = full->read();
      return std::all_of(values.begin(), values.end(),
                         [](float value) { return value == kUntouched; });
    });
  }

 private:
  const ContractRank& here_;
  CallValues<float> shard_;
  std::vector<std::unique_ptr<CallValues<float>>> fulls_;  // of the last call
};

struct OddGather {
  NamedGather call;
  std::string sentence;  // '#' stands for the number of the call
};

std::vector<OddGather> odd_gathers() {
  const std::string usual =
      "all_gather # (3 tensors, 3084 bytes, fp32) for unit 'h.3', parameter 'attn.weight'";
  const std::string where = " where ranks 0, 1, 3 called " + usual;
  return {{{"h.4", {"attn.gate", "mlp.weight", "mlp.bias"}},
           "rank 2 called all_gather # (3 tensors, 3084 bytes, fp32) for unit 'h.4', parameter "
           "'attn.gate'" +
               where +
               "; the first tensor that differs is number 1: 'attn.gate' on rank 2, 'attn.weight' "
               "on rank 0"},
          {{"h.3", {"attn.weight", "mlp.bias", "mlp.weight"}},
           "rank 2 called " + usual + where +
               "; the first tensor that differs is number 2: 'mlp.bias' on rank 2, 'mlp.weight' on "
               "rank 0"},
          {{"h.3", {"attn.weight", "mlp.weight", "mlp.bias", "mlp.scale"}},
           "rank 2 called all_gather # (4 tensors, 4112 bytes, fp32) for unit 'h.3', parameter "
           "'attn.weight'" +
               where +
               "; the first tensor that differs is number 4: 'mlp.scale' on rank 2, none on rank "
               "0"},
          {{"h.3", {"attn.weight", "mlp.weight", "mlp.bias"}, 8},
           "rank 2 called " + usual + where +
               "; they have the same names, but are not about the same sizes or parameters"}};
}

// In the first call and in a late one.
TEST_P(GroupContract, WhatOneRankCallsOtherwiseIsNamedOnEveryRank) {
  for (const OddGather& odd : odd_gathers()) {
    for (const int call : {1, support::rounds(120, 20)}) {
      std::string expected = odd.sentence + kSameOrder;
      for (std::size_t at = expected.find('#'); at != expected.npos; at = expected.find('#', at)) {
        expected.insert(++at, std::to_string(call));
      }
      const auto failures = run_collecting(4, [&](ContractRank& here) {
        NamedGathers gathers(here);
        for (int i = 1; i < call; ++i) {
          gathers.run({});
        }
        try {
          gathers.run(here.group.rank() == 2 ? odd.call : NamedGather());
        } catch (const CommError&) {
          // On a stream numbers may have arrived; nobody was told that they are there.
          EXPECT_TRUE(here.group.is_stream_ordered() || gathers.is_untouched())
              << "rank " << here.group.rank();
          throw;
        }
      });
      for (const auto& failure : failures) {
        EXPECT_EQ(text_of(failure), expected);
      }
    }
  }
}

// Rank 3 waits in a call that the others never join: it can hear of the mismatch in their group
// only from the status store, as a rank does whose own comparison is late.
TEST_P(GroupContract, ARankThatOnlyHearsOfAMismatchIsToldTheSameSentence) {
  const auto failures = run_collecting(4, [](ContractRank& here) {
    const int rank = here.group.rank();
    const auto part = here.group.split(rank == 3 ? 1 : 0, "part");
    if (rank == 3) {
      here.group.start_barrier().wait();
    }
    CallOptions options;
    options.label.unit = rank == 1 ? "h.1" : "h.0";
    CallValues<float> value(here, {1.0F});
    part->start_all_reduce(value.data(), 1, DType::kFloat32, Reduction::kSum, options).wait();
  });
  for (const auto& failure : failures) {
    EXPECT_EQ(text_of(failure),
              std::string("rank 1 called all_reduce #1 (1 tensor, 4 bytes, fp32) for unit 'h.1' "
                          "where ranks 0, 2 called all_reduce #1 (1 tensor, 4 bytes, fp32) for "
                          "unit 'h.0'") +
                  kSameOrder);
  }
}

TEST_P(GroupContract, AnotherOperationOrSizeOnOneRankIsAnErrorOnAllThatNamesBoth) {
  expect_failures(3, {"all_reduce #2", "broadcast #2", "rank 1"}, [](ContractRank& here) {
    CallValues<float> data(here, std::vector<float>(30, 1.0F));
    here.group.start_barrier().wait();
    if (here.group.rank() == 1) {
      here.group.start_broadcast(data.data(), 10, DType::kFloat32, 0).wait();
    } else {
      here.group.start_all_reduce(data.data(), 30, DType::kFloat32).wait();
    }
  });
  expect_failures(2, {"256 bytes", "252 bytes"}, [](ContractRank& here) {
    CallValues<float> data(here, std::vector<float>(64, 1.0F));
    here.group.start_all_reduce(data.data(), 64 - here.group.rank(), DType::kFloat32).wait();
  });
  expect_failures(3, {"rank 1 called gather_to #1", "unit 'experts.3'"}, [](ContractRank& here) {
    CallValues<float> shard(here, {1.0F});
    CallValues<float> full(here, std::vector<float>(3));
    const Gather gather{shard.data(), full.data(), 1, DType::kFloat32};
    const std::vector<std::uint8_t> wants = {1, 0,
                                             static_cast<std::uint8_t>(here.group.rank() == 1)};
    CallOptions options;
    options.label = {"experts.3", "weight"};
    here.group.start_gather_to({&gather, 1}, wants, options).wait();
  });
}

TEST_P(GroupContract, AFailureIsThatOfEveryTensorAndOfEveryLaterCall) {
  expect_failures(3, {"parameter 'mlp.weight'"}, [](ContractRank& here) {
    CallValues<float> shard(here, std::vector<float>(20011, 1.0F));
    CallValues<float> full(here, std::vector<float>(3 * 20011));
    std::vector<Gather> gathers;
    for (const std::int64_t numel : {20011, 0, 17, 1}) {
      gathers.push_back({shard.data(), full.data(), numel, DType::kFloat32});
    }
    CallOptions options;
    options.label = {"h.0", here.group.rank() == 1 ? "mlp.weight" : "attn.weight"};
    std::string first;
    for (int call = 0; call < 3; ++call) {
      for (const Pending& pending : here.group.start_all_gathers(gathers, options)) {
        try {
          pending.wait();
          ADD_FAILURE() << "a poisoned group went on";
        } catch (const CommError& error) {
          first = first.empty() ? error.what() : first;
          EXPECT_EQ(error.what(), first);
        }
      }
    }
    here.group.start_barrier().wait();
  });
}

TEST_P(GroupContract, ARankThatThrowsEndsTheOthersWithItsName) {
  expect_failures(3, {"rank 2 failed", "no more data", "all_gather"}, [](ContractRank& here) {
    here.group.start_barrier().wait();
    if (here.group.rank() == 2) {
      throw CommError("all_gather: rank 2 failed: no more data");
    }
    CallValues<float> value(here, {1.0F});
    CallValues<float> full(here, std::vector<float>(3));
    const Gather gather{value.data(), full.data(), 1, DType::kFloat32};
    here.group.start_all_gather({&gather, 1}).wait();
  });
}

TEST_P(GroupContract, AnAbortEndsTheGroupHereAndOnTheOtherRanks) {
  expect_failures(3, {"rank 2", "no more data"}, [](ContractRank& here) {
    CallValues<float> value(here, {1.0F});
    CallValues<float> full(here, std::vector<float>(3));
    const Gather gather{value.data(), full.data(), 1, DType::kFloat32};
    const Pending in_flight = here.group.start_all_gather({&gather, 1});
    if (here.group.rank() == 2) {
      here.group.abort("there is no more data");
      here.group.abort("the first reason counts");
      EXPECT_TRUE(in_flight.done());
      try {
        here.group.start_barrier().wait();
        ADD_FAILURE() << "an aborted group went on";
      } catch (const PeerError& error) {
        EXPECT_STREQ(error.what(), "group 'world' was aborted: there is no more data");
      }
      throw CommError("rank 2 failed: no more data");
    }
    in_flight.wait();  // the others may have been there before
    here.group.start_barrier().wait();
  });
}

TEST_P(GroupContract, TagsAreTheOnlyControlBytes) {
  run(3, [](ContractRank& here) {
    for (int i = 0; i < 10; ++i) {
      here.group.start_barrier().wait();
    }
    const bool compares_in_memory = here.group.call_memory() == CallMemory::kShared;
    const bool sends_tags = !compares_in_memory &&
                            (here.group.backend_name() == "gloo" || here.group.is_stream_ordered());
    EXPECT_EQ(here.group.wire_bytes().control, sends_tags ? 10U * 2U * sizeof(CallTag) : 0U);
  });
}

TEST_P(GroupContract, ACallIsMetWhenTheLastRankHasStartedItAndNotBefore) {
  const RankLatch others_started(2);
  run(3, [&](ContractRank& here) {
    CallValues<float> input(here, std::vector<float>(3, 1.0F));
    CallValues<float> sum(here, {0.0F});
    CallOptions options;
    options.met = std::make_shared<std::atomic<bool>>(false);
    if (here.group.rank() == 2) {
      others_started.wait();
    }
    const Pending reduced = here.group.start_reduce_scatter(
        input.data(), sum.data(), 1, DType::kFloat32, DType::kFloat32, options);
    if (here.group.rank() != 2) {
      EXPECT_FALSE(*options.met) << "rank 2 is still waiting for us";
      others_started.count_down();
    }
    reduced.wait();
    EXPECT_TRUE(*options.met);
    EXPECT_EQ(sum.read().front(), 3.0F);
  });
}

TEST_P(GroupContract, ACallOnWhichRanksDifferIsNeverMet) {
  expect_failures(2, {"unit 'h.0'", "unit 'h.1'"}, [](ContractRank& here) {
    CallValues<float> value(here, {1.0F});
    CallOptions options;
    options.label.unit = here.group.rank() == 0 ? "h.0" : "h.1";
    options.met = std::make_shared<std::atomic<bool>>(false);
    try {
      here.group.start_all_reduce(value.data(), 1, DType::kFloat32, Reduction::kSum, options)
          .wait();
    } catch (const CommError&) {
      EXPECT_FALSE(*options.met);
      throw;
    }
  });
}

TEST_P(GroupContract, NobodyLeavesABarrierOrAGatherThatNobodyWantsBeforeAllHaveEntered) {
  const SharedByRanks<std::atomic<int>> entered;
  run(4, [&](ContractRank& here) {
    CallValues<float> shard(here, {1.0F});
    const Gather gather{shard.data(), nullptr, 1, DType::kFloat32};
    const std::vector<std::uint8_t> nobody(4, 0);
    for (int round = 1; round <= support::rounds(20, 5); ++round) {
      ++*entered;
      here.group.start_barrier().wait();
      EXPECT_GE(entered->load(), 8 * round - 4);
      ++*entered;
      here.group.start_gather_to({&gather, 1}, nobody).wait();
      EXPECT_GE(entered->load(), 8 * round);
    }
  });
}

TEST_P(GroupContract, ShardAndReplicaGroupsAreGroupsOfTheirOwn) {
  run(6, [](ContractRank& here) {
    Group& world = here.group;
    auto shard = world.split(world.rank() / 3, "shard");
    auto replica = world.split(world.rank() % 3, "replica");
    auto alone = world.split(world.rank(), "alone");
    ASSERT_EQ(shard->size(), 3);
    ASSERT_EQ(replica->size(), 2);
    ASSERT_EQ(alone->size(), 1);
    EXPECT_EQ(shard->rank(), world.rank() % 3);
    EXPECT_EQ(replica->rank(), world.rank() / 3);
    // In flight at the same time, on all of them.
    const std::vector<std::int64_t> own = {1LL << world.rank()};
    CallValues<std::int64_t> in_world(here, own);
    CallValues<std::int64_t> in_shard(here, own);
    CallValues<std::int64_t> in_replica(here, own);
    CallValues<std::int64_t> in_alone(here, own);
    const Pending first = world.start_all_reduce(in_world.data(), 1, DType::kInt64);
    const Pending second = shard->start_all_reduce(in_shard.data(), 1, DType::kInt64);
    const Pending third = replica->start_all_reduce(in_replica.data(), 1, DType::kInt64);
    alone->start_all_reduce(in_alone.data(), 1, DType::kInt64).wait();
    third.wait();
    second.wait();
    first.wait();
    EXPECT_EQ(in_world.read().front(), 0b111111);
    EXPECT_EQ(in_shard.read().front(), world.rank() < 3 ? 0b000111 : 0b111000);
    EXPECT_EQ(in_replica.read().front(), 0b001001 << (world.rank() % 3));
    EXPECT_EQ(in_alone.read().front(), 1LL << world.rank());
    EXPECT_EQ(alone->wire_bytes().payload, 0U);
  });
}

TEST_P(GroupContract, AGroupMayHaveItsRanksInAnotherOrder) {
  run(4, [](ContractRank& here) {
    Group& world = here.group;
    // Two hosts of two: by local rank first.
    const std::int64_t key = world.rank() % 2 * 2 + world.rank() / 2;
    const auto ordered = world.split_by({0, key}, "ordered", world.owner());
    EXPECT_EQ(ordered->rank(), key);
    CallValues<std::int64_t> own(here, {world.rank()});
    CallValues<std::int64_t> all(here, std::vector<std::int64_t>(4));
    const Gather gather{own.data(), all.data(), 1, DType::kInt64};
    ordered->start_all_gather({&gather, 1}).wait();
    EXPECT_EQ(all.read(), (std::vector<std::int64_t>{0, 2, 1, 3}));
  });
}

TEST_P(GroupContract, BadArgumentsAreErrorsBeforeAnythingIsSent) {
  run(2, [](ContractRank& here) {
    Group& group = here.group;
    float value = 1.0F;
    EXPECT_THROW(group.start_all_reduce(nullptr, 1, DType::kFloat32).wait(), ConfigError);
    EXPECT_THROW(group.start_all_reduce(&value, -1, DType::kFloat32).wait(), ConfigError);
    EXPECT_THROW(group.start_broadcast(&value, 1, DType::kFloat32, 2).wait(), ConfigError);
    EXPECT_THROW(
        group.start_reduce_scatter(&value, &value, 1, DType::kFloat32, DType::kBFloat16).wait(),
        ConfigError);
    const std::vector<Gather> gathers = {{&value, &value, 0, DType::kFloat32},
                                         {&value, nullptr, 3, DType::kFloat32, "mlp.weight"}};
    EXPECT_THROW(group.start_gather_to(gathers, std::vector<std::uint8_t>{1}).wait(), ConfigError);
    try {
      group.start_gather_to(gathers, std::vector<std::uint8_t>{1, 1}).wait();
      ADD_FAILURE() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(),
                   "gather_to: full of tensor 2 'mlp.weight' is null; it has 12 bytes per rank");
    }
    EXPECT_EQ(group.wire_bytes().num_calls, 0U);
    CallValues<float> good(here, {1.0F});
    group.start_all_reduce(good.data(), 1, DType::kFloat32).wait();
    EXPECT_EQ(good.read().front(), 2.0F);
  });
}

TEST_P(LimitContract, ARankThatNeverArrivesIsNamedWithUnitAndParameter) {
  const RankLatch all_told(2);
  const auto body = [&](ContractRank& here) {
    if (here.group.rank() == 1) {
      all_told.wait();
      throw CommError("all_reduce of rank 1 was never called: 'h.3', 'attn.weight', not arrived");
    }
    CallValues<float> data(here, std::vector<float>(64, 1.0F));
    CallOptions options;
    options.label = {"h.3", "attn.weight"};
    const Pending pending =
        here.group.start_all_reduce(data.data(), 64, DType::kFloat32, Reduction::kSum, options);
    try {
      pending.wait();
    } catch (...) {
      all_told.count_down();
      throw;
    }
    all_told.count_down();
  };
  expect_failures(3, {"rank 1", "'h.3'", "'attn.weight'", "not arrived"}, body, hasty());
}

}  // namespace
}  // namespace tessera::comm
