// NCCL in a world of one: device memory, stream order, tags, the same arithmetic as everywhere. The
// contracts have several ranks, and need as many GPUs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <tuple>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/comm/nccl_backend.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tessera/device/handed_over.h"
#include "testing/plain_codec.h"
#include "tests/comm/contract.h"
#include "tests/comm/reference.h"

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

constexpr std::chrono::seconds kNcclTimeout{60};

GlooOptions side() {
  GlooOptions options;
  options.timeout = kNcclTimeout;
  options.bind_host = "127.0.0.1";
  return options;
}

// Ranks as threads, each with a GPU and a connection of its own.
class NcclNetwork final : public Network {
 public:
  explicit NcclNetwork(int num_ranks) : num_ranks_(num_ranks) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    return make_nccl_backend(connect(), rank, num_ranks_, rank, "world", side());
  }
  std::shared_ptr<StatusStore> make_status() override {
    return std::make_shared<StatusStore>(connect(), num_ranks_);
  }

 private:
  std::unique_ptr<Store> connect() {
    return connect_store("127.0.0.1", server_->port(), kNcclTimeout);
  }

  const int num_ranks_;
  const std::shared_ptr<Store> server_ = serve_store("127.0.0.1", 0, kNcclTimeout);
};

ContractWorld gpus(const std::string& name, int num) {
  return {.name = name,
          .make_network = [](int ranks) { return std::make_unique<NcclNetwork>(ranks); },
          .make_device =
              [](int rank, Ledger& ledger) {
                device::CudaDeviceOptions options;
                options.index = rank;
                options.ledger = &ledger;
                return device::make_cuda_device(options);
              },
          .needs_gpu = true,
          .num_gpus = num};
}

