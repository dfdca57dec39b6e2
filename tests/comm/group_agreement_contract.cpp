// The part of the contract that is about ranks that differ: whatever one rank does otherwise, in
// the first call or much later, every rank gets the same sentence, with the rank, the units and the
// parameters of both sides, and nobody's memory is written.
#include <algorithm>
#include <latch>
#include <utility>

#include "tessera/core/error.h"
#include "tests/comm/group_contract.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

constexpr int kNumRanks = 4;
constexpr int kOddRank = 2;
constexpr std::size_t kAgreedNumel = 257;

// One rank's calls: a gather of three tensors each, of one size, so that only names tell them
// apart.
class Caller {
 public:
  explicit Caller(Group& group)
      : group_(group),
        shard_(kAgreedNumel, 1.0F),
        fulls_(4, std::vector<float>(kAgreedNumel * kNumRanks)) {}

  struct Step {
    std::string unit = "h.3";
    std::vector<std::string> names = {"attn.weight", "mlp.weight", "mlp.bias"};
    std::uint64_t content_hash = 7;
  };

  void gather(const Step& step) {
    std::vector<Gather> gathers;
    for (std::size_t i = 0; i < step.names.size(); ++i) {
      gathers.push_back({shard_.data(), fulls_[i].data(), static_cast<std::int64_t>(kAgreedNumel),
                         DType::kFloat32, step.names[i]});
    }
    CallOptions options;
    options.label = {step.unit, step.names.front()};
    options.content_hash = step.content_hash;
    group_.start_all_gather(gathers, options).wait();
  }

  void poison() {
    for (auto& full : fulls_) {
      std::fill(full.begin(), full.end(), -7.0F);
    }
  }
  bool untouched() const {
    return std::all_of(fulls_.begin(), fulls_.end(), [](const std::vector<float>& full) {
      return std::count(full.begin(), full.end(), -7.0F) == static_cast<int>(full.size());
    });
  }

 private:
  Group& group_;
  std::vector<float> shard_;
  std::vector<std::vector<float>> fulls_;
};

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const CommError& error) {
    return error.what();
  }
}

// kOddRank makes `odd` of call number `call`: what each rank is told, without the call of its own
// that it puts before it.
std::vector<std::string> sentences(const ContractWorld& world, int call, const Caller::Step& odd) {
  const auto failures = world.run(kNumRanks, patient(), [&](Group& group) {
    Caller caller(group);
    for (int i = 1; i < call; ++i) {
      caller.gather({});
    }
    caller.poison();
    try {
      caller.gather(group.rank() == kOddRank ? odd : Caller::Step());
    } catch (const CommError&) {
      EXPECT_TRUE(caller.untouched()) << "rank " << group.rank();
      throw;
    }
  });
  std::vector<std::string> told;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank]) {
      ADD_FAILURE() << "rank " << rank << " was told nothing";
      continue;
    }
    told.push_back(text_of(failures[rank]));
  }
  return told;
}

// In the first call and in a late one, on every rank.
void expect_everywhere(const ContractWorld& world, const Caller::Step& odd,
                       const std::string& sentence) {
  for (const int call : {1, 120}) {
    std::string expected = sentence;
    const std::string number = "#" + std::to_string(call);
    for (std::size_t at = expected.find('#'); at != expected.npos;
         at = expected.find('#', at + 1)) {
      expected.replace(at, 1, number);
    }
    for (const std::string& told : sentences(world, call, odd)) {
      EXPECT_EQ(told, expected + "; all ranks must call the same collectives in the same order");
    }
  }
}

TEST_P(GroupContract, AnotherParameterOfTheSameShapeIsNamedOnEveryRank) {
  Caller::Step odd;
  odd.unit = "h.4";
  odd.names.front() = "attn.gate";
  expect_everywhere(
      GetParam(), odd,
      "rank 2 called all_gather # (3 tensors, 3084 bytes, fp32) for unit 'h.4', parameter "
      "'attn.gate' where ranks 0, 1, 3 called all_gather # (3 tensors, 3084 bytes, fp32) for unit "
      "'h.3', parameter 'attn.weight'; the first tensor that differs is number 1: 'attn.gate' on "
      "rank 2, 'attn.weight' on rank 0");
}

