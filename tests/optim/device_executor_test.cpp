// Updates shared between the CPU and a discrete device, on the mock device, where every copy and
// kernel ends late: the bits are those of one memory, whoever updates.
#include "tessera/optim/device_executor.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"
#include "tests/optim/optimizer_fixture.h"
#include "tests/support/expect_names.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr int kSharedSteps = 4;

Placement by_cpu(Tier parameter) { return {parameter, Tier::kHost, Tier::kHost, Updater::kCpu}; }
Placement by_device(Tier parameter, Tier states) {
  return {parameter, Tier::kDevice, states, Updater::kDevice};
}

// Sizes that do not divide, some larger than a slot.
FixtureCase mixed_case(DType dtype = DType::kBFloat16) {
  FixtureCase test;
  test.shapes = {{5, by_device(Tier::kDevice, Tier::kDevice)},
                 {9001, by_device(Tier::kHost, Tier::kHost)},
                 {4096, by_cpu(Tier::kHost)},
                 {12289, by_device(Tier::kDevice, Tier::kHost)},
                 {5000, by_cpu(Tier::kDevice)},
                 {3001, by_device(Tier::kHost, Tier::kHost)},
                 {7, by_device(Tier::kDevice, Tier::kDevice)}};
  test.dtype = test.gradient_dtype = dtype;
  test.device = FixtureDevice::kDiscrete;
  test.mode = device::LateMode::kRandom;
  return test;
}

FixtureCase one_large(device::LateMode mode) {
  FixtureCase test = mixed_case();
  test.shapes = {{100000, by_device(Tier::kHost, Tier::kHost)}};  // 49 pieces
  test.mode = mode;
  test.slot_numel = 2048;
  return test;
}

// Gradients of the device's parameters are summed there, the CPU's are copies of each.
FixtureCase two_backwards(FixtureCase test) {
  test.num_backwards = 2;
  test.num_micro_batches = 2;
  return test;
}

// Those whose states stream are copies on the host as well, and come with the states.
FixtureCase with_host_gradients(FixtureCase test, int num_backwards) {
  for (auto& shape : test.shapes) {
    if (shape.placement.states == Tier::kHost) {
      shape.placement.gradient = Tier::kHost;
    }
  }
  test.has_host_gradients = true;
  test.num_backwards = num_backwards;
  test.num_micro_batches = num_backwards;
  return test;
}

// Every parameter goes to the place of the next one, and back, between steps.
TEST(SharedUpdate, GoesOnWithTheSameBitsInAnotherOptimizerAndOtherPlaces) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    FixtureCase test = mixed_case(dtype);
    if (dtype == DType::kFloat32) {  // its states stay with its master
      test.shapes = {{9001, by_device(Tier::kHost, Tier::kHost)},
                     {4096, by_cpu(Tier::kHost)},
                     {12289, by_device(Tier::kDevice, Tier::kDevice)}};
    }
    std::vector<Placement> here;
    for (const FixtureShape& shape : test.shapes) {
      here.push_back(shape.placement);
    }
    std::vector<Placement> there = here;
    std::rotate(there.begin(), there.begin() + 1, there.end());
    const std::vector<Trained> expected = train(1, test, kSharedSteps);
    comm::run_ranks(1, [&](comm::Group& group) {
      OptimizerFixture fixture(group, test);
      for (int step = 1; step <= kSharedSteps; ++step) {
        fixture.step(step);
        fixture.hand_over(step % 2 == 1 ? there : here);
      }
      EXPECT_EQ(fixture.optimizer().num_updates(), kSharedSteps);
      EXPECT_EQ(fixture.trained(), expected.front());
    });
  }
}

struct Lending {
  int num_lent = 0;               // slots besides, at most
  bool takes_back_early = false;  // before the update starts
};

struct Counts {
  int num_lent = 0;
  int num_copies = 0;  // on the device, of parameters that live on the host
  std::size_t most_copies_h2d = 0;
};

