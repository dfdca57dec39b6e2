// A step whose sums over ranks, norm, factor and update are handed over together, on the mock
// device, where work ends when somebody waits for it: the bits and the counts are those of a step
// whose norm the host sees first, for any number of ranks.
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <latch>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/optim/optimizer_fixture.h"
#include "tests/optim/update_case.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr int kNumSteps = 4;

struct StepSetting {
  FixtureCase fixture;
  double clip_norm = 0.3;
  bool skips_nonfinite = true;
  double weight = 1.5;  // of rank 0; others have a little more
};

StepSetting on_device(DType dtype = DType::kBFloat16) {
  StepSetting test;
  test.fixture.shapes = {
      {9001}, {3, {}, true, 2},    {17, {}, false},        {0},
      {4099}, {5000, {}, true, 3}, {2500, {}, true, 1, 1}, {777, {}, true, 2, 0}};
  test.fixture.dtype = test.fixture.gradient_dtype = dtype;
  test.fixture.device = FixtureDevice::kDiscrete;
  test.fixture.num_micro_batches = 0;
  return test;
}

StepInputs inputs(const StepSetting& test) { return {1024, test.clip_norm, test.skips_nonfinite}; }

// With a loss that the device has.
OwnSums own_sums(const StepSetting& test, int rank) {
  OwnSums own;
  own.sums.weight = test.weight + 0.1 * rank;
  own.sums.votes[0] = rank;
  own.sums.votes[1] = 1;
  own.weighted_loss = std::make_shared<const double>(0.7 + rank);
  return own;
}

// Calls that are work of streams, as NCCL's are.
comm::ThreadWorldOptions ranks_on_streams(int num_ranks) {
  comm::ThreadWorldOptions ranks;
  ranks.num_ranks = num_ranks;
  ranks.on_streams = true;
  return ranks;
}

bool start_step(OptimizerFixture& fixture, const StepSetting& test, comm::Group& group) {
  return fixture.optimizer().start_step(fixture.reducer(), kFixtureLr, inputs(test),
                                        own_sums(test, group.rank()), group);
}

// As one piece of work, or as an engine does it that looks at the norm. Gives the sums.
StepSums finish(OptimizerFixture& fixture, const StepSetting& test, bool as_one) {
  Optimizer& optimizer = fixture.optimizer();
  comm::Group& group = fixture.group();
  StepSums sums;
  if (as_one) {
    EXPECT_TRUE(start_step(fixture, test, group));
    sums = optimizer.finish_step();
  } else {
    const OwnSums own = own_sums(test, group.rank());
    sums = own.sums;
    sums.gradient_squares = optimizer.sum_of_squares(fixture.reducer());
    sums.weighted_loss = *own.weighted_loss;
    auto numbers = std::bit_cast<std::array<double, kNumStepSums>>(sums);
    group.start_all_reduce(numbers.data(), kNumStepSums, DType::kFloat64).wait();
    sums = std::bit_cast<StepSums>(numbers);
    const StepFactors factors = step_factors(sums, 1024, test.clip_norm);
    if (factors.finite || !test.skips_nonfinite) {
      optimizer.start_update(fixture.reducer(), kFixtureLr, factors.gradient_scale);
    }
  }
  optimizer.wait();
  fixture.reducer().clear();
  return sums;
}

std::vector<std::uint64_t> versions(OptimizerFixture& fixture) {
  std::vector<std::uint64_t> all;
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    all.push_back(fixture.params()[id].version());
  }
  return all;
}

// Of one rank.
struct Outcome {
  std::vector<double> sums;
  std::vector<std::uint64_t> versions;
  std::int64_t num_updates = 0;
  Trained trained;
};

std::vector<Outcome> outcomes(const StepSetting& test, int num_ranks, bool as_one) {
  comm::ThreadWorldOptions ranks = ranks_on_streams(num_ranks);
  ranks.on_streams = as_one;
  std::vector<Outcome> all(static_cast<std::size_t>(num_ranks));
  comm::run_ranks(ranks, {}, [&](comm::Group& group) {
    Outcome& outcome = all[static_cast<std::size_t>(group.rank())];
    OptimizerFixture fixture(group, as_one ? test.fixture : in_memory(test.fixture));
    for (int step = 1; step <= kNumSteps; ++step) {
      fixture.backward(step);
      const StepSums sums = finish(fixture, test, as_one);
      for (double sum : std::bit_cast<std::array<double, kNumStepSums>>(sums)) {
        // Which of two NaNs a sum keeps, and with which sign, is the compiler's choice.
        sum = std::isnan(sum) ? std::numeric_limits<double>::quiet_NaN() : sum;
        outcome.sums.push_back(sum);
      }
    }
    outcome.versions = versions(fixture);
    outcome.num_updates = fixture.optimizer().num_updates();
    outcome.trained = fixture.trained();
  });
  return all;
}

