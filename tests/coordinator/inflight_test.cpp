#include "tessera/coordinator/inflight.h"

#include <memory>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tests/support/no_tensor.h"

namespace tessera::coordinator {
namespace {

using support::NoTensor;

class Inflight : public testing::Test {
 protected:
  Inflight() {
    shard::ParamSpec spec;
    spec.name = "h.0.weight";
    spec.numel = 8;
    params_.add(spec, std::make_unique<NoTensor>());
  }
  std::unique_ptr<device::Device> device_ = device::make_cpu_device({});
  shard::ParamTable params_{0, 2, *device_};
  std::byte full_[64] = {};
};

void expect_state_error(const std::function<void()>& move) {
  try {
    move();
    FAIL() << "expected StateError";
  } catch (const StateError& error) {
    EXPECT_EQ(error.parameter(), "h.0.weight");
    EXPECT_NE(std::string(error.what()).find("'h.0.weight'"), std::string::npos) << error.what();
  }
}

TEST_F(Inflight, HasAnEntryExactlyWhileAGatherIsOnItsWay) {
  InflightRegistry registry(1);
  shard::Param& param = params_[0];
  expect_state_error([&] { registry.add(param, {}); });  // not gathering
  expect_state_error([&] { registry.take(param); });
  expect_state_error([&] { std::ignore = registry[param]; });
  param.start_gather(full_);
  registry.add(param, {device::Pending(), {3, Phase::kBackward, Reason::kPrefetch}});
  EXPECT_TRUE(registry.contains(param));
  expect_state_error([&] { registry.add(param, {}); });  // twice
  EXPECT_EQ(registry.num_params(), 1U);
  EXPECT_EQ(registry.take(param).cause.unit, 3);
  EXPECT_EQ(registry.num_params(), 0U);
  expect_state_error([&] { registry.take(param); });
  param.finish_gather();
  expect_state_error([&] { registry.add(param, {}); });
}

TEST_F(Inflight, CountsCallsUntilAllOfTheirPartsAreDone) {
  InflightRegistry registry(1);
  const auto first = std::make_shared<device::Completion>();
  const auto second = std::make_shared<device::Completion>();
  registry.add_call({device::Pending(first), device::Pending(second)});
  registry.add_call({device::Pending()});
  EXPECT_EQ(registry.num_calls(), 1U);
  first->succeed();
  EXPECT_EQ(registry.num_calls(), 1U);
  registry.wait_for_calls_below(2);  // does not block
  second->fail(std::make_exception_ptr(IoError("lost")));
  registry.wait_for_calls_below(1);  // whoever waits for the parameter is told, not we
  EXPECT_EQ(registry.num_calls(), 0U);
}

}  // namespace
}  // namespace tessera::coordinator
