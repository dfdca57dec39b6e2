// The cases of the contract: which bytes arrive.
#include <cstring>
#include <optional>
#include <random>

#include "tests/comm/device_memory.h"
#include "tests/comm/reference.h"
#include "tests/comm/staged_contract.h"

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

constexpr std::size_t kStagedSizes[] = {0, 1, 17, 1023, 20011};

// Shards of this rank and room for what is gathered, on the device.
class DeviceTensors {
 public:
  DeviceTensors(StagedRank& here, const std::vector<reference::Tensor>& tensors, bool in_place)
      : here_(here), tensors_(tensors) {
    const auto rank = static_cast<std::size_t>(here.group.rank());
    const auto num_ranks = static_cast<std::size_t>(here.group.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [numel, dtype] = tensors[i];
      const Bytes shard = reference::array(i, here.group.rank(), 0, numel, dtype);
      Bytes full(shard.size() * num_ranks, std::byte{0xee});
      if (in_place && !shard.empty()) {
        std::memcpy(full.data() + rank * shard.size(), shard.data(), shard.size());
      }
      fulls_.push_back(upload(here.device, full));
      shards_.push_back(in_place ? Memory() : upload(here.device, shard));
      gathers_.push_back(
          {in_place ? fulls_.back().data() + rank * shard.size() : shards_.back().data(),
           fulls_.back().data(), static_cast<std::int64_t>(numel), dtype});
    }
  }

  std::vector<Gather>& gathers() { return gathers_; }
  void expect_gathered(std::size_t i) const {
    EXPECT_TRUE(download(here_.device, fulls_[i]) ==
                reference::arrays(i, here_.group.size(), tensors_[i].numel, tensors_[i].dtype))
        << "tensor " << i;
  }
  void expect_gathered() const {
    for (std::size_t i = 0; i < fulls_.size(); ++i) {
      expect_gathered(i);
    }
  }

 private:
  StagedRank& here_;
  const std::vector<reference::Tensor> tensors_;
  std::vector<Memory> shards_;
  std::vector<Memory> fulls_;
  std::vector<Gather> gathers_;
};

TEST_P(StagedContract, CallsArePassedThroughTheHost) {
  run(2, [](StagedRank& here) { EXPECT_EQ(here.group.call_memory(), CallMemory::kCopied); });
}

TEST_P(StagedContract, GathersBringEveryTensorInOneCallOrOneByOne) {
  for (int num_ranks = 2; num_ranks <= 4; ++num_ranks) {
    run(num_ranks, [](StagedRank& here) {
      for (const bool in_place : {false, true}) {
        DeviceTensors together(here, reference::kMixedTensors, in_place);
        here.group.start_all_gather(together.gathers()).wait();
        together.expect_gathered();
        DeviceTensors apart(here, reference::kMixedTensors, in_place);
        const std::vector<Pending> each = here.group.start_all_gathers(apart.gathers());
        for (std::size_t i = each.size(); i-- > 0;) {
          each[i].wait();
          apart.expect_gathered(i);
        }
      }
    });
  }
}

TEST_P(StagedContract, AGatherToSomeReachesThose) {
  run(3, [](StagedRank& here) {
    for (const std::vector<std::uint8_t>& wants :
         {std::vector<std::uint8_t>{0, 0, 0}, {1, 0, 0}, {0, 1, 1}, {1, 1, 1}}) {
      for (const bool in_place : {false, true}) {
        const bool receives = wants[static_cast<std::size_t>(here.group.rank())] != 0;
        DeviceTensors tensors(here, reference::kMixedTensors, in_place && receives);
        if (!receives) {
          for (Gather& gather : tensors.gathers()) {
            gather.full = nullptr;
          }
        }
        here.group.start_gather_to(tensors.gathers(), wants).wait();
        if (receives) {
          tensors.expect_gathered();
        }
      }
    }
  });
}

TEST_P(StagedContract, ReduceScatterIsTheSumInRankOrderToTheBit) {
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kBFloat16, DType::kBFloat16},
                                            {DType::kFloat64, DType::kFloat64}};
  for (int num_ranks = 2; num_ranks <= 3; ++num_ranks) {
    run(num_ranks, [&](StagedRank& here) {
      const int rank = here.group.rank();
      const auto num = static_cast<std::size_t>(here.group.size());
      const auto expect_sum = [&](std::size_t numel, DType dtype, DType out_dtype) {
        const Memory input =
            upload(here.device, reference::array(numel, rank, 0, numel * num, dtype));
        const Memory output = on_device(here.device, numel * bytes_of(out_dtype));
        here.group
            .start_reduce_scatter(input.data(), output.data(), static_cast<std::int64_t>(numel),
                                  dtype, out_dtype)
            .wait();
        EXPECT_TRUE(download(here.device, output) ==
                    reference::rank_order_sum(numel, here.group.size(),
                                              numel * static_cast<std::size_t>(rank), numel, dtype,
                                              out_dtype))
            << numel;
      };
      for (const std::size_t numel : kStagedSizes) {
        for (const auto& [dtype, out_dtype] : dtypes) {
          expect_sum(numel, dtype, out_dtype);
        }
      }
      if (num == 2) {  // more than one chunk
        expect_sum(1100003, DType::kFloat32, DType::kFloat32);
      }
    });
  }
}

TEST_P(StagedContract, AllReduceGivesEveryRankTheSameBits) {
  for (int num_ranks = 2; num_ranks <= 4; ++num_ranks) {
    run(num_ranks, [](StagedRank& here) {
      for (const std::size_t numel : kStagedSizes) {
        for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kInt64}) {
          const Memory data =
              upload(here.device, reference::array(numel, here.group.rank(), 0, numel, dtype));
          here.group.start_all_reduce(data.data(), static_cast<std::int64_t>(numel), dtype).wait();
          EXPECT_TRUE(download(here.device, data) ==
                      reference::rank_order_sum(numel, here.group.size(), 0, numel, dtype, dtype))
              << numel;
        }
      }
    });
  }
}

