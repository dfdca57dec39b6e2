// The part of the contract that is about memory: which bytes arrive, and how many travel.
#include <cmath>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"
#include "testing/plain_codec.h"
#include "tests/comm/contract.h"
#include "tests/comm/counted_pending.h"
#include "tests/comm/random_call.h"
#include "tests/comm/reference.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

using device::Memory;

// None, one, odd, around the block of the sum, and more than is packed.
constexpr std::size_t kSizes[] = {0, 1, 17, 1023, 2049, 20011};
// More than a socket takes in one write, or a reduce-scatter in one chunk.
constexpr std::size_t kLargeNumel = 1100003;
constexpr int kMaxRanks = support::rounds(5, 3);

// Shards of this rank and room for what is gathered.
class Tensors {
 public:
  Tensors(const ContractRank& here, const std::vector<reference::Tensor>& tensors, bool in_place)
      : here_(here), tensors_(tensors) {
    const auto rank = static_cast<std::size_t>(here.group.rank());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [numel, dtype] = tensors[i];
      const Bytes shard = reference::array(i, here.group.rank(), 0, numel, dtype);
      Bytes full(shard.size() * static_cast<std::size_t>(here.group.size()), std::byte{0xee});
      if (in_place && !shard.empty()) {
        std::memcpy(full.data() + rank * shard.size(), shard.data(), shard.size());
      }
      fulls_.push_back(here.upload(full));
      shards_.push_back(in_place ? Memory() : here.upload(shard));
      gathers_.push_back(
          {in_place ? fulls_.back().data() + rank * shard.size() : shards_.back().data(),
           fulls_.back().data(), static_cast<std::int64_t>(numel), dtype});
    }
  }

  std::vector<Gather>& gathers() { return gathers_; }

  void expect_gathered(std::size_t i) const {
    EXPECT_TRUE(reference::same_bytes(
        here_.download(fulls_[i]),
        reference::arrays(i, here_.group.size(), tensors_[i].numel, tensors_[i].dtype)))
        << "tensor " << i;
  }
  void expect_gathered() const {
    for (std::size_t i = 0; i < fulls_.size(); ++i) {
      expect_gathered(i);
    }
  }

 private:
  const ContractRank& here_;
  const std::vector<reference::Tensor> tensors_;
  std::vector<Memory> shards_;
  std::vector<Memory> fulls_;
  std::vector<Gather> gathers_;
};

TEST_P(MemoryContract, AGatherBringsEveryTensorInOneCallOrOneByOne) {
  std::vector<reference::Tensor> tensors = reference::kMixedTensors;
  for (std::size_t i = 0; i < support::rounds<std::size_t>(30, 6); ++i) {  // small ones
    tensors.push_back({(i * i) % 101, i % 2 == 0 ? DType::kBFloat16 : DType::kInt64});
  }
  run_each(ranks_up_to(kMaxRanks), [&](ContractRank& here) {
    for (const bool in_place : {false, true}) {
      Tensors together(here, tensors, in_place);
      here.group.start_all_gather(together.gathers()).wait();
      together.expect_gathered();
      Tensors apart(here, tensors, in_place);
      const std::vector<Pending> each = here.group.start_all_gathers(apart.gathers());
      ASSERT_EQ(each.size(), tensors.size());
      for (std::size_t i = each.size(); i-- > 0;) {
        each[i].wait();
        apart.expect_gathered(i);
      }
    }
    EXPECT_EQ(here.group.wire_bytes().num_calls, 4U);
    EXPECT_TRUE(here.group.start_all_gathers({}).empty());
    if (here.group.size() == 2) {
      Tensors large(here, {{kLargeNumel, DType::kFloat32}}, false);
      here.group.start_all_gather(large.gathers()).wait();
      large.expect_gathered();
    }
  });
}

// Nobody, each one alone, all but one, all.
std::vector<std::vector<std::uint8_t>> wants_of(int num_ranks) {
  const auto num = static_cast<std::size_t>(num_ranks);
  std::vector<std::vector<std::uint8_t>> all = {std::vector<std::uint8_t>(num, 0),
                                                std::vector<std::uint8_t>(num, 1)};
  for (std::size_t rank = 0; rank < num; ++rank) {
    all.emplace_back(num, 0).at(rank) = 1;
    all.emplace_back(num, 1).at(rank) = 0;
  }
  return all;
}

