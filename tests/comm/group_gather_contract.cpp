// The part of the contract that is about gathers with a Pending per tensor, and to some ranks only.
#include <cstring>

#include "tessera/core/error.h"
#include "tests/comm/group_contract.h"
#include "tests/comm/reference.h"
#include "tests/comm/time_limits.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

using Bytes = std::vector<std::byte>;

// Shards of this rank and room for what is gathered.
class Tensors {
 public:
  Tensors(const Group& group, const std::vector<reference::Tensor>& tensors, bool in_place = false)
      : group_size_(group.size()), tensors_(tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      shards_.push_back(reference::array(i, group.rank(), 0, tensors[i].numel, tensors[i].dtype));
      const std::size_t bytes = shards_.back().size();
      fulls_.emplace_back(bytes * static_cast<std::size_t>(group_size_), std::byte{0xee});
      std::byte* own = fulls_.back().data() + bytes * static_cast<std::size_t>(group.rank());
      if (in_place && bytes > 0) {
        std::memcpy(own, shards_.back().data(), bytes);
      }
      gathers_.push_back({in_place ? own : shards_.back().data(), fulls_.back().data(),
                          static_cast<std::int64_t>(tensors[i].numel), tensors[i].dtype});
    }
  }

  std::vector<Gather>& gathers() { return gathers_; }

  void expect_gathered(std::size_t i) const {
    Bytes expected;
    for (int rank = 0; rank < group_size_; ++rank) {
      const Bytes part = reference::array(i, rank, 0, tensors_[i].numel, tensors_[i].dtype);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    EXPECT_TRUE(fulls_[i] == expected) << "tensor " << i;
  }
  void expect_gathered() const {
    for (std::size_t i = 0; i < fulls_.size(); ++i) {
      expect_gathered(i);
    }
  }

 private:
  const int group_size_;
  const std::vector<reference::Tensor> tensors_;
  std::vector<Bytes> shards_;
  std::vector<Bytes> fulls_;
  std::vector<Gather> gathers_;
};

TEST_P(GroupContract, AGatherWithAPendingPerTensorBringsEachTensor) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (const bool in_place : {false, true}) {
        Tensors tensors(group, reference::kMixedTensors, in_place);
        const std::vector<Pending> pendings = group.start_all_gathers(tensors.gathers());
        ASSERT_EQ(pendings.size(), reference::kMixedTensors.size());
        for (std::size_t i = pendings.size(); i-- > 0;) {
          pendings[i].wait();
          tensors.expect_gathered(i);
        }
      }
      EXPECT_EQ(group.wire_bytes().num_calls, 2U);
      EXPECT_TRUE(group.start_all_gathers({}).empty());
    });
  }
}

TEST_P(GroupContract, GathersPerTensorMayBeInFlightTogetherWithOtherCalls) {
  run(3, [](Group& group) {
    std::vector<std::unique_ptr<Tensors>> tensors;
    std::vector<std::vector<Pending>> pendings;
    std::vector<std::int64_t> sums(20, 1);
    std::vector<Pending> reduced;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      tensors.push_back(std::make_unique<Tensors>(group, reference::kMixedTensors));
      pendings.push_back(group.start_all_gathers(tensors.back()->gathers()));
      reduced.push_back(group.start_all_reduce(&sums[i], 1, DType::kInt64));
    }
    for (std::size_t i = sums.size(); i-- > 0;) {
      Pending::all(pendings[i]).wait();
      tensors[i]->expect_gathered();
      reduced[i].wait();
      EXPECT_EQ(sums[i], 3);
    }
  });
}

TEST_P(GroupContract, AFailureIsTheFailureOfEveryTensor) {
  const auto failures = GetParam().run(3, patient(), [](Group& group) {
    Tensors tensors(group, reference::kMixedTensors);
    CallOptions options;
    options.label = {"h.0", group.rank() == 1 ? "mlp.weight" : "attn.weight"};
    const std::vector<Pending> pendings = group.start_all_gathers(tensors.gathers(), options);
    const std::vector<Pending> later = group.start_all_gathers(tensors.gathers(), options);
    for (const Pending& pending : pendings) {
      EXPECT_THROW(pending.wait(), CommError);
    }
    for (const Pending& pending : later) {
      EXPECT_THROW(pending.wait(), CommError);
    }
    for (const Pending& pending : group.start_all_gathers(tensors.gathers(), options)) {
      pending.wait();
    }
  });
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    EXPECT_NE(what(failure).find("parameter 'mlp.weight'"), std::string::npos) << what(failure);
  }
}