INSTANTIATE_TEST_SUITE_P(NcclOnCuda, StreamContract, ::testing::Values(gpus("TwoGpus", 2)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(NcclOnCuda, StreamLimitContract, ::testing::Values(gpus("TwoGpus", 2)),
                         world_name);
// As many as the largest worlds of these contracts have ranks.
INSTANTIATE_TEST_SUITE_P(NcclOnCuda, MemoryContract, ::testing::Values(gpus("SixGpus", 6)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(NcclOnCuda, GroupContract, ::testing::Values(gpus("SixGpus", 6)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(NcclOnCuda, LimitContract, ::testing::Values(gpus("ThreeGpus", 3)),
                         world_name);

class NcclOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!nccl_built()) {
      GTEST_SKIP() << "NCCL is " << nccl_description();
    }
    if (device::num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
    store_ = serve_store("127.0.0.1", 0, kNcclTimeout);
    device::CudaDeviceOptions device_options;
    device_options.ledger = &ledger_;
    device_ = device::make_cuda_device(device_options);
    GroupOptions options;
    options.device = device_.get();
    group_ = std::make_unique<Group>(make_nccl_backend(store_, 0, 1, 0, "world", side()), "world",
                                     std::vector<int>{0}, options);
    call_.stream = &device_->stream(StreamKind::kGather);
  }

  Memory on_device(std::size_t bytes) {
    return device_->allocate(Tier::kDevice, bytes, Role::kOther);
  }
  Memory upload(const std::vector<std::byte>& bytes) {
    Memory memory = on_device(bytes.size());
    device_->start_copy(memory.data(), bytes.data(), bytes.size(), *call_.stream).wait();
    return memory;
  }
  std::vector<std::byte> download(const Memory& memory) {
    std::vector<std::byte> bytes(memory.bytes());
    device_->start_copy(bytes.data(), memory.data(), bytes.size(), *call_.stream).wait();
    return bytes;
  }

  Ledger ledger_;
  std::shared_ptr<Store> store_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<Group> group_;
  CallOptions call_;
};

constexpr std::size_t kNcclNumel = 100003;

// First in this file, because c10d warns only once of a process group that was dropped.
TEST_F(NcclOnCuda, AGroupThatEndsFinishesItsCallsAndSaysNothing) {
  const auto bytes = reference::array(5, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory shard = upload(bytes);
  const Memory full = on_device(bytes.size());
  const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(kNcclNumel),
                      DType::kFloat32};
  ::testing::internal::CaptureStderr();
  const Pending call = group_->start_all_gather({&gather, 1}, call_);
  group_.reset();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  call.wait();
  EXPECT_TRUE(download(full) == bytes);
}

TEST_F(NcclOnCuda, GathersManyTensorsInOneCall) {
  std::vector<std::vector<std::byte>> sources;
  std::vector<Memory> shards;
  std::vector<Memory> fulls;
  std::vector<Gather> gathers;
  for (std::size_t i = 0; i < 10; ++i) {
    sources.push_back(reference::array(i, 0, 0, 1 + i * 1009, DType::kBFloat16));
    shards.push_back(upload(sources.back()));
    fulls.push_back(on_device(sources.back().size()));
    gathers.push_back({shards[i].data(), fulls[i].data(), static_cast<std::int64_t>(1 + i * 1009),
                       DType::kBFloat16});
  }
  group_->start_all_gather(gathers, call_).wait();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    EXPECT_TRUE(download(fulls[i]) == sources[i]) << i;
  }
}

TEST_F(NcclOnCuda, GathersToThoseThatWantIt) {
  const auto bytes = reference::array(6, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory shard = upload(bytes);
  const Memory full = upload(std::vector<std::byte>(bytes.size()));
  const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(kNcclNumel),
                      DType::kFloat32};
  const std::uint8_t nobody = 0;
  group_->start_gather_to({&gather, 1}, {&nobody, 1}, call_).wait();
  EXPECT_TRUE(download(full) == std::vector<std::byte>(bytes.size()));
  const std::uint8_t me = 1;
  group_->start_gather_to({&gather, 1}, {&me, 1}, call_).wait();
  EXPECT_TRUE(download(full) == bytes);
  // In place nothing is left to send.
  const Gather in_place{full.data(), full.data(), static_cast<std::int64_t>(kNcclNumel),
                        DType::kFloat32};
  group_->start_gather_to({&in_place, 1}, {&me, 1}, call_).wait();
  EXPECT_TRUE(download(full) == bytes);
}

TEST_F(NcclOnCuda, ReducesInRankOrderOnTheDevice) {
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kFloat16, DType::kFloat16},
                                            {DType::kFloat64, DType::kFloat64}};
  for (const auto& [dtype, out_dtype] : dtypes) {
    const Memory input = upload(reference::array(3, 0, 0, kNcclNumel, dtype));
    const Memory output = on_device(kNcclNumel * bytes_of(out_dtype));
    group_->start_reduce_scatter(input.data(), output.data(), kNcclNumel, dtype, out_dtype, call_)
        .wait();
    EXPECT_TRUE(download(output) ==
                reference::rank_order_sum(3, 1, 0, kNcclNumel, dtype, out_dtype));
  }
}

// The arithmetic of several ranks without the ranks: their parts lie side by side.
TEST_F(NcclOnCuda, TheDeviceAddsTheSameBitsAsTheHost) {
  const auto backend = make_nccl_backend(store_, 0, 1, 0, "sums", side());
  for (const int num_parts : {1, 2, 3, 5}) {
    for (const auto& [dtype, out_dtype] : {std::pair{DType::kFloat32, DType::kFloat32},
                                           {DType::kBFloat16, DType::kFloat32},
                                           {DType::kBFloat16, DType::kBFloat16},
                                           {DType::kFloat16, DType::kFloat32},
                                           {DType::kInt64, DType::kInt64}}) {
      const Memory input = upload(reference::arrays(7, num_parts, kNcclNumel, dtype));
      const Memory output = on_device(kNcclNumel * bytes_of(out_dtype));
      backend
          ->start_reduce({input.data(), dtype, num_parts, kNcclNumel}, output.data(), out_dtype,
                         Reduction::kSum, call_.stream)
          .wait();
      EXPECT_TRUE(download(output) ==
                  reference::rank_order_sum(7, num_parts, 0, kNcclNumel, dtype, out_dtype))
          << num_parts << " " << to_string(dtype);
    }
  }
}

TEST_F(NcclOnCuda, BroadcastBarrierAndAllToAllComplete) {
  const auto bytes = reference::array(4, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory data = upload(bytes);
  const Memory other = on_device(bytes.size());
  group_->start_broadcast(data.data(), kNcclNumel, DType::kFloat32, 0, call_).wait();
  group_->start_all_to_all(data.data(), other.data(), kNcclNumel, DType::kFloat32, call_).wait();
  group_->start_all_reduce(other.data(), kNcclNumel, DType::kFloat32, Reduction::kSum, call_)
      .wait();
  group_->start_barrier(call_).wait();
  EXPECT_TRUE(download(other) == bytes);
  EXPECT_EQ(group_->wire_bytes().payload, 0U);
}

// There is nobody to differ from, but the tags travel, and the Pending waits for them.
TEST_F(NcclOnCuda, CallsAreMetAndWhatTheyKeepIsFreedWithTheirEnd) {
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = kept;
  call_.met = std::make_shared<std::atomic<bool>>(false);
  call_.keep_alive = std::move(kept);
  const Pending call = group_->start_barrier(call_);
  call_.keep_alive.reset();
  call.wait();
  EXPECT_TRUE(*call_.met);
  EXPECT_TRUE(watched.expired());
}

TEST_F(NcclOnCuda, StartingACallNeverWaitsForItsInput) {
  const ContractRank here{*group_, *device_, ledger_};
  const PlainCodec codec(device_.get());
  expect_no_wait_in_starts(here, &codec);
}

// An input that is not on the device yet holds up neither the caller nor the order of calls.
TEST_F(NcclOnCuda, ACallWaitsForAHostThreadWithoutItsCaller) {
  const auto bytes = reference::array(10, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory shard = on_device(bytes.size());
  const Memory full = on_device(bytes.size());
  const Memory pinned = device_->allocate(Tier::kPinned, bytes.size(), Role::kOther);
  std::copy(bytes.begin(), bytes.end(), pinned.data());
  const auto read = std::make_shared<device::Completion>();
  const auto handed_over = std::make_shared<device::HandedOver>();
  const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(kNcclNumel),
                      DType::kFloat32};
  // NCCL may allocate at its first call, which must not wait for a stream that stands still.
  group_->start_all_gather({&gather, 1}, call_).wait();
  CallOptions behind_read = call_;
  behind_read.ready = Pending(read);
  CallOptions behind_copy = call_;
  behind_copy.ready = Pending(handed_over);
  const Pending first = group_->start_all_gather({&gather, 1}, behind_read);
  const Pending second = group_->start_all_gather({&gather, 1}, behind_copy);
  const Pending third = group_->start_barrier(call_);
  EXPECT_TRUE(first.state()->awaits_hand_over());
  EXPECT_TRUE(third.state()->awaits_hand_over());
  read->succeed();
  first.wait();
  handed_over->hand_over(device_->start_copy(shard.data(), pinned.data(), bytes.size(),
                                             device_->stream(StreamKind::kRead)));
  third.wait();
  EXPECT_TRUE(second.done());
  EXPECT_TRUE(download(full) == bytes);
}

// Groups are split by numbers of the host, which NCCL does not reach.
TEST_F(NcclOnCuda, BytesOfTheHostTravelThroughTheDevice) {
  std::int64_t number = 7;
  group_->broadcast_host(&number, sizeof(number), 0);
  EXPECT_EQ(number, 7);
  const auto part = group_->split(0, "part");
  const auto bytes = reference::array(8, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory data = upload(bytes);
  part->start_broadcast(data.data(), kNcclNumel, DType::kFloat32, 0, call_).wait();
  EXPECT_TRUE(download(data) == bytes);
}

TEST_F(NcclOnCuda, CallsFollowTheirStreamWithoutBlockingTheHost) {
  device::Stream& gather = *call_.stream;
  device::Stream& compute = device_->stream(StreamKind::kCompute);
  const auto bytes = reference::array(9, 0, 0, kNcclNumel, DType::kFloat32);
  const Memory pinned = device_->allocate(Tier::kPinned, bytes.size(), Role::kOther);
  std::copy(bytes.begin(), bytes.end(), pinned.data());
  const Memory shard = on_device(bytes.size());
  const Memory full = on_device(bytes.size());
  const Memory result = on_device(bytes.size());
  for (int round = 0; round < 50; ++round) {
    std::ignore = device_->start_fill(shard.data(), 0, bytes.size(), gather);
    std::ignore = device_->start_copy(shard.data(), pinned.data(), bytes.size(), gather);
    const Gather item{shard.data(), full.data(), static_cast<std::int64_t>(kNcclNumel),
                      DType::kFloat32};
    compute.wait(group_->start_all_gather({&item, 1}, call_));
    std::ignore = device_->start_copy(result.data(), full.data(), bytes.size(), compute);
    gather.wait(compute.record());
  }
  compute.synchronize();
  EXPECT_TRUE(download(result) == bytes);
}

}  // namespace
}  // namespace tessera::comm