TEST_P(StagedContract, BroadcastAndAllToAllBringTheirBytes) {
  for (int num_ranks = 2; num_ranks <= 3; ++num_ranks) {
    run(num_ranks, [](StagedRank& here) {
      const int rank = here.group.rank();
      const auto num = static_cast<std::size_t>(here.group.size());
      for (const std::size_t numel : kStagedSizes) {
        const auto count = static_cast<std::int64_t>(numel);
        for (int root = 0; root < here.group.size(); ++root) {
          const Memory data =
              upload(here.device, reference::array(3, rank, 0, numel, DType::kFloat32));
          here.group.start_broadcast(data.data(), count, DType::kFloat32, root).wait();
          EXPECT_TRUE(download(here.device, data) ==
                      reference::array(3, root, 0, numel, DType::kFloat32))
              << numel << " from " << root;
        }
        const Memory send =
            upload(here.device, reference::array(5, rank, 0, numel * num, DType::kBFloat16));
        const Memory receive = on_device(here.device, send.bytes());
        here.group.start_all_to_all(send.data(), receive.data(), count, DType::kBFloat16).wait();
        Bytes expected;
        for (int from = 0; from < here.group.size(); ++from) {
          const Bytes piece = reference::array(5, from, numel * static_cast<std::size_t>(rank),
                                               numel, DType::kBFloat16);
          expected.insert(expected.end(), piece.begin(), piece.end());
        }
        EXPECT_TRUE(download(here.device, receive) == expected) << numel;
      }
    });
  }
}

TEST_P(StagedContract, MemoryOfTheHostIsTakenToo) {
  run(2, [](StagedRank& here) {
    std::vector<float> data(3000, static_cast<float>(here.group.rank() + 1));
    here.group.start_all_reduce(data.data(), 3000, DType::kFloat32).wait();
    EXPECT_EQ(data.back(), 3.0F);
    const auto half = here.group.split(0, "half");
    half->start_broadcast(data.data(), 3000, DType::kFloat32, 1).wait();
    EXPECT_EQ(half->call_memory(), CallMemory::kCopied);
    half->broadcast_host(data.data(), sizeof(float), 0);
  });
}

// A call whose input is on its way to the device when it is started.
class LateCall {
 public:
  LateCall(StagedRank& here, std::mt19937_64& random) : here_(here), seed_(random()) {
    const auto num = static_cast<std::size_t>(here.group.size());
    const int rank = here.group.rank();
    const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const std::size_t numel = random() % 5 == 0 ? random() % 30000 : random() % 200 + 1;
    const auto count = static_cast<std::int64_t>(numel);
    device::Stream& stream =
        here.device.stream(random() % 2 == 0 ? StreamKind::kRead : StreamKind::kGather);
    CallOptions options;
    options.stream = &stream;
    switch (random() % 3) {
      case 0: {
        give(reference::array(seed_, rank, 0, numel, dtype), stream);
        result_ = on_device(here.device, source_.size() * num);
        expected_ = reference::arrays(seed_, here.group.size(), numel, dtype);
        const Gather gather{given_.data(), result_->data(), count, dtype};
        pending_ = here.group.start_all_gather({&gather, 1}, options);
        break;
      }
      case 1:
        give(reference::array(seed_, rank, 0, numel * num, dtype), stream);
        result_ = on_device(here.device, numel * sizeof(float));
        expected_ = reference::rank_order_sum(seed_, here.group.size(),
                                              numel * static_cast<std::size_t>(rank), numel, dtype,
                                              DType::kFloat32);
        pending_ = here.group.start_reduce_scatter(given_.data(), result_->data(), count, dtype,
                                                   DType::kFloat32, options);
        break;
      default:
        give(reference::array(seed_, rank, 0, numel, dtype), stream);
        expected_ = reference::rank_order_sum(seed_, here.group.size(), 0, numel, dtype, dtype);
        pending_ =
            here.group.start_all_reduce(given_.data(), count, dtype, Reduction::kSum, options);
    }
  }

  void check(const std::string& where) const {
    pending_.wait();
    EXPECT_TRUE(download(here_.device, result_ ? *result_ : given_) == expected_) << where;
  }

 private:
  void give(Bytes bytes, device::Stream& stream) {
    source_ = std::move(bytes);
    given_ = start_upload(here_.device, source_, stream);
  }

  StagedRank& here_;
  const std::uint64_t seed_;
  Bytes source_;
  Memory given_;
  std::optional<Memory> result_;  // none: the call is in place
  Bytes expected_;
  Pending pending_;
};

TEST_P(StagedContract, ManyCallsInFlightBehindMockStreamsEqualTheReference) {
  for (const int num_ranks : {2, 3}) {
    run(num_ranks, [](StagedRank& here) {
      std::mt19937_64 random(static_cast<std::uint64_t>(here.group.size()) * 977);
      std::vector<std::unique_ptr<LateCall>> in_flight;
      for (int i = 0; i < 120; ++i) {
        in_flight.push_back(std::make_unique<LateCall>(here, random));
        if (in_flight.size() >= 6) {
          const std::size_t pick = random() % in_flight.size();
          in_flight[pick]->check("call " + std::to_string(i));
          in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(pick));
        }
      }
      for (const auto& call : in_flight) {
        call->check("at the end");
      }
    });
  }
}

}  // namespace
}  // namespace tessera::comm