TEST_P(GroupContract, AnotherOrderOfTheSameParametersIsNamedOnEveryRank) {
  Caller::Step odd;
  std::swap(odd.names[1], odd.names[2]);
  expect_everywhere(
      GetParam(), odd,
      "rank 2 called all_gather # (3 tensors, 3084 bytes, fp32) for unit 'h.3', parameter "
      "'attn.weight' where ranks 0, 1, 3 called all_gather # (3 tensors, 3084 bytes, fp32) for "
      "unit "
      "'h.3', parameter 'attn.weight'; the first tensor that differs is number 2: 'mlp.bias' on "
      "rank 2, 'mlp.weight' on rank 0");
}

TEST_P(GroupContract, OneParameterMoreIsNamedOnEveryRank) {
  Caller::Step odd;
  odd.names.push_back("mlp.scale");
  expect_everywhere(
      GetParam(), odd,
      "rank 2 called all_gather # (4 tensors, 4112 bytes, fp32) for unit 'h.3', parameter "
      "'attn.weight' where ranks 0, 1, 3 called all_gather # (3 tensors, 3084 bytes, fp32) for "
      "unit "
      "'h.3', parameter 'attn.weight'; the first tensor that differs is number 4: 'mlp.scale' on "
      "rank 2, none on rank 0");
}

TEST_P(GroupContract, OtherContentUnderTheSameNamesIsAnErrorOnEveryRank) {
  Caller::Step odd;
  odd.content_hash = 8;
  expect_everywhere(
      GetParam(), odd,
      "rank 2 called all_gather # (3 tensors, 3084 bytes, fp32) for unit 'h.3', parameter "
      "'attn.weight' where ranks 0, 1, 3 called all_gather # (3 tensors, 3084 bytes, fp32) for "
      "unit "
      "'h.3', parameter 'attn.weight'; they have the same names, but are not about the same sizes "
      "or parameters");
}

// Rank 3 waits in a call that the others never join: it can hear of the mismatch in their group
// only from the status store, as a rank does whose own comparison is late.
TEST_P(GroupContract, ARankThatOnlyHearsOfAMismatchIsToldTheSameSentence) {
  const auto failures = GetParam().run(4, patient(), [](Group& world) {
    const auto part = world.split(world.rank() == 3 ? 1 : 0, "part");
    if (world.rank() == 3) {
      world.start_barrier().wait();
    }
    CallOptions options;
    options.label.unit = world.rank() == 1 ? "h.1" : "h.0";
    float value = 1;
    part->start_all_reduce(&value, 1, DType::kFloat32, Reduction::kSum, options).wait();
  });
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    EXPECT_EQ(what(failure),
              "rank 1 called all_reduce #1 (1 tensor, 4 bytes, fp32) for unit 'h.1' where ranks 0, "
              "2 called all_reduce #1 (1 tensor, 4 bytes, fp32) for unit 'h.0'; all ranks must "
              "call the same collectives in the same order");
  }
}

TEST_P(GroupContract, TagsAreTheOnlyControlBytes) {
  run(3, [](Group& group) {
    for (int i = 0; i < 10; ++i) {
      group.start_barrier().wait();
    }
    const bool sends_tags = group.backend_name() == "gloo";
    EXPECT_EQ(group.wire_bytes().control, sends_tags ? 10U * 2U * sizeof(CallTag) : 0U);
  });
}

TEST_P(GroupContract, ACallIsMetWhenTheLastRankHasStartedItAndNotBefore) {
  std::latch others_started(2);
  run(3, patient(), [&](Group& group) {
    std::vector<float> input(3, 1.0F);
    float sum = 0;
    CallOptions options;
    options.met = std::make_shared<std::atomic<bool>>(false);
    if (group.rank() == 2) {
      others_started.wait();
    }
    const Pending reduced = group.start_reduce_scatter(input.data(), &sum, 1, DType::kFloat32,
                                                       DType::kFloat32, options);
    if (group.rank() != 2) {
      EXPECT_FALSE(*options.met) << "rank 2 is still waiting for us";
      others_started.count_down();
    }
    reduced.wait();
    EXPECT_TRUE(*options.met);
    EXPECT_EQ(sum, 3.0F);
  });
}

TEST_P(GroupContract, ACallOnWhichRanksDifferIsNeverMet) {
  const auto failures = GetParam().run(2, patient(), [](Group& group) {
    float value = 1;
    CallOptions options;
    options.label.unit = group.rank() == 0 ? "h.0" : "h.1";
    options.met = std::make_shared<std::atomic<bool>>(false);
    try {
      group.start_all_reduce(&value, 1, DType::kFloat32, Reduction::kSum, options).wait();
    } catch (const CommError&) {
      EXPECT_FALSE(*options.met);
      throw;
    }
  });
  EXPECT_TRUE(failures[0] && failures[1]);
}

}  // namespace
}  // namespace tessera::comm