// The steps of a fixture as an engine makes them: memory is lent and taken back, and parameters are
// gathered from where the device made them.
class SharedSteps {
 public:
  SharedSteps(OptimizerFixture& fixture, const FixtureCase& test, const Lending& lending)
      : fixture_(fixture), test_(test), lending_(lending) {}

  void step(int number) {
    Optimizer& optimizer = fixture_.optimizer();
    optimizer.prepare();
    fixture_.backward(number);
    lend();
    if (lending_.takes_back_early) {
      take_back();
    }
    norms.push_back(optimizer.sum_of_squares(fixture_.reducer()));
    fixture_.start_update();
    check_copies();
    take_back();
    if (number % 2 == 0) {
      free_copies();
    }
    optimizer.wait();
    for (int id = 0; id < fixture_.params().num_params(); ++id) {
      EXPECT_TRUE(fixture_.params()[id].placement().updater == Updater::kCpu ||
                  fixture_.params()[id].updated().done())
          << "gradients go now, and " << fixture_.params()[id].name() << " may be read there";
    }
    free_copies();
    fixture_.reducer().clear();
  }

  std::vector<double> norms;
  Counts counts;

 private:
  // As a backward frees memory.
  void lend() {
    DeviceExecutor& executor = fixture_.optimizer().device_executor();
    while (lent_.size() < static_cast<std::size_t>(lending_.num_lent) && executor.wants_slot()) {
      device::Device& device = fixture_.device();
      auto memory = std::make_shared<device::Memory>(
          device.allocate(Tier::kDevice, executor.slot_bytes(), Role::kOther));
      lent_.push_back(memory);
      executor.lend(memory->data(), device.stream(device::StreamKind::kCompute).record(), memory);
      ++counts.num_lent;
    }
  }

  // Half of it, then the rest. Whoever gets it back writes to it at once.
  void take_back() {
    for (const std::size_t num_kept : {lent_.size() / 2, std::size_t{0}}) {
      fixture_.optimizer().device_executor().keep_lent(num_kept);
      const std::size_t num_due = lent_.size() - num_kept;
      const std::size_t num_back =
          std::erase_if(lent_, [](const std::shared_ptr<device::Memory>& memory) {
            const bool is_back = memory.use_count() == 1;
            if (is_back) {
              std::memset(memory->data(), 0xff, memory->bytes());
            }
            return is_back;
          });
      EXPECT_EQ(num_back, num_due);
    }
  }

  // Copies on the device are the new values, before and beside those that go to the host.
  void check_copies() {
    for (int id = 0; id < fixture_.params().num_params(); ++id) {
      const shard::Param& param = fixture_.params()[id];
      const shard::DeviceCopy& copy = param.device_copy();
      if (copy.values == nullptr) {
        continue;
      }
      EXPECT_TRUE(param.is_on_host());
      ++counts.num_copies;
      std::vector<std::byte> copied(static_cast<std::size_t>(param.range().numel) *
                                    bytes_of(test_.dtype));
      device::Stream& stream = fixture_.device().stream(device::StreamKind::kGather);
      stream.wait(copy.made);
      fixture_.device().start_copy(copied.data(), copy.values, copied.size(), stream).wait();
      param.updated().wait();
      EXPECT_EQ(std::memcmp(copied.data(), param.shard(), copied.size()), 0) << param.name();
    }
  }

  // As a forward that has gathered them does.
  void free_copies() {
    std::vector<int> ids;
    for (int id = 0; id < fixture_.params().num_params(); ++id) {
      shard::Param& param = fixture_.params()[id];
      if (param.device_copy().values != nullptr) {
        param.forget_device_copy();
        param.updated().wait();
        fixture_.reducer().free_gradient(id);
        ids.push_back(id);
      }
    }
    // Memory is freed in the order of the calls, which need not be that of updates.
    for (int id = 0; id < fixture_.params().num_params(); ++id) {
      fixture_.params()[id].updated().wait();
    }
    fixture_.device().stream(device::StreamKind::kReduce).synchronize();
    for (const int id : ids) {
      fixture_.reducer().free_gradient(id);  // of what is done by now
      EXPECT_TRUE(fixture_.gradient(id).expired()) << fixture_.params()[id].name();
    }
  }