TEST_P(MemoryContract, AGatherToSomeReachesThoseAndSendsToNobodyElse) {
  const std::vector<reference::Tensor> tensors = {
      {0, DType::kFloat32}, {20011, DType::kFloat32}, {17, DType::kBFloat16}, {33, DType::kInt64}};
  run_each(ranks_up_to(3), [&](ContractRank& here) {
    const bool is_packed =
        here.group.call_memory() != CallMemory::kShared && !here.group.is_stream_ordered();
    const std::uint64_t sent_bytes =
        20011 * 4 + (is_packed ? 48 + 272 : 34 + 264);  // packed in units of 16
    for (const auto& wants : wants_of(here.group.size())) {
      const bool receives = wants[static_cast<std::size_t>(here.group.rank())] != 0;
      std::uint64_t num_receivers = 0;
      for (int rank = 0; rank < here.group.size(); ++rank) {
        num_receivers += rank != here.group.rank() ? wants[static_cast<std::size_t>(rank)] : 0;
      }
      for (const bool in_place : {false, true}) {
        Tensors gathered(here, tensors, in_place && receives);
        if (!receives) {
          for (Gather& gather : gathered.gathers()) {
            gather.full = nullptr;
          }
        }
        const std::uint64_t before = here.group.wire_bytes().payload;
        here.group.start_gather_to(gathered.gathers(), wants).wait();
        EXPECT_EQ(here.group.wire_bytes().payload - before, num_receivers * sent_bytes);
        if (receives) {
          gathered.expect_gathered();
        }
      }
    }
  });
}

TEST_P(MemoryContract, ReduceScatterIsTheSumInRankOrderToTheBit) {
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kBFloat16, DType::kBFloat16},
                                            {DType::kFloat16, DType::kFloat32},
                                            {DType::kFloat64, DType::kFloat64}};
  run_each(ranks_up_to(kMaxRanks), [&](ContractRank& here) {
    const auto rank = static_cast<std::size_t>(here.group.rank());
    const auto num = static_cast<std::size_t>(here.group.size());
    const auto expect_sum = [&](std::size_t numel, DType dtype, DType out_dtype) {
      const Memory input =
          here.upload(reference::array(numel, here.group.rank(), 0, numel * num, dtype));
      const Memory output = here.allocate(numel * bytes_of(out_dtype));
      here.group
          .start_reduce_scatter(input.data(), output.data(), static_cast<std::int64_t>(numel),
                                dtype, out_dtype)
          .wait();
      EXPECT_TRUE(reference::same_bytes(
          here.download(output), reference::rank_order_sum(numel, here.group.size(), numel * rank,
                                                           numel, dtype, out_dtype)))
          << numel << " " << to_string(dtype);
    };
    for (const std::size_t numel : kSizes) {
      for (const auto& [dtype, out_dtype] : dtypes) {
        expect_sum(numel, dtype, out_dtype);
      }
    }
    if (num == 2) {
      expect_sum(kLargeNumel, DType::kFloat32, DType::kFloat32);
    }
  });
}

TEST_P(MemoryContract, AllReduceGivesEveryRankTheSameBits) {
  run_each(ranks_up_to(kMaxRanks), [](ContractRank& here) {
    for (const std::size_t numel : kSizes) {
      for (const DType dtype :
           {DType::kFloat32, DType::kFloat64, DType::kInt64, DType::kBFloat16}) {
        const Memory data =
            here.upload(reference::array(numel, here.group.rank(), 0, numel, dtype));
        here.group.start_all_reduce(data.data(), static_cast<std::int64_t>(numel), dtype).wait();
        EXPECT_TRUE(reference::same_bytes(
            here.download(data),
            reference::rank_order_sum(numel, here.group.size(), 0, numel, dtype, dtype)))
            << numel << " " << to_string(dtype);
      }
    }
  });
}

