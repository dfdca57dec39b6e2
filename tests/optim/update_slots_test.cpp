// Slots for updates: in which order they are given out, and which lent ones come back.
#include "tessera/optim/update_slots.h"

#include <array>
#include <memory>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"

namespace tessera::optim {
namespace {

class Slots : public ::testing::Test {
 protected:
  Slots() : device_(device::make_cpu_device()) { slots_.take_own(*device_, 2, 64); }
  // Expired as soon as it has come back.
  std::weak_ptr<int> lend(int number) {
    const auto owner = std::make_shared<int>(number);
    slots_.lend(memory_[static_cast<std::size_t>(number)].data(), {}, owner);
    return owner;
  }
  bool is_lent(const UpdateSlot* slot, int number) const {
    return slot->data == memory_[static_cast<std::size_t>(number)].data();
  }

  std::unique_ptr<device::Device> device_;
  UpdateSlots slots_;
  std::array<std::array<std::byte, 64>, 4> memory_{};
};

TEST_F(Slots, AreGivenOutInTheOrderInWhichTheyWereLeft) {
  UpdateSlot* const first = slots_.take();
  UpdateSlot* const second = slots_.take();
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(slots_.take(), nullptr);
  slots_.leave(*second, {});
  slots_.leave(*first, {});
  EXPECT_EQ(slots_.take(), second);
  slots_.put_back(*second);  // nothing was done in it
  EXPECT_EQ(slots_.take(), second);
  EXPECT_EQ(slots_.take(), first);
}

TEST_F(Slots, ThatAreLentAreUsedAgain) {
  lend(0);
  slots_.take();
  slots_.take();
  UpdateSlot* const lent = slots_.take();
  ASSERT_TRUE(is_lent(lent, 0));
  slots_.leave(*lent, {});
  EXPECT_EQ(slots_.take(), lent);
}

TEST_F(Slots, ThatAreFreeComeBackFirst) {
  const std::weak_ptr<int> taken = lend(0);
  const std::weak_ptr<int> free = lend(1);
  slots_.take();
  slots_.take();
  UpdateSlot* const lent = slots_.take();
  ASSERT_TRUE(is_lent(lent, 0));
  slots_.limit_lent(1);
  EXPECT_EQ(slots_.take(), nullptr) << "one that goes back is given out";
  UpdateSlot* const draining = slots_.first_draining();
  ASSERT_NE(draining, nullptr);
  EXPECT_TRUE(is_lent(draining, 1));
  slots_.drop(*draining);
  EXPECT_TRUE(free.expired());
  EXPECT_FALSE(taken.expired());
  EXPECT_EQ(slots_.num_lent(), 1U);
  slots_.leave(*lent, {});
  EXPECT_EQ(slots_.take(), lent) << "one may be kept";
}

TEST_F(Slots, BeyondTheLimitAreNotUsedAgain) {
  lend(0);
  lend(1);
  lend(2);
  slots_.take();
  slots_.take();
  std::array<UpdateSlot*, 3> lent{};
  for (UpdateSlot*& slot : lent) {
    slot = slots_.take();
  }
  slots_.limit_lent(1);
  EXPECT_EQ(slots_.first_draining(), nullptr) << "all are taken";
  EXPECT_THROW(slots_.drop(*lent[0]), InternalError);
  for (UpdateSlot* const slot : lent) {
    slots_.leave(*slot, {});
  }
  // Those that were left first drain.
  EXPECT_EQ(slots_.take(), lent[2]);
  EXPECT_EQ(slots_.take(), nullptr);
  for (std::size_t i = 0; i < 2; ++i) {
    UpdateSlot* const slot = slots_.first_draining();
    ASSERT_EQ(slot, lent[i]);
    slots_.drop(*slot);
  }
  EXPECT_EQ(slots_.num_lent(), 1U);
  EXPECT_EQ(slots_.first_draining(), nullptr) << "the last one is taken";
  // What was sent ahead in vain drains, too.
  slots_.limit_lent(0);
  slots_.put_back(*lent[2]);
  EXPECT_EQ(slots_.first_draining(), lent[2]);
  EXPECT_EQ(slots_.take(), nullptr);
}

TEST_F(Slots, ThatAreLentAgainHaveNoLimit) {
  slots_.limit_lent(0);
  lend(2);
  slots_.take();
  slots_.take();
  UpdateSlot* const first = slots_.take();
  ASSERT_TRUE(is_lent(first, 2));
  lend(3);
  slots_.leave(*first, {});
  EXPECT_TRUE(is_lent(slots_.take(), 3));
  EXPECT_EQ(slots_.take(), first);
}

}  // namespace
}  // namespace tessera::optim