  OptimizerFixture& fixture_;
  const FixtureCase& test_;
  const Lending lending_;
  std::vector<std::shared_ptr<device::Memory>> lent_;
};

Counts expect_same_bits(const FixtureCase& test, const Lending& lending = {}) {
  Counts counts;
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture reference(group, in_memory(test));
    OptimizerFixture fixture(group, test);
    SharedSteps expected(reference, test, {});
    SharedSteps found(fixture, test, lending);
    for (int step = 1; step <= kSharedSteps; ++step) {
      expected.step(step);
      found.step(step);
    }
    EXPECT_EQ(found.norms, expected.norms);
    EXPECT_TRUE(fixture.trained() == reference.trained());
    counts = found.counts;
    counts.most_copies_h2d = fixture.most_copies_h2d();
  });
  return counts;
}

TEST(DeviceExecutor, GivesTheBitsOfOneMemory) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    FixtureCase test = mixed_case(dtype);
    expect_same_bits(two_backwards(test));
    test.mode = device::LateMode::kLazy;
    expect_same_bits(test);
  }
}

TEST(DeviceExecutor, GivesTheSameBitsForEveryNumberAndSizeOfSlots) {
  for (const int num_slots : {1, 3, 40}) {
    for (const std::size_t numel : {2048, 16384}) {
      FixtureCase test = mixed_case();
      test.num_slots = num_slots;
      test.slot_numel = numel;
      expect_same_bits(test);
    }
  }
}

TEST(DeviceExecutor, UsesMemoryThatIsLentAndGivesItBack) {
  for (const device::LateMode mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
    for (const bool takes_back_early : {false, true}) {
      FixtureCase test = mixed_case();
      test.mode = mode;
      test.num_slots = 1;
      test.slot_numel = 2048;
      EXPECT_EQ(expect_same_bits(test, {5, takes_back_early}).num_lent, 5 * kSharedSteps);
    }
  }
}

// Parameters that the model waits for share the queue of H2D copies. Here copies end only when
// somebody waits for them.
TEST(DeviceExecutor, SendsStatesTwoAtATimeHoweverManySlotsThereAre) {
  FixtureCase test = one_large(device::LateMode::kLazy);
  test.num_slots = 8;
  EXPECT_EQ(expect_same_bits(test, {7}).most_copies_h2d, 2U);
}

TEST(DeviceExecutor, WantsNoMoreSlotsThanItHasPieces) {
  FixtureCase test = one_large(device::LateMode::kRandom);
  test.shapes[0].numel = 4000;
  test.num_slots = 1;
  EXPECT_EQ(expect_same_bits(test, {100}).num_lent, kSharedSteps);  // two pieces, one slot
}

// More pieces than slots, own and lent: each slot is used again.
TEST(DeviceExecutor, UsesLentMemoryAgainUntilItIsWantedBack) {
  for (const device::LateMode mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
    FixtureCase test = one_large(mode);
    test.num_slots = 1;
    EXPECT_EQ(expect_same_bits(test, {7}).num_lent, 7 * kSharedSteps);
  }
}

TEST(DeviceExecutor, LeavesNewParametersWhereTheirGradientsWere) {
  // Two of them live on the host and are the device's.
  EXPECT_EQ(expect_same_bits(mixed_case()).num_copies, 2 * kSharedSteps);
  // fp32 is its own master; and the sum of two backwards is in fp32.
  EXPECT_EQ(expect_same_bits(mixed_case(DType::kFloat32)).num_copies, 0);
  EXPECT_EQ(expect_same_bits(two_backwards(mixed_case())).num_copies, 0);
}

