// The half of the contract that is about failures: every rank ends, with words that help.
#include <latch>

#include "tessera/core/error.h"
#include "tests/comm/group_contract.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

// Each rank's failure must say all of `words`.
void expect_failures(const std::vector<std::exception_ptr>& failures,
                     const std::vector<std::string>& words) {
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    ASSERT_TRUE(failures[rank]) << "rank " << rank << " saw nothing";
    try {
      std::rethrow_exception(failures[rank]);
    } catch (const CommError& error) {
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
            << "rank " << rank << ": " << error.what() << "\nlacks: " << word;
      }
    }
  }
}

TEST_P(GroupContract, AnotherOperationOnOneRankIsAnErrorOnAllThatNamesBoth) {
  const auto failures = GetParam().run(3, patient(), [](Group& group) {
    std::vector<float> data(30, 1.0F);
    group.start_barrier().wait();
    if (group.rank() == 1) {
      group.start_broadcast(data.data(), 10, DType::kFloat32, 0).wait();
    } else {
      group.start_all_reduce(data.data(), 30, DType::kFloat32).wait();
    }
  });
  expect_failures(failures, {"all_reduce #2", "broadcast #2", "rank 1"});
}

TEST_P(GroupContract, AnotherSizeOrParameterOnOneRankIsAnErrorOnAll) {
  const auto sizes = GetParam().run(2, patient(), [](Group& group) {
    std::vector<float> data(64, 1.0F);
    group.start_all_reduce(data.data(), group.rank() == 0 ? 64 : 63, DType::kFloat32).wait();
  });
  expect_failures(sizes, {"256 bytes", "252 bytes"});
  const auto labels = GetParam().run(2, patient(), [](Group& group) {
    std::vector<float> data(64, 1.0F);
    CallOptions options;
    options.label.unit = "h.0";
    options.label.parameter = group.rank() == 0 ? "attn.weight" : "mlp.weight";
    group.start_all_reduce(data.data(), 64, DType::kFloat32, Reduction::kSum, options).wait();
  });
  expect_failures(labels, {"unit 'h.0', parameter 'attn.weight'", "rank 1 called",
                           "unit 'h.0', parameter 'mlp.weight'"});
}

TEST_P(GroupContract, ARankThatNeverComesIsNamedWithUnitAndParameter) {
  std::latch all_told(2);
  const auto failures = GetParam().run(3, hasty(), [&](Group& group) {
    std::vector<float> data(64, 1.0F);
    CallOptions options;
    options.label = {"h.3", "attn.weight"};
    group.start_barrier().wait();
    if (group.rank() == 1) {
      all_told.wait();
      throw CommError("all_reduce of rank 1 was never called: 'h.3', 'attn.weight', not arrived");
    }
    const Pending pending =
        group.start_all_reduce(data.data(), 64, DType::kFloat32, Reduction::kSum, options);
    try {
      pending.wait();
    } catch (...) {
      all_told.count_down();
      throw;
    }
    all_told.count_down();
  });
  expect_failures(failures, {"rank 1", "'h.3'", "'attn.weight'", "not arrived"});
}

TEST_P(GroupContract, TheFirstFailureIsRepeatedByEveryLaterCall) {
  const auto failures = GetParam().run(2, patient(), [](Group& group) {
    float value = 1.0F;
    std::string first;
    try {
      group.start_all_reduce(&value, group.rank(), DType::kFloat32).wait();
    } catch (const CommError& error) {
      first = error.what();
    }
    EXPECT_NE(first, "");
    for (int i = 0; i < 3; ++i) {
      try {
        group.start_barrier().wait();
        ADD_FAILURE() << "a poisoned group went on";
      } catch (const CommError& error) {
        EXPECT_EQ(error.what(), first);
      }
    }
  });
  for (const auto& failure : failures) {
    EXPECT_FALSE(failure);
  }
}

TEST_P(GroupContract, ARankThatThrowsEndsTheOthersWithItsName) {
  const auto failures = GetParam().run(3, patient(), [](Group& group) {
    group.start_barrier().wait();
    if (group.rank() == 2) {
      throw CommError("all_gather: rank 2 failed: no more data");
    }
    float value = 1.0F;
    std::vector<float> full(3);
    const Gather gather{&value, full.data(), 1, DType::kFloat32};
    group.start_all_gather({&gather, 1}).wait();
  });
  expect_failures(failures, {"rank 2 failed", "no more data", "all_gather"});
}

}  // namespace
}  // namespace tessera::comm