// Nobody, each one alone, all but one, all.
std::vector<std::vector<std::uint8_t>> wants_of(int num_ranks) {
  const auto num = static_cast<std::size_t>(num_ranks);
  std::vector<std::vector<std::uint8_t>> all = {std::vector<std::uint8_t>(num, 0),
                                                std::vector<std::uint8_t>(num, 1)};
  for (std::size_t rank = 0; rank < num; ++rank) {
    all.emplace_back(num, 0).at(rank) = 1;
    all.emplace_back(num, 1).at(rank) = 0;
  }
  return all;
}

TEST_P(GroupContract, AGatherToSomeReachesThoseAndOnlyThose) {
  for (int num_ranks = 1; num_ranks <= support::rounds(4, 3); ++num_ranks) {
    run(num_ranks, [](Group& group) {
      for (const auto& wants : wants_of(group.size())) {
        for (const bool in_place : {false, true}) {
          const bool receives = wants[static_cast<std::size_t>(group.rank())] != 0;
          Tensors tensors(group, reference::kMixedTensors, in_place && receives);
          if (!receives) {
            for (Gather& gather : tensors.gathers()) {
              gather.full = nullptr;
            }
          }
          group.start_gather_to(tensors.gathers(), wants).wait();
          if (receives) {
            tensors.expect_gathered();
          }
        }
      }
    });
  }
}

TEST_P(GroupContract, AGatherToSomeSendsThePieceToEachOtherRankThatWantsIt) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    run(num_ranks, [](Group& group) {
      const std::vector<reference::Tensor> kinds = {{20011, DType::kFloat32},
                                                    {70001, DType::kUInt8}};
      Tensors tensors(group, kinds);
      for (const auto& wants : wants_of(group.size())) {
        std::uint64_t num_receivers = 0;
        for (int rank = 0; rank < group.size(); ++rank) {
          num_receivers += rank != group.rank() ? wants[static_cast<std::size_t>(rank)] : 0;
        }
        const std::uint64_t before = group.wire_bytes().payload;
        group.start_gather_to(tensors.gathers(), wants).wait();
        EXPECT_EQ(group.wire_bytes().payload - before, num_receivers * (20011 * 4 + 70001));
      }
    });
  }
}

TEST_P(GroupContract, NobodyLeavesAGatherThatNobodyWantsBeforeAllHaveEntered) {
  std::atomic<int> entered{0};
  run(3, [&](Group& group) {
    Tensors tensors(group, reference::kMixedTensors);
    const std::vector<std::uint8_t> nobody(3, 0);
    ++entered;
    group.start_gather_to(tensors.gathers(), nobody).wait();
    EXPECT_EQ(entered.load(), 3);
  });
}

TEST_P(GroupContract, RanksThatDifferInWhoWantsAGatherAreToldSo) {
  const auto failures = GetParam().run(3, patient(), [](Group& group) {
    Tensors tensors(group, reference::kMixedTensors);
    const std::vector<std::uint8_t> wants = {1, 0, static_cast<std::uint8_t>(group.rank() == 1)};
    CallOptions options;
    options.label = {"experts.3", "weight"};
    group.start_gather_to(tensors.gathers(), wants, options).wait();
  });
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    EXPECT_NE(what(failure).find("rank 1 called gather_to #1"), std::string::npos);
    EXPECT_NE(what(failure).find("unit 'experts.3'"), std::string::npos) << what(failure);
  }
}

TEST_P(GroupContract, AGatherToSomeRefusesWhatCannotBe) {
  run(2, [](Group& group) {
    Tensors tensors(group, reference::kMixedTensors);
    const std::vector<std::uint8_t> too_few = {1};
    EXPECT_THROW(group.start_gather_to(tensors.gathers(), too_few).wait(), ConfigError);
    const std::vector<std::uint8_t> both = {1, 1};
    tensors.gathers()[2].full = nullptr;
    tensors.gathers()[2].name = "mlp.weight";
    try {
      group.start_gather_to(tensors.gathers(), both).wait();
      ADD_FAILURE() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(),
                   "gather_to: full of tensor 3 'mlp.weight' is null; it has 80044 bytes per rank");
    }
    EXPECT_EQ(group.wire_bytes().num_calls, 0U);
  });
}

}  // namespace
}  // namespace tessera::comm