TEST(DeviceExecutor, TakesStatesThatLiveOnTheDeviceWithAParameterOnTheHost) {
  FixtureCase test = mixed_case();
  test.shapes = {{5003, by_device(Tier::kHost, Tier::kDevice)},
                 {3000, by_device(Tier::kDevice, Tier::kDevice)}};
  expect_same_bits(test);
}

TEST(DeviceExecutor, NeedsNoStatesForPlainDescent) {
  FixtureCase test = mixed_case();
  test.rule.kind = RuleKind::kSgd;
  expect_same_bits(test);
}

TEST(DeviceExecutor, MakesMastersAnewOfShardsThatWereWritten) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const FixtureCase test = mixed_case(dtype);
    std::vector<Trained> results;
    for (const FixtureCase& each : {in_memory(test), test}) {
      run_one(each, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        fixture.optimizer().prepare();
        for (int id = 0; id < fixture.params().num_params(); ++id) {
          fixture.write_shard(id, 90 + static_cast<std::uint64_t>(id));
          fixture.optimizer().reset_master(id);
        }
        fixture.step(2);
        results.push_back(fixture.trained());
      });
    }
    EXPECT_TRUE(results[1] == results[0]);
  }
}

// Ranks compare versions, also of a parameter of which they have no element.
TEST(DeviceExecutor, UpdatesAShardWithoutElementsAsOftenAsThoseOfOtherRanks) {
  for (const std::int64_t other : {std::int64_t{0}, std::int64_t{9001}}) {
    comm::run_ranks(3, [&](comm::Group& group) {
      FixtureCase test = mixed_case();
      test.shapes = {{5, by_device(Tier::kHost, Tier::kHost)}};
      if (other > 0) {
        test.shapes.push_back({other, by_device(Tier::kHost, Tier::kHost)});
      }
      OptimizerFixture fixture(group, test);
      EXPECT_EQ(fixture.params()[0].range().numel, group.rank() == 0 ? 5 : 0);
      for (int step = 1; step <= 3; ++step) {
        fixture.step(step);
        EXPECT_EQ(fixture.params()[0].version(), static_cast<std::uint64_t>(step))
            << "rank " << group.rank();
      }
    });
  }
}

TEST(DeviceExecutor, SaysThatThereAreNoSlotsForStatesThatStream) {
  comm::run_ranks(1, [&](comm::Group& group) {
    FixtureCase test = mixed_case();
    test.num_slots = 0;
    support::expect_names<ConfigError>([&] { const OptimizerFixture fixture(group, test); },
                                       "optim.cpu_share");
  });
}

TEST(DeviceExecutor, NeedsNoSlotsForWhatIsFrozen) {
  FixtureCase test = mixed_case();
  test.shapes = {{3000, by_device(Tier::kHost, Tier::kHost), false},
                 {2000, by_device(Tier::kDevice, Tier::kDevice)}};
  test.num_slots = 0;
  run_one(test, [](OptimizerFixture& fixture) {
    fixture.params()[0].set_trainable(true);
    support::expect_names<ConfigError>([&] { fixture.optimizer().follow_trainable(0); },
                                       "parameter 'p0' is to be trained");
  });
}

TEST(DeviceExecutor, AddsGradientsThatAreOnTheHostInItsSlots) {
  // Under a sanitizer one type, and three copies.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int num_backwards : {1, 2, 3, 6}) {
      if (support::kIsSanitized && (dtype == DType::kFloat32 || num_backwards % 3 != 0)) {
        continue;
      }
      for (const auto mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
        FixtureCase test = with_host_gradients(mixed_case(dtype), num_backwards);
        test.mode = mode;
        EXPECT_EQ(expect_same_bits(test).num_copies, 0) << "no gradient is there to write over";
        test.num_host_buffers = grad::least_host_buffers(dtype, num_backwards);
        expect_same_bits(test);
      }
    }
  }
}

TEST(DeviceExecutor, TakesMoreBackwardsThanMemoryWasPlannedFor) {
  FixtureCase test = mixed_case();
  test.num_backwards = 3;
  expect_same_bits(test);
}

}  // namespace
}  // namespace tessera::optim
