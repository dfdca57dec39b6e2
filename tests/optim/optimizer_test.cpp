// One arithmetic: shards are updated as if they were whole, and wherever they live, however few
// buffers they pass through, an update gives the bits that it gives in memory.
#include "tessera/optim/optimizer.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/optim/optimizer_fixture.h"
#include "tests/optim/update_case.h"
#include "tests/support/expect_names.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr int kSteps = support::rounds(3, 2);
// Of placements, what a loop takes at a time: dev compares the bits of all of them.
constexpr int kPlacementStep = support::rounds(1, 3);
constexpr int kNumPlacements = 8;  // of parameter, gradient and states, in memory or on NVMe
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

Placement placement(int bits) { return on_nvme((bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0); }

std::string text_of(int bits) {
  return std::string((bits & 1) != 0 ? "parameter " : "") + ((bits & 2) != 0 ? "gradient " : "") +
         ((bits & 4) != 0 ? "states " : "") + "on NVMe";
}

// Smaller than a block, a whole one, ragged, none, frozen; one that is larger than all buffers.
std::vector<FixtureShape> shapes_at(int bits, std::int64_t largest = 9001) {
  std::vector<FixtureShape> shapes;
  for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{15}, std::int64_t{4096},
                                   std::int64_t{5000}, std::int64_t{0}, largest}) {
    shapes.push_back({numel, placement(bits)});
  }
  shapes.push_back({17, placement(bits), false});
  return shapes;
}

void expect_equal(const std::vector<Trained>& found, const std::vector<Trained>& expected,
                  std::size_t num_tensors) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    ASSERT_EQ(found[rank].size(), expected[rank].size());
    for (std::size_t i = 0; i < found[rank].size(); ++i) {
      EXPECT_TRUE(found[rank][i] == expected[rank][i])
          << "tensor " << i % num_tensors << " of p" << i / num_tensors << " on rank " << rank;
    }
  }
}

void expect_bits_of_memory(int num_ranks, const FixtureCase& test) {
  expect_equal(train(num_ranks, test, kSteps), train(num_ranks, in_memory(test), kSteps),
               2 + state_names(test.rule).size());
}

// What the steps make of a whole tensor.
Weights whole_after(const FixtureCase& test, int id, int num_ranks) {
  const std::int64_t numel = test.shapes[static_cast<std::size_t>(id)].numel;
  Weights whole(static_cast<std::size_t>(numel));
  whole.master = whole_parameter(numel, test.dtype, static_cast<std::uint64_t>(id));
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<float> gradient = whole_gradient(numel, DType::kFloat32, step, 0, id);
    for (float& value : gradient) {
      value *= static_cast<float>(num_ranks);
    }
    UpdateSpan span = whole.span(gradient.data());
    if (test.dtype != DType::kFloat32) {
      span.parameter = whole.parameter.data();
      span.parameter_dtype = test.dtype;
    }
    UpdateScalars scalars;
    scalars.step = step;
    scalars.lr = kFixtureLr;
    scalars.gradient_scale = kFixtureScale;
    scalars.weight_decay_scale = id % 2 == 0 ? 1 : 0;
    update(test.rule, scalars, span);
  }
  return whole;
}

// This rank's elements, and zeros behind them.
template <typename Value>
std::vector<std::byte> piece_of(const shard::Param& param, const std::vector<Value>& whole) {
  std::vector<Value> piece(static_cast<std::size_t>(param.layout().shard_numel()));
  const auto begin = whole.begin() + param.range().begin;
  std::copy(begin, begin + param.range().numel, piece.begin());
  const auto* const bytes = reinterpret_cast<const std::byte*>(piece.data());
  return {bytes, bytes + piece.size() * sizeof(Value)};
}

void expect_whole(OptimizerFixture& fixture, const FixtureCase& test, int num_ranks) {
  const Trained trained = fixture.trained();
  const std::size_t num_states = state_names(test.rule).size();
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    const shard::Param& param = fixture.params()[id];
    const std::size_t at = static_cast<std::size_t>(id) * (2 + num_states);
    if (!param.trainable()) {
      EXPECT_EQ(param.version(), 0U);
      EXPECT_TRUE(trained[at + 1].empty());
      continue;
    }
    EXPECT_EQ(param.version(), static_cast<std::uint64_t>(kSteps));
    const Weights whole = whole_after(test, id, num_ranks);
    std::vector<std::vector<std::byte>> expected = {
        test.dtype == DType::kFloat32 ? piece_of(param, whole.master)
                                      : piece_of(param, whole.parameter),
        piece_of(param, whole.master), piece_of(param, whole.first), piece_of(param, whole.second)};
    for (std::size_t i = 0; i < 2 + num_states; ++i) {
      EXPECT_TRUE(trained[at + i] == expected[i]) << "tensor " << i << " of " << param.name();
    }
  }
}