// Memory of the host is taken also where calls are given that of a device.
TEST_P(MemoryContract, MaxAndMinPickTheExtremesAndKeepNaN) {
  run(3, [](ContractRank& here) {
    const auto rank = static_cast<float>(here.group.rank());
    const std::vector<float> given = {rank, -rank, here.group.rank() == 1 ? NAN : 7.0F};
    CallValues<float> maxima(here, given);
    CallValues<float> minima(here, given);
    here.group.start_all_reduce(maxima.data(), 3, DType::kFloat32, Reduction::kMax).wait();
    here.group.start_all_reduce(minima.data(), 3, DType::kFloat32, Reduction::kMin).wait();
    const std::vector<float>& highest = maxima.read();
    const std::vector<float>& lowest = minima.read();
    EXPECT_EQ(highest[0], 2.0F);
    EXPECT_EQ(highest[1], 0.0F);
    EXPECT_TRUE(std::isnan(highest[2]));
    EXPECT_EQ(lowest[0], 0.0F);
    EXPECT_EQ(lowest[1], -2.0F);
    EXPECT_TRUE(std::isnan(lowest[2]));
    std::int64_t number = here.group.rank() + 7;
    here.group.broadcast_host(&number, sizeof(number), 1);
    EXPECT_EQ(number, 8);
  });
}

TEST_P(MemoryContract, BroadcastCopiesTheRootsBytesAndAllToAllTransposesThePieces) {
  run_each(ranks_up_to(kMaxRanks), [](ContractRank& here) {
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    for (const std::size_t numel : kSizes) {
      const auto count = static_cast<std::int64_t>(numel);
      for (int root = 0; root < here.group.size(); ++root) {
        const Memory data = here.upload(reference::array(3, rank, 0, numel, DType::kFloat32));
        here.group.start_broadcast(data.data(), count, DType::kFloat32, root).wait();
        EXPECT_TRUE(reference::same_bytes(here.download(data),
                                          reference::array(3, root, 0, numel, DType::kFloat32)))
            << numel << " from " << root;
      }
      const Memory send = here.upload(reference::array(5, rank, 0, numel * num, DType::kBFloat16));
      const Memory receive = here.allocate(send.bytes());
      here.group.start_all_to_all(send.data(), receive.data(), count, DType::kBFloat16).wait();
      Bytes expected;
      for (int from = 0; from < here.group.size(); ++from) {
        const Bytes piece = reference::array(5, from, numel * static_cast<std::size_t>(rank), numel,
                                             DType::kBFloat16);
        expected.insert(expected.end(), piece.begin(), piece.end());
      }
      EXPECT_TRUE(reference::same_bytes(here.download(receive), expected)) << numel;
    }
  });
}

// The input of every call is late, and its stream may be, too: no start_*() waits for it on the
// thread that calls, and what is done afterwards is done in order.
TEST_P(MemoryContract, StartingACallNeverWaitsForItsInput) {
  run(2, [](ContractRank& here) {
    const PlainCodec codec(&here.device);
    expect_no_wait_in_starts(here, GetParam().needs_gpu ? nullptr : &codec);
  });
}

TEST_P(MemoryContract, ManyRandomCallsInFlightEqualTheReference) {
  run_each({least_ranks(), 3, 5},
           [](ContractRank& here) { run_random_calls(here, support::rounds(300, 60), 8); });
}