void expect_same(const StepSetting& test, int num_ranks, const std::string& what) {
  const std::vector<Outcome> expected = outcomes(test, num_ranks, /*as_one=*/false);
  const std::vector<Outcome> found = outcomes(test, num_ranks, /*as_one=*/true);
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    const std::string where =
        what + ", rank " + std::to_string(rank) + " of " + std::to_string(num_ranks);
    EXPECT_TRUE(same_bits(found[rank].sums, expected[rank].sums)) << where;
    EXPECT_EQ(found[rank].versions, expected[rank].versions) << where;
    EXPECT_EQ(found[rank].num_updates, expected[rank].num_updates) << where;
    EXPECT_EQ(found[rank].num_updates,
              test.fixture.bad_step > 0 && test.skips_nonfinite ? kNumSteps - 1 : kNumSteps);
    EXPECT_TRUE(found[rank].trained == expected[rank].trained) << where;
  }
}

TEST(WholeStep, HasTheBitsAndCountsOfAStepThatLooksAtTheNorm) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const device::LateMode mode : {device::LateMode::kLazy, device::LateMode::kRandom}) {
      for (const bool sums_squares : {true, false}) {
        for (const int num_backwards : {1, 2}) {
          for (const double clip_norm : {0.3, 0.0, 1e-5}) {
            if (support::kIsSanitized && clip_norm != 0.3) {
              continue;  // another factor, and the same memory
            }
            StepSetting test = on_device(dtype);
            test.fixture.mode = mode;
            test.fixture.sums_squares = sums_squares;
            test.fixture.num_backwards = num_backwards;
            test.clip_norm = clip_norm;
            for (const int num_ranks : {1, 2, 3}) {
              expect_same(test, num_ranks,
                          std::string(to_string(dtype)) + ", " +
                              (sums_squares ? "on the way" : "at the end") + ", " +
                              std::to_string(num_backwards) + " backwards, clip " +
                              std::to_string(clip_norm));
            }
          }
        }
      }
    }
  }
}

// Also where one rank alone has the infinity: all skip.
TEST(WholeStep, ChangesAndCountsNothingIfItIsSkipped) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat16}) {
    for (const int bad_step : {1, 2, kNumSteps}) {
      for (const int num_ranks : {1, 2, 3}) {
        StepSetting test = on_device(dtype);
        test.fixture.num_backwards = bad_step == 2 ? 1 : 2;
        test.fixture.bad_step = bad_step;
        test.fixture.bad_rank = num_ranks - 1;
        expect_same(test, num_ranks, "step " + std::to_string(bad_step));
      }
    }
  }
}

TEST(WholeStep, KeepsTheWholeStateOfBeforeIfItIsSkipped) {
  for (const int num_ranks : {1, 2}) {
    StepSetting test = on_device();
    test.fixture.bad_step = 2;
    test.fixture.bad_rank = 0;
    comm::run_ranks(ranks_on_streams(num_ranks), {}, [&](comm::Group& group) {
      OptimizerFixture fixture(group, test.fixture);
      fixture.backward(1);
      finish(fixture, test, true);
      const Trained before = fixture.trained();
      const std::vector<std::uint64_t> known = versions(fixture);
      fixture.backward(2);
      EXPECT_FALSE(std::isfinite(finish(fixture, test, true).gradient_squares));
      EXPECT_TRUE(fixture.trained() == before);
      EXPECT_EQ(versions(fixture), known);
      EXPECT_EQ(fixture.optimizer().num_updates(), 1);
    });
  }
}

// NaNs spread through what the infinity touches, and the host's and the device's are the same here.
TEST(WholeStep, GoesOnWithWhatIsNotFiniteIfNobodyGuards) {
  StepSetting test = on_device();
  test.fixture.bad_step = 2;
  test.skips_nonfinite = false;
  expect_same(test, 1, "no guard");
  expect_same(test, 2, "no guard");
}

// Holds streams of a device up. A test that waits for one of them in between fails in the end.
class Gate {
 public:
  static constexpr std::chrono::seconds kLimit{60};