TEST(Optimizer, UpdatesShardsAsIfTheyWereWhole) {
  for (const int num_ranks : {1, 2, 3}) {
    for (const DType dtype : kTypes) {
      if (support::kIsSanitized && dtype == DType::kFloat16) {
        continue;  // to memory the same as bf16
      }
      for (const FixtureDevice device : {FixtureDevice::kCpu, FixtureDevice::kMock}) {
        if (support::kIsSanitized && num_ranks != (device == FixtureDevice::kCpu ? 1 : 3)) {
          continue;
        }
        for (const auto& [name, rule] : all_rules()) {
          FixtureCase test;
          test.dtype = dtype;
          test.device = device;
          test.rule = rule;
          test.shapes = {{1000}, {3}, {17, {}, false}, {0}, {4099}};
          comm::run_ranks(num_ranks, [&](comm::Group& group) {
            OptimizerFixture fixture(group, test);
            for (int step = 1; step <= kSteps; ++step) {
              fixture.backward(step);
              fixture.start_update();
              fixture.reducer().clear();  // behind the update on its stream
            }
            fixture.optimizer().wait();
            EXPECT_EQ(fixture.optimizer().num_updates(), kSteps);
            expect_whole(fixture, test, num_ranks);
          });
        }
      }
    }
  }
}

TEST(Optimizer, HoldsTheBytesOfTheClosedForm) {
  for (const int num_ranks : {1, 3}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const auto& [name, rule] : all_rules()) {
        FixtureCase test;
        test.dtype = dtype;
        test.rule = rule;
        test.shapes = {{1000}, {3}, {17, {}, false}, {0}, {4099}};
        comm::run_ranks(num_ranks, [&](comm::Group& group) {
          OptimizerFixture fixture(group, test);
          const std::size_t tensors =
              num_state_tensors(dtype, static_cast<int>(state_names(test.rule).size()));
          std::size_t expected = 0;
          for (int id = 0; id < fixture.params().num_params(); ++id) {
            const shard::Param& param = fixture.params()[id];
            expected += param.trainable()
                            ? 4 * tensors * static_cast<std::size_t>(param.layout().shard_numel())
                            : 0;
          }
          EXPECT_EQ(fixture.ledger().current_bytes(Tier::kDevice, Role::kOptimizer), expected);
        });
      }
    }
  }
}

TEST(Optimizer, GivesTheBitsOfMemoryForEveryRuleTypeAndPlacement) {
  for (const auto& [name, rule] : all_rules()) {
    for (const DType dtype : kTypes) {
      if (support::kIsSanitized && dtype == DType::kFloat16) {
        continue;  // to memory the same as bf16
      }
      FixtureCase test;
      test.rule = rule;
      test.dtype = dtype;
      test.shapes = shapes_at(0);
      const std::vector<Trained> expected = train(1, in_memory(test), kSteps);
      for (int bits = 1; bits < kNumPlacements; bits += kPlacementStep) {
        SCOPED_TRACE(name + ", " + std::string(to_string(dtype)) + ", " + text_of(bits));
        test.shapes = shapes_at(bits);
        test.num_buffers = 1 + bits % 3;
        expect_equal(train(1, test, kSteps), expected, 2 + state_names(rule).size());
      }
    }
  }
}

TEST(Optimizer, GivesTheSameBitsThroughAnyBuffers) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    FixtureCase test;
    test.dtype = dtype;
    test.shapes = shapes_at(7);
    const std::vector<Trained> expected = train(1, in_memory(test), kSteps);
    for (const std::int64_t sub_group_numel : {2048, 6144, 1 << 20}) {
      for (const double num_buffers : {1.0, 1.5, 3.0, 100.0}) {
        SCOPED_TRACE(std::to_string(sub_group_numel) + " elements, " + std::to_string(num_buffers) +
                     " buffers");
        test.sub_group_numel = sub_group_numel;
        test.num_buffers = num_buffers;
        expect_equal(train(1, test, kSteps), expected, 4);
      }
    }
  }
}

TEST(Optimizer, MixesPlacementsFromParameterToParameter) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int first = 0; first < kNumPlacements; first += kPlacementStep) {
      SCOPED_TRACE(text_of(first) + " first");
      FixtureCase test;
      test.dtype = dtype;
      test.num_buffers = 2;
      for (int i = 0; i < 2 * kNumPlacements; ++i) {
        // Neighbours of the same placement, too.
        test.shapes.push_back({100 + 400 * i, placement((first + i / 2 * 3) % kNumPlacements)});
      }
      test.sub_group_numel = 4096;
      expect_bits_of_memory(1, test);
    }
  }
}