TEST_P(MemoryContract, WireBytesAreTheClosedForm) {
  run_each(ranks_up_to(kMaxRanks), [](ContractRank& here) {
    Group& group = here.group;
    const auto peers = static_cast<std::uint64_t>(group.size() - 1);
    const auto num = static_cast<std::size_t>(group.size());
    constexpr std::size_t kNumel = 20011;  // larger than what is packed
    CallValues<float> shard(here, std::vector<float>(kNumel, 1.0F));
    CallValues<float> full(here, std::vector<float>(kNumel * num, 1.0F));
    CallValues<float> other(here, std::vector<float>(kNumel * num));
    auto sent = [&, before = std::uint64_t{0}]() mutable {
      const std::uint64_t now = group.wire_bytes().payload;
      return now - std::exchange(before, now);
    };
    const Gather gather{shard.data(), full.data(), kNumel, DType::kFloat32};
    group.start_all_gather({&gather, 1}).wait();
    EXPECT_EQ(sent(), peers * kNumel * 4);
    group.start_reduce_scatter(full.data(), shard.data(), kNumel, DType::kFloat32, DType::kFloat32)
        .wait();
    EXPECT_EQ(sent(), peers * kNumel * 4);
    group.start_all_to_all(full.data(), other.data(), kNumel, DType::kFloat32).wait();
    EXPECT_EQ(sent(), peers * kNumel * 4);
    group.start_all_reduce(full.data(), kNumel, DType::kFloat32).wait();
    EXPECT_EQ(sent(), peers * 2 * ((kNumel + num - 1) / num) * 4);
    group.start_barrier().wait();
    EXPECT_EQ(sent(), 0U);
    group.start_broadcast(full.data(), kNumel, DType::kFloat32, group.size() - 1).wait();
    EXPECT_EQ(group.wire_bytes().num_calls, 6U);
    CallValues<std::int64_t> total(here, {static_cast<std::int64_t>(sent())});
    group.start_all_reduce(total.data(), 1, DType::kInt64).wait();
    EXPECT_EQ(static_cast<std::uint64_t>(total.read().front()), peers * kNumel * 4);
  });
}

}  // namespace

void expect_no_wait_in_starts(const ContractRank& here, const Codec* codec) {
  constexpr std::int64_t kNumel = 2049;
  const int size = here.group.size();
  const auto num = static_cast<std::size_t>(size);
  for (const bool has_stream : {false, true}) {
    const Bytes bytes = reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32);
    const auto input = std::make_shared<CountedPending>();
    std::vector<Memory> memory;
    const auto room = [&](std::size_t times) {
      Bytes all;
      for (std::size_t i = 0; i < times; ++i) {
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      return memory.emplace_back(here.upload(all)).data();
    };
    const Gather gather{room(1), room(num), kNumel, DType::kFloat32};
    const std::vector<std::uint8_t> wants(num, 1);
    void* const sent = room(num);
    void* const received = room(num);
    void* const sum = room(1);
    CallOptions options;
    options.stream = has_stream ? &here.device.stream(device::StreamKind::kGather) : nullptr;
    options.ready = Pending(input);
    std::vector<Pending> calls = here.group.start_all_gathers({&gather, 1}, options);
    calls.push_back(here.group.start_all_gather({&gather, 1}, options));
    calls.push_back(here.group.start_gather_to({&gather, 1}, wants, options));
    calls.push_back(here.group.start_reduce_scatter(sent, sum, kNumel, DType::kFloat32,
                                                    DType::kFloat32, options));
    calls.push_back(here.group.start_all_to_all(sent, received, kNumel, DType::kFloat32, options));
    calls.push_back(
        here.group.start_broadcast(received, kNumel, DType::kFloat32, size - 1, options));
    calls.push_back(
        here.group.start_all_reduce(received, kNumel, DType::kFloat32, Reduction::kSum, options));
    if (codec != nullptr) {
      const Gather wires{room(1), room(num), kNumel, DType::kFloat32, "", codec};
      calls.push_back(here.group.start_all_gather({&wires, 1}, options));
      CallOptions encoded = options;
      encoded.codec = codec;
      calls.push_back(here.group.start_reduce_scatter(sent, sum, kNumel, DType::kFloat32,
                                                      DType::kFloat32, encoded));
    }
    calls.push_back(here.group.start_gather_host(bytes, options).done);
    calls.push_back(here.group.start_barrier(options));
    EXPECT_EQ(input->num_waits(), 0);
    EXPECT_FALSE(calls.front().done());
    input->succeed();
    for (const Pending& call : calls) {
      call.wait();
    }
    EXPECT_TRUE(reference::same_bytes(here.download(memory[1]),
                                      reference::arrays(1, size, kNumel, DType::kFloat32)));
  }
}

}  // namespace tessera::comm
