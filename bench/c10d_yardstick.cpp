#include "bench/c10d_yardstick.h"

#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/torch.h>

#include "tessera/comm/c10d_store.h"

namespace tessera::bench {
namespace {

class C10dReduceScatter final : public ReduceScatterYardstick {
 public:
  C10dReduceScatter(std::shared_ptr<comm::Store> store, int rank, int size, const std::string& host)
      : size_(size), store_(std::move(store)) {
    auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host));
    gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("yardstick", comm::c10d_store(*store_)), rank, size,
        options);
  }

  void reduce_scatter(float* input, float* output, std::int64_t shard_numel) override {
    // Views on the caller's memory: the yardstick pays for no copy that c10d does not make itself.
    at::Tensor full = at::from_blob(input, {shard_numel * size_}, at::kFloat);
    at::Tensor shard = at::from_blob(output, {shard_numel}, at::kFloat);
    gloo_->_reduce_scatter_base(shard, full, c10d::ReduceScatterOptions())->wait();
  }

 private:
  const int size_;
  const std::shared_ptr<comm::Store> store_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
};

}  // namespace

std::unique_ptr<ReduceScatterYardstick> make_c10d_reduce_scatter(std::shared_ptr<comm::Store> store,
                                                                 int rank, int size,
                                                                 const std::string& host) {
  return std::make_unique<C10dReduceScatter>(std::move(store), rank, size, host);
}

}  // namespace tessera::bench