TEST(Optimizer, UpdatesEveryRanksShardsAlsoWhereTheyAreEmpty) {
  for (const int num_ranks : {2, 3}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      for (const int bits : {1, 4, 7}) {
        SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + text_of(bits));
        FixtureCase test;
        test.dtype = dtype;
        test.shapes = shapes_at(bits);
        test.num_buffers = 2;
        expect_bits_of_memory(num_ranks, test);
      }
    }
  }
}

TEST(Optimizer, StreamsATensorThatIsLargerThanAllBuffersTogether) {
  FixtureCase test;
  test.dtype = DType::kBFloat16;
  test.shapes = shapes_at(7, 100003);
  test.num_buffers = 1;
  test.store = StoreKind::kFile;
  expect_bits_of_memory(1, test);
}

TEST(Optimizer, WaitsForEverythingThatTheMockDeviceHasNotDoneYet) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int bits = 0; bits < kNumPlacements; bits += kPlacementStep) {
      SCOPED_TRACE(text_of(bits));
      FixtureCase test;
      test.dtype = dtype;
      test.shapes = shapes_at(bits);
      test.num_buffers = 2;
      test.device = FixtureDevice::kMock;
      expect_bits_of_memory(1, test);
    }
  }
}

TEST(Optimizer, UpdatesAShardOnlyAfterWhatStillReadsIt) {
  for (const int bits : {0, 4}) {
    FixtureCase test;
    test.shapes = shapes_at(bits);
    test.device = FixtureDevice::kMock;
    run_one(test, [](OptimizerFixture& fixture) {
      fixture.backward(1);
      for (const device::StreamKind kind :
           {device::StreamKind::kGather, device::StreamKind::kReduce}) {
        const shard::Param& param = fixture.params()[3];
        const std::size_t bytes = param.layout().shard_bytes();
        const std::vector<std::byte> before(param.shard(), param.shard() + bytes);
        std::vector<std::byte> copy(bytes);
        const device::Pending copied = fixture.device().start_copy(
            copy.data(), param.shard(), bytes, fixture.device().stream(kind));
        fixture.start_update();
        EXPECT_FALSE(param.updated().done()) << "starting does not wait";
        fixture.optimizer().wait();
        copied.wait();
        EXPECT_EQ(copy, before);
        EXPECT_NE(std::vector<std::byte>(param.shard(), param.shard() + bytes), before);
      }
    });
  }
}

TEST(Optimizer, SumsTheSquaresOfItsPieces) {
  for (const int num_ranks : {1, 3}) {
    for (const int bits : {0, 2}) {
      for (const FixtureDevice device : {FixtureDevice::kCpu, FixtureDevice::kMock}) {
        FixtureCase test;
        test.shapes = shapes_at(bits);
        test.device = device;
        comm::run_ranks(num_ranks, [&](comm::Group& group) {
          OptimizerFixture fixture(group, test);
          fixture.backward(1);
          double expected = 0;
          for (int id = 0; id < fixture.params().num_params(); ++id) {
            const shard::Param& param = fixture.params()[id];
            if (param.trainable()) {
              auto values = whole_gradient(param.layout().numel(), DType::kFloat32, 1, 0, id);
              for (float& value : values) {
                value *= static_cast<float>(num_ranks);
              }
              expected +=
                  optim::sum_of_squares(values.data() + param.range().begin, param.range().numel);
            }
          }
          EXPECT_EQ(fixture.optimizer().sum_of_squares(fixture.reducer()), expected);
          fixture.reducer().clear();
        });
      }
    }
  }
}

// The same of one in memory, and of one that is `test`: steps and what happens between them.
void expect_same(const FixtureCase& test, const std::function<void(OptimizerFixture&)>& body) {
  std::vector<std::vector<Trained>> results;
  for (const FixtureCase& each : {in_memory(test), test}) {
    run_one(each, [&](OptimizerFixture& fixture) {
      body(fixture);
      results.push_back({fixture.trained()});
    });
  }
  expect_equal(results[1], results[0], 4);
}

TEST(Optimizer, FollowsAShardThatWasWrittenFromOutside) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int bits = 0; bits < kNumPlacements; ++bits) {
      SCOPED_TRACE(text_of(bits));
      FixtureCase test;
      test.dtype = dtype;
      test.shapes = shapes_at(bits);
      test.num_buffers = 100;  // leases hold everything from step to step
      expect_same(test, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        fixture.optimizer().prepare();
        fixture.write_shard(3, 99);
        fixture.optimizer().reset_master(3);
        const std::span<float> master = fixture.optimizer().state(3, "master");
        EXPECT_TRUE(std::ranges::equal(master.first(5000), whole_parameter(5000, dtype, 99)));
        fixture.step(2);
      });
    }
  }
}