  void close(device::Device& device) {
    for (const auto kind : {device::StreamKind::kReduce, device::StreamKind::kComm,
                            device::StreamKind::kGather, device::StreamKind::kWrite}) {
      std::ignore = device.stream(kind).enqueue([opened = opened_, late = late_] {
        if (!opened->wait_for(kLimit)) {
          *late = true;
        }
      });
    }
  }
  void open() { opened_->succeed(); }
  bool was_waited_for() const { return *late_; }

 private:
  const std::shared_ptr<device::Completion> opened_ = std::make_shared<device::Completion>();
  const std::shared_ptr<std::atomic<bool>> late_ = std::make_shared<std::atomic<bool>>(false);
};

// From the first gradient to the updates the host waits for no work of the device: all of it is
// behind the gate.
TEST(WholeStep, IsHandedOverBeforeAnyOfItHasRun) {
  for (const int num_ranks : {1, 2, 3}) {
    StepSetting test = on_device();
    test.fixture.num_backwards = 2;
    comm::run_ranks(ranks_on_streams(num_ranks), {}, [&](comm::Group& group) {
      OptimizerFixture fixture(group, test.fixture);
      Optimizer& optimizer = fixture.optimizer();
      Gate gate;
      gate.close(fixture.device());
      fixture.backward(1);
      const device::Pending gradients =
          fixture.device().stream(device::StreamKind::kReduce).record();
      ASSERT_TRUE(start_step(fixture, test, group));
      EXPECT_FALSE(gate.was_waited_for()) << "rank " << group.rank() << " of " << num_ranks;
      EXPECT_FALSE(gradients.done()) << "nobody waited for the gradients";
      EXPECT_EQ(optimizer.num_updates(), 0);
      EXPECT_EQ(fixture.params()[0].version(), 0U);
      gate.open();
      optimizer.finish_step();
      EXPECT_TRUE(gradients.done());
      EXPECT_EQ(optimizer.num_updates(), 1);
      EXPECT_FALSE(fixture.params()[0].updated().done()) << "the norm is there before the update";
      optimizer.wait();
    });
  }
}

// The group whose tags are late.
enum class LateGroup : std::uint8_t {
  kOfSums,
  kOfTheCaller,  // who alone knows it, as an engine knows its groups of gathers
};
class WholeStepOfLateGroup : public ::testing::TestWithParam<LateGroup> {};
INSTANTIATE_TEST_SUITE_P(Each, WholeStepOfLateGroup,
                         ::testing::Values(LateGroup::kOfSums, LateGroup::kOfTheCaller));

// The streams have all numbers, and two ranks did not mean the same ones: no update is handed over
// before that is known, by whichever group.
TEST_P(WholeStepOfLateGroup, LeavesAllParametersWhereTheRanksDoNotAgree) {
  for (const int num_ranks : {2, 3}) {
    const auto gate = std::make_shared<device::Completion>();
    comm::ThreadWorldOptions ranks = ranks_on_streams(num_ranks);
    ranks.tags_arrive_after = device::Pending(gate);
    ranks.late_group = "units";
    std::latch have_started(num_ranks);
    std::atomic<int> num_named = 0;
    const StepSetting test = on_device();
    const auto failures = comm::run_ranks_collecting(ranks, {}, [&](comm::Group& group) {
      const auto units = group.split(0, "units");
      OptimizerFixture fixture(group, test.fixture);
      const Trained before = fixture.trained();
      // As a forward of another unit on the last rank, whose gather is no longer than the others'.
      const bool diverges = group.rank() == num_ranks - 1;
      std::vector<float> full(static_cast<std::size_t>(num_ranks));
      const comm::Gather shard{full.data() + group.rank(), full.data(), 1, DType::kFloat32,
                               diverges ? "head" : "block"};
      comm::CallOptions call;
      call.label.unit = diverges ? "head" : "block";
      call.stream = &fixture.device().stream(device::StreamKind::kReduce);
      std::ignore = units->start_all_gather({&shard, 1}, call);
      fixture.backward(1);
      comm::Group& sums = GetParam() == LateGroup::kOfSums ? *units : group;
      const std::uint64_t before_sums = sums.wire_bytes().num_calls;
      OwnSums own = own_sums(test, group.rank());
      if (GetParam() == LateGroup::kOfTheCaller) {
        own.wait_agreed = [&units] { units->wait_agreed(); };
      }
      std::thread opener;
      if (group.rank() == 0) {
        opener = std::thread([&] {
          have_started.wait();
          for (int i = 0; i < 20000; ++i) {
            std::this_thread::yield();  // whoever does not wait goes on
          }
          gate->succeed();
        });
      }
      std::thread watcher([&] {
        while (sums.wire_bytes().num_calls == before_sums) {
          std::this_thread::yield();
        }
        have_started.count_down();
      });
      try {
        fixture.optimizer().start_step(fixture.reducer(), kFixtureLr, inputs(test), own, sums);
        fixture.optimizer().finish_step();
        ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
      } catch (const comm::MismatchError& error) {
        const std::string text = error.what();
        const std::string name = "rank " + std::to_string(num_ranks - 1);
        EXPECT_NE(text.find(name), std::string::npos) << text;
        EXPECT_NE(text.find("head"), std::string::npos) << text;
        ++num_named;
      }
      watcher.join();
      if (opener.joinable()) {
        opener.join();
      }
      try {
        fixture.device().stream(device::StreamKind::kReduce).synchronize();
      } catch (const std::exception&) {  // what the network left behind
      }
      EXPECT_TRUE(fixture.trained() == before) << "rank " << group.rank();
      EXPECT_EQ(fixture.optimizer().num_updates(), 0);
    });
    EXPECT_EQ(num_named, num_ranks);
    for (const auto& failure : failures) {
      EXPECT_EQ(failure, nullptr);
    }
  }
}

