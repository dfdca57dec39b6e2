// Sharded training of a LibTorch model: what is Tessera's in it are the lines with `tessera::` and
// `engine`. Alone it is a world of one; several ranks share the model when a launcher starts them:
//
//   ./train_mlp
//   tessera launch --ranks 2 ./train_mlp
//   torchrun --nproc-per-node 2 --no-python ./train_mlp
#include <iostream>

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/linear.h>

#include "tessera/tessera.h"

namespace {

int train(tessera::RankProcess& process) {
  tessera::Config config;
  config.set("optim.lr", 0.01);
  tessera::Runtime runtime(config);
  process.set_status(runtime.status());  // so that other ranks can name this one's failure
  tessera::Engine engine(runtime);
  auto first = engine.unit("first", std::make_shared<torch::nn::LinearImpl>(8, 64));
  auto second = engine.unit("second", std::make_shared<torch::nn::LinearImpl>(64, 1));

  const at::Tensor x = torch::linspace(-1, 1, 32 * 8).reshape({32, 8});
  const at::Tensor target = x.sin().sum(1, /*keepdim=*/true);
  const auto mine = [&](const at::Tensor& all) {  // this rank's rows
    return all.tensor_split(runtime.num_ranks())[static_cast<std::size_t>(runtime.rank())];
  };
  for (int step = 0; step < 100; ++step) {
    const at::Tensor y = second(torch::gelu(first(mine(x))));
    const at::Tensor loss = (y - mine(target)).pow(2).mean();
    engine.backward(loss, static_cast<double>(y.size(0)));
    const tessera::StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 20 == 19) {
      std::cout << "step " << result.step << " loss " << result.loss << "\n";
    }
  }
  return 0;
}

}  // namespace

int main() {
  tessera::RankProcess process(tessera::process_environment());
  return process.run([&] { return train(process); });
}