TEST(Optimizer, GivesAParameterItsStatesWhenItIsUnfrozen) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int bits : {4, 5, 7}) {
      SCOPED_TRACE(text_of(bits));
      FixtureCase test;
      test.dtype = dtype;
      test.shapes = shapes_at(bits);
      test.shapes[1].trainable = false;
      test.shapes[3].trainable = false;
      test.num_buffers = 3;
      test.sub_group_numel = 4096;
      expect_same(test, [](OptimizerFixture& fixture) {
        const auto follow = [&](int id, bool trainable) {
          fixture.params()[id].set_trainable(trainable);
          fixture.optimizer().follow_trainable(id);
          fixture.remake_reducer();
        };
        fixture.step(1);
        follow(3, true);
        fixture.step(2);
        follow(3, false);
        follow(5, false);
        follow(1, true);
        fixture.step(3);
        follow(3, true);
        follow(5, true);
        fixture.step(4);
      });
    }
  }
}

TEST(Optimizer, RefusesAStateThatTheRuleDoesNotHave) {
  for (const int bits : {0, 7}) {
    FixtureCase test;
    test.shapes = shapes_at(bits);
    run_one(test, [](OptimizerFixture& fixture) {
      support::expect_names<ConfigError>([&] { fixture.optimizer().state(0, "momentum"); },
                                         "p0 has no state \"momentum\"");
    });
  }
}

// Fails the first piece of work that updates.
class FailingKernels final : public Kernels {
 public:
  explicit FailingKernels(Kernels& real) : real_(real) {}

  device::Pending start_updates(const RuleOptions& /*rule*/, std::span<const UpdateTask> /*tasks*/,
                                device::Stream& /*stream*/) override {
    return device::Pending::failed(std::make_exception_ptr(DeviceError("out of order")));
  }
  device::Pending start_sum_of_squares(const float* values, std::int64_t numel, double* result,
                                       device::Stream& stream) override {
    return real_.start_sum_of_squares(values, numel, result, stream);
  }
  device::Pending start_sums_of_squares(std::span<const NormSpan> spans, double* results,
                                        device::Stream& stream) override {
    return real_.start_sums_of_squares(spans, results, stream);
  }
  device::Pending start_total(std::span<const double* const> numbers, double* total,
                              device::Stream& stream) override {
    return real_.start_total(numbers, total, stream);
  }
  device::Pending start_step_factors(const StepSums* sums, const StepInputs& inputs,
                                     StepOnDevice* step, FoundStep* for_host,
                                     device::Stream& stream) override {
    return real_.start_step_factors(sums, inputs, step, for_host, stream);
  }
  device::Pending start_add(float* values, const void* addend, DType dtype, std::int64_t numel,
                            device::Stream& stream) override {
    return real_.start_add(values, addend, dtype, numel, stream);
  }
  device::Pending start_fold(const NormSpan& span, device::Stream& stream) override {
    return real_.start_fold(span, stream);
  }
  device::Pending start_join(float* to, const void* high, const void* low, std::int64_t numel,
                             device::Stream& stream) override {
    return real_.start_join(to, high, low, numel, stream);
  }
  device::Pending start_convert(void* to, DType to_dtype, const void* from, DType from_dtype,
                                float scale, std::int64_t numel, device::Stream& stream) override {
    return real_.start_convert(to, to_dtype, from, from_dtype, scale, numel, stream);
  }
  device::Pending start_hash(const void* data, std::size_t bytes, std::uint64_t* sum,
                             device::Stream& stream) override {
    return real_.start_hash(data, bytes, sum, stream);
  }

 private:
  Kernels& real_;
};

TEST(Optimizer, PassesTheFailureOfAnUpdateOnToWhoeverWaits) {
  FixtureCase test;
  test.shapes = {{1000}, {3}, {4099}};
  run_one(test, [](OptimizerFixture& fixture) {
    FailingKernels kernels(fixture.kernels());
    const OptimizerOptions real = fixture.options();
    Optimizer optimizer(fixture.params(), {}, {real.device, kernels, real.clock, real.spans});
    optimizer.make_states();
    fixture.backward(1);
    optimizer.start_update(fixture.reducer(), kFixtureLr, kFixtureScale);
    EXPECT_THROW(optimizer.wait(), DeviceError);
    EXPECT_THROW(fixture.params()[1].updated().wait(), DeviceError);
    EXPECT_THROW(fixture.params()[2].updated().wait(), DeviceError) << "one piece of work";
  });
}

}  // namespace
}  // namespace tessera::optim