// A rank that makes one call more than the others stands still on a device until it is ended.
TEST(WholeStep, LeavesAllParametersWhereOneRankMakesAnotherCall) {
  const StepSetting test = on_device();
  std::atomic<int> num_named = 0;
  const auto failures =
      comm::run_ranks_collecting(ranks_on_streams(3), {}, [&](comm::Group& group) {
        OptimizerFixture fixture(group, test.fixture);
        const Trained before = fixture.trained();
        fixture.backward(1);
        double number = 1;
        comm::CallOptions call;
        call.label.unit = "of rank 1 alone";
        call.stream = &fixture.device().stream(device::StreamKind::kReduce);
        if (group.rank() == 1) {
          std::ignore =
              group.start_all_reduce(&number, 1, DType::kFloat64, comm::Reduction::kSum, call);
        }
        try {
          start_step(fixture, test, group);
          fixture.optimizer().finish_step();
          ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
        } catch (const comm::MismatchError& error) {
          EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
          ++num_named;
        }
        try {
          fixture.device().stream(device::StreamKind::kReduce).synchronize();
        } catch (const std::exception&) {  // what the network left behind
        }
        EXPECT_TRUE(fixture.trained() == before) << "rank " << group.rank();
      });
  EXPECT_EQ(num_named, 3);
  for (const auto& failure : failures) {
    EXPECT_EQ(failure, nullptr);
  }
}

// A base that nobody trains has neither gradients nor states to wait for, wherever it is.
TEST(WholeStep, IsEnqueuedBesideAFrozenBaseElsewhere) {
  StepSetting test = on_device();
  FixtureShape frozen = test.fixture.shapes.front();
  frozen.trainable = false;
  frozen.placement = {Tier::kHost, Tier::kHost, Tier::kHost, Updater::kCpu};
  test.fixture.shapes.push_back(frozen);
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, test.fixture);
    fixture.backward(1);
    finish(fixture, test, true);
    EXPECT_EQ(fixture.optimizer().num_updates(), 1);
  });
}

TEST(WholeStep, NeedsADiscreteDeviceAndCallsOfStreams) {
  for (const int num_ranks : {1, 2}) {
    StepSetting test = on_device();
    test.fixture.device = num_ranks == 1 ? FixtureDevice::kCpu : FixtureDevice::kDiscrete;
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      OptimizerFixture fixture(group, test.fixture);
      fixture.backward(1);
      EXPECT_FALSE(start_step(fixture, test, group));
      finish(fixture, test, false);
      EXPECT_EQ(fixture.optimizer().num_updates(), 1);
    });
  }
}

// The host hears of it with the sums, and step_factors() refuses them.
TEST(WholeStep, ChangesNothingWhereTheWeightsGiveNoMean) {
  StepSetting test = on_device();
  run_one(test.fixture, [&](OptimizerFixture& fixture) {
    const Trained before = fixture.trained();
    fixture.backward(1);
    StepSetting zero = test;
    zero.weight = 0;
    ASSERT_TRUE(start_step(fixture, zero, fixture.group()));
    EXPECT_EQ(fixture.optimizer().finish_step().weight, 0);
    EXPECT_EQ(fixture.optimizer().num_updates(), 0);
    EXPECT_TRUE(fixture.trained() == before);
    finish(fixture, test, true);
    EXPECT_EQ(fixture.optimizer().num_updates(), 1);
  });
}

}  // namespace
}  // namespace tessera::optim
