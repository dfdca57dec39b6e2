// The engine on a GPU, one rank: the same numbers as on the CPU, also where branches take turns and
// parameters are looked at, changed and frozen between steps.
#include <gtest/gtest.h>

#include "tessera/device/device_cuda.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/run_options.h"

namespace tessera::testing {
namespace {

std::vector<at::Tensor> train(int cuda_device, Config config = quiet_config(),
                              const Options& options = {}) {
  for (const auto& [name, value] : options) {
    config.apply_flag(name + "=" + value);
  }
  Runtime runtime(config, {cuda_device, 1});
  const at::Device device = cuda_device < 0
                                ? at::Device(at::kCPU)
                                : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_device));
  const auto on_device = [&](const std::shared_ptr<AffineImpl>& module) {
    return moved_to(device, module);
  };
  Engine engine(runtime);
  auto first = engine.unit("first", on_device(affine(5, 7, 1)));
  auto left = engine.unit("left", on_device(affine(7, 7, 2)));
  UnitOptions recomputed;
  recomputed.recompute = true;
  auto right = engine.unit("right", on_device(affine(7, 7, 3)), recomputed);
  auto head = engine.unit("head", on_device(affine(7, 3, 4)));
  auto penalty = engine.function("penalty", {first->weight}, [&](const at::Tensor& y) {
    return y + first->weight.pow(2).sum();
  });
  for (int step = 0; step < 6; ++step) {
    const at::Tensor x = input(4, 5, step).to(device);
    const at::Tensor middle = step % 2 == 0 ? left(first(x).tanh()) : right(first(x).tanh());
    train_step(engine, penalty(head(middle.tanh()).pow(2).mean()) * 0.01, 4);
    if (step == 2) {
      auto scope = engine.gathered({left->weight}, 0);
      const at::NoGradGuard no_grad;
      left->weight.mul_(0.5);
      scope.close();
    }
    if (step == 3) {
      engine.set_trainable(right->bias, false);
    }
  }
  EXPECT_ANY_THROW(std::ignore = left->weight.sum()) << "released";
  std::vector<at::Tensor> values;
  for (int id = 0; id < engine.num_params(); ++id) {
    values.push_back(engine.full_value(id));
  }
  return values;
}

void expect_close(const std::vector<at::Tensor>& cuda, const std::vector<at::Tensor>& cpu) {
  ASSERT_EQ(cpu.size(), cuda.size());
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_TRUE(at::allclose(cuda[i].cpu(), cpu[i], 1e-4, 1e-6)) << "parameter " << i;
  }
}

TEST(EngineOnCuda, TwoBranchesInTurnGiveTheNumbersOfTheCpu) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  expect_close(train(0), train(-1));
}

// In every step one of the branches has no gradient, and stays with its states and its count of
// steps, wherever those live.
TEST(EngineOnCuda, ABranchThatAStepDoesNotUseIsNotUpdatedWhereverItLives) {
  if (device::num_cuda_devices() == 0) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  const DiskDirectory directory;
  const std::vector<Placed> places = {
      {"resident", {}},
      {"host", {{"place.parameters", "host"}, {"place.optimizer", "host"}}},
      {"on the GPU", {{"place.optimizer", "host"}, {"optim.cpu_share", "0"}}},
      {"on the processor", {{"place.optimizer", "host"}, {"optim.cpu_share", "1"}}},
      {"nvme",
       joined({{"place.parameters", "nvme"}, {"place.optimizer", "nvme"}}, nvme_in(directory))}};
  for (const std::string kind : {"adamw", "sgd"}) {
    const Config config = semantics_config(kind, 0.01);
    const std::vector<at::Tensor> cpu = train(-1, config);
    for (const Placed& placed : places) {
      SCOPED_TRACE(kind + ", " + placed.name);
      expect_close(train(0, config, placed.options), cpu);
    }
  }
}

}  // namespace
}  // namespace tessera::testing
