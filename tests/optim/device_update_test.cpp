// Updates shared between the processor and a device with memory of its own, on the late double,
// where every copy and kernel ends late: the bits are those of one memory, whoever updates.
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/optim/device_update_world.h"
#include "tests/support/expect_names.h"

namespace tessera::optim {
namespace {

TEST(DeviceUpdate, GivesTheBitsOfOneMemory) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const device::LateMode mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
      Case test;
      test.shapes = mixed_shapes();
      test.dtype = dtype;
      test.mode = mode;
      expect_same_bits(test);
    }
  }
}

TEST(DeviceUpdate, GivesTheBitsOfOneMemoryWithSeveralMicroBatches) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Case test;
    test.shapes = mixed_shapes();
    test.dtype = dtype;
    test.leaves = false;
    test.num_backwards = 2;
    expect_same_bits(test);
  }
}

TEST(DeviceUpdate, GivesTheSameBitsForEveryNumberAndSizeOfSlots) {
  for (const int num_slots : {1, 3, 40}) {
    for (const std::size_t numel : {2048, 16384}) {
      Case test;
      test.shapes = mixed_shapes();
      test.num_slots = num_slots;
      test.slot_numel = numel;
      expect_same_bits(test);
    }
  }
}

TEST(DeviceUpdate, UsesMemoryThatIsLentAndGivesItBack) {
  for (const device::LateMode mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
    for (const bool takes_back_early : {false, true}) {
      Case test;
      test.shapes = mixed_shapes();
      test.mode = mode;
      test.num_slots = 1;
      test.slot_numel = 2048;
      test.num_lent = 5;
      test.takes_back_early = takes_back_early;
      EXPECT_EQ(expect_same_bits(test).num_lent, 5 * kSteps);
    }
  }
}

// Parameters that the model waits for go up in the same queue. Here copies end only when somebody
// waits for them.
TEST(DeviceUpdate, SendsStatesUpTwoAtATimeHoweverManySlotsThereAre) {
  Case test;
  test.shapes = {{100000, Tier::kHost, by_device(false)}};  // 49 pieces
  test.mode = device::LateMode::kLazy;
  test.num_slots = 8;
  test.slot_numel = 2048;
  test.num_lent = 7;
  EXPECT_EQ(expect_same_bits(test).most_copies_up, 2U);
}

TEST(DeviceUpdate, WantsNoMoreSlotsThanItHasPieces) {
  Case test;
  test.shapes = {{4000, Tier::kHost, by_device(false)}};
  test.num_slots = 1;
  test.slot_numel = 2048;
  test.num_lent = 100;
  EXPECT_EQ(expect_same_bits(test).num_lent, kSteps);  // two pieces, one slot
}

// More pieces than slots, own and lent: each slot is used again.
TEST(DeviceUpdate, UsesLentMemoryAgainUntilItIsWantedBack) {
  for (const device::LateMode mode : {device::LateMode::kRandom, device::LateMode::kLazy}) {
    Case test;
    test.shapes = {{100000, Tier::kHost, by_device(false)}};  // 49 pieces
    test.mode = mode;
    test.num_slots = 1;
    test.slot_numel = 2048;
    test.num_lent = 7;
    EXPECT_EQ(expect_same_bits(test).num_lent, 7 * kSteps);
  }
}

TEST(DeviceUpdate, LeavesNewParametersWhereTheirGradientsWere) {
  Case test;
  test.shapes = mixed_shapes();  // two of them live on the host and are the device's
  EXPECT_EQ(expect_same_bits(test).num_copies, 2 * kSteps);
  test.dtype = DType::kFloat32;  // is its own master
  EXPECT_EQ(expect_same_bits(test).num_copies, 0);
  test.dtype = DType::kBFloat16;
  test.leaves = false;
  test.num_backwards = 2;  // the sum is in fp32
  EXPECT_EQ(expect_same_bits(test).num_copies, 0);
}

TEST(DeviceUpdate, TakesStatesThatLiveOnTheDeviceWithAParameterOnTheHost) {
  Case test;
  test.shapes = {{5003, Tier::kHost, by_device(true)}, {3000, Tier::kDevice, by_device(true)}};
  expect_same_bits(test);
}

TEST(DeviceUpdate, NeedsNoStatesForPlainDescent) {
  Case test;
  test.shapes = mixed_shapes();
  test.rule.kind = RuleKind::kSgd;
  expect_same_bits(test);
}

TEST(DeviceUpdate, SaysThatThereIsNoRoomForStatesThatStream) {
  comm::run_ranks(1, [&](comm::Group& group) {
    Case test;
    test.shapes = mixed_shapes();
    test.num_slots = 0;
    support::expect_names<ConfigError>([&] { const World world(group, test, true); },
                                       "optim.cpu_share");
  });
}

TEST(DeviceUpdate, NeedsNoSlotsForWhatIsFrozen) {
  comm::run_ranks(1, [&](comm::Group& group) {
    Case test;
    test.shapes = {{3000, Tier::kHost, by_device(false), false},
                   {2000, Tier::kDevice, by_device(true)}};
    test.num_slots = 0;
    World world(group, test, true);
    world.param(0).set_trainable(true);
    support::expect_names<ConfigError>([&] { world.optimizer().follow_trainable(0); },
                                       "parameter 'p0' is to be trained");
  });
}

TEST(DeviceUpdate, RefusesASecondBackwardOfGradientsThatHaveLeft) {
  comm::run_ranks(1, [&](comm::Group& group) {
    Case test;
    test.shapes = mixed_shapes();
    test.num_backwards = 2;
    World world(group, test, true);
    support::expect_names<ConfigError>([&] { world.step(1); }, "batch.accumulate");
  });
}

}  // namespace
}  // namespace tessera::optim
