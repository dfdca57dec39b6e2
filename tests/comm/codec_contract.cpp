// The part of the contract that is about calls with a codec: what is decoded, how many bytes travel
// for it, and what the ranks must agree on.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "tessera/core/error.h"
#include "tests/comm/coded_reference.h"
#include "tests/comm/contract.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

using device::Memory;

// Blocks on GPUs that ranks share: tests/quant/ipc_blocks_test.cpp.
constexpr char kNoGpuCodec[] = "the plain codec's copies are work of its own device's streams";

constexpr int kMostCodedRanks = support::rounds(4, 3);

struct CodedTensor {
  std::size_t numel;
  DType dtype;
  std::size_t num_wires;  // 0: it travels as it is
};
// Empty, small ones that travel together, and larger than what is packed.
const std::vector<CodedTensor> kCodedTensors = {
    {0, DType::kFloat32, 1},  {1, DType::kBFloat16, 1},    {17, DType::kFloat32, 3},
    {33, DType::kFloat32, 0}, {1049, DType::kFloat16, 2},  {53003, DType::kFloat32, 1},
    {9001, DType::kInt64, 0}, {27003, DType::kBFloat16, 2}};

// The wires of this rank and room for what they decode to.
class Wires {
 public:
  Wires(const ContractRank& here, const Codec& codec,
        const std::vector<CodedTensor>& tensors = kCodedTensors)
      : here_(here) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto [numel, dtype, num_wires] = tensors[i];
      const bool is_coded = num_wires > 0;
      const int rank = here.group.rank();
      shards_.push_back(here.upload(is_coded ? reference::wires(i, rank, numel, num_wires, dtype)
                                             : reference::array(i, rank, 0, numel, dtype)));
      expected_.push_back(
          is_coded ? reference::decoded_wires(i, here.group.size(), numel, num_wires, dtype)
                   : reference::arrays(i, here.group.size(), numel, dtype));
      fulls_.push_back(here.upload(Bytes(expected_.back().size(), std::byte{0xee})));
      gathers_.push_back({shards_.back().data(), fulls_.back().data(),
                          static_cast<std::int64_t>(numel), dtype, "", is_coded ? &codec : nullptr,
                          static_cast<int>(is_coded ? num_wires : 1)});
      const bool is_small = shards_.back().bytes() < GroupOptions().pack_below_bytes;
      wire_bytes_ += is_small ? (shards_.back().bytes() + 15) / 16 * 16 : shards_.back().bytes();
      unpacked_bytes_ += shards_.back().bytes();
    }
  }

  std::vector<Gather>& gathers() { return gathers_; }
  // What one rank sends another.
  std::uint64_t sent_bytes() const {
    const bool is_packed =
        here_.group.call_memory() != CallMemory::kShared && !here_.group.is_stream_ordered();
    return is_packed ? wire_bytes_ : unpacked_bytes_;
  }
  void expect_decoded(std::size_t i) const {
    EXPECT_TRUE(reference::same_bytes(here_.download(fulls_[i]), expected_[i])) << "tensor " << i;
  }
  void expect_decoded() const {
    for (std::size_t i = 0; i < fulls_.size(); ++i) {
      expect_decoded(i);
    }
  }

 private:
  const ContractRank& here_;
  std::vector<Bytes> expected_;
  std::vector<Memory> shards_;
  std::vector<Memory> fulls_;
  std::vector<Gather> gathers_;
  std::uint64_t wire_bytes_ = 0;
  std::uint64_t unpacked_bytes_ = 0;
};

TEST_P(MemoryContract, AGatherOfWiresBringsWhatTheyDecodeToAndSendsNoMore) {
  if (GetParam().needs_gpu) {
    GTEST_SKIP() << kNoGpuCodec;
  }
  run_each({least_ranks(), 3}, [&](ContractRank& here) {
    const PlainCodec codec(&here.device);
    const auto peers = static_cast<std::uint64_t>(here.group.size() - 1);
    CallOptions options;
    options.stream = &here.device.stream(device::StreamKind::kGather);
    Wires together(here, codec);
    std::uint64_t before = here.group.wire_bytes().payload;
    here.group.start_all_gather(together.gathers(), options).wait();
    EXPECT_EQ(here.group.wire_bytes().payload - before, peers * together.sent_bytes());
    together.expect_decoded();
    Wires apart(here, codec);
    before = here.group.wire_bytes().payload;
    const std::vector<Pending> each = here.group.start_all_gathers(apart.gathers());
    EXPECT_EQ(here.group.wire_bytes().payload - before, peers * apart.sent_bytes());
    for (std::size_t i = each.size(); i-- > 0;) {
      each[i].wait();
      apart.expect_decoded(i);
    }
  });
}

// Another range on each rank, in memory of the device and of the host.
TEST_P(MemoryContract, AGatherOfWiresLeavesThoseThatARankKeeps) {
  if (GetParam().needs_gpu) {
    GTEST_SKIP() << kNoGpuCodec;
  }
  run_each({least_ranks(), 3}, [&](ContractRank& here) {
    const PlainCodec codec(&here.device);
    CallOptions options;
    options.stream = &here.device.stream(device::StreamKind::kGather);
    for (const Tier tier : {Tier::kDevice, Tier::kPinned}) {
      Wires gathered(here, codec);
      std::vector<Memory> kept;
      std::vector<Bytes> expected;
      for (std::size_t i = 0; i < kCodedTensors.size(); ++i) {
        const auto [numel, dtype, num_wires] = kCodedTensors[i];
        const std::size_t wire_bytes =
            num_wires > 0 ? codec.wire_bytes(static_cast<std::int64_t>(numel)) : 0;
        const int num = wire_bytes > 0 ? here.group.size() * static_cast<int>(num_wires) : 0;
        const int first = std::min(here.group.rank(), num);
        Bytes all;
        for (int rank = 0; rank < (num > 0 ? here.group.size() : 0); ++rank) {
          const Bytes wires = reference::wires(i, rank, numel, num_wires, dtype);
          all.insert(all.end(), wires.begin(), wires.end());
        }
        const auto begin =
            static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first) * wire_bytes);
        expected.emplace_back(all.begin() + begin, all.end());
        kept.push_back(here.device.allocate(tier, expected.back().size(), Role::kOther));
        gathered.gathers()[i].kept = {kept.back().data(), first, num - first};
      }
      here.group.start_all_gather(gathered.gathers(), options).wait();
      gathered.expect_decoded();
      for (std::size_t i = 0; i < kept.size(); ++i) {
        EXPECT_TRUE(reference::same_bytes(here.download(kept[i]), expected[i])) << "tensor " << i;
      }
      Wires apart(here, codec);
      for (std::size_t i = 0; i < kept.size(); ++i) {
        apart.gathers()[i].kept = gathered.gathers()[i].kept;
        std::fill_n(kept[i].data(), tier == Tier::kPinned ? kept[i].bytes() : 0, std::byte{0xee});
      }
      const std::vector<Pending> each = here.group.start_all_gathers(apart.gathers());
      for (std::size_t i = each.size(); i-- > 0;) {
        each[i].wait();
        apart.expect_decoded(i);
        EXPECT_TRUE(reference::same_bytes(here.download(kept[i]), expected[i])) << "tensor " << i;
      }
    }
  });
}

TEST_P(MemoryContract, AGatherOfWiresToSomeIsDecodedThere) {
  if (GetParam().needs_gpu) {
    GTEST_SKIP() << kNoGpuCodec;
  }
  run(3, [&](ContractRank& here) {
    const PlainCodec codec(&here.device);
    for (const std::array<std::uint8_t, 3>& wants :
         {std::array<std::uint8_t, 3>{0, 1, 0}, {1, 0, 1}, {0, 0, 0}}) {
      Wires gathered(here, codec);
      const auto rank = static_cast<std::size_t>(here.group.rank());
      std::uint64_t num_receivers = 0;
      for (std::size_t r = 0; r < wants.size(); ++r) {
        num_receivers += r != rank ? wants.at(r) : 0;
      }
      if (wants.at(rank) == 0) {
        for (Gather& gather : gathered.gathers()) {
          gather.full = nullptr;
        }
      }
      const std::uint64_t before = here.group.wire_bytes().payload;
      here.group.start_gather_to(gathered.gathers(), wants).wait();
      EXPECT_EQ(here.group.wire_bytes().payload - before, num_receivers * gathered.sent_bytes());
      if (wants.at(rank) != 0) {
        gathered.expect_decoded();
      }
    }
  });
}

// Ranks of hosts, then the ranks of a host: what the second call brings are the wires of the first.
TEST_P(MemoryContract, WiresThatWereGatheredAreGatheredAgainBeforeTheyAreDecoded) {
  if (GetParam().needs_gpu) {
    GTEST_SKIP() << kNoGpuCodec;
  }
  run(4, [&](ContractRank& here) {
    constexpr std::size_t kNumel = 1003;
    const PlainCodec codec(&here.device);
    const std::size_t wire_bytes = codec.wire_bytes(kNumel);
    const auto across = here.group.split(here.group.rank() % 2, "across");
    const auto inside = here.group.split(here.group.rank() / 2, "inside");
    const Memory own =
        here.upload(reference::wires(3, here.group.rank(), kNumel, 1, DType::kFloat32));
    const Memory wires = here.allocate(2 * wire_bytes);
    const Memory full = here.allocate(4 * kNumel * sizeof(float));
    CallOptions options;
    options.stream = &here.device.stream(device::StreamKind::kGather);
    const Gather first{own.data(), wires.data(), static_cast<std::int64_t>(wire_bytes),
                       DType::kUInt8};
    options.ready = across->start_all_gather({&first, 1}, options);
    const Gather second{wires.data(), full.data(), kNumel, DType::kFloat32, "", &codec, 2};
    inside->start_all_gather({&second, 1}, options).wait();
    Bytes expected;
    for (const int rank : {0, 2, 1, 3}) {
      const Bytes piece = reference::stored(reference::decoded(3, rank, 0, kNumel, DType::kFloat32),
                                            DType::kFloat32);
      expected.insert(expected.end(), piece.begin(), piece.end());
    }
    EXPECT_TRUE(reference::same_bytes(here.download(full), expected));
  });
}

TEST_P(MemoryContract, AnEncodedReduceScatterIsTheSumOfWhatIsDecodedInRankOrder) {
  if (GetParam().needs_gpu) {
    GTEST_SKIP() << kNoGpuCodec;
  }
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kBFloat16, DType::kBFloat16},
                                            {DType::kFloat16, DType::kFloat32}};
  run_each({least_ranks(), kMostCodedRanks}, [&](ContractRank& here) {
    const PlainCodec codec(&here.device);
    const auto rank = static_cast<std::size_t>(here.group.rank());
    const auto num = static_cast<std::size_t>(here.group.size());
    CallOptions options;
    options.codec = &codec;
    for (const std::size_t numel : {0U, 1U, 17U, 2049U, 20011U}) {
      for (const auto& [dtype, out_dtype] : dtypes) {
        const Memory input =
            here.upload(reference::array(numel, here.group.rank(), 0, numel * num, dtype));
        const Memory output = here.allocate(numel * bytes_of(out_dtype));
        const std::uint64_t before = here.group.wire_bytes().payload;
        here.group
            .start_reduce_scatter(input.data(), output.data(), static_cast<std::int64_t>(numel),
                                  dtype, out_dtype, options)
            .wait();
        EXPECT_EQ(here.group.wire_bytes().payload - before,
                  (num - 1) * codec.wire_bytes(static_cast<std::int64_t>(numel)));
        EXPECT_TRUE(reference::same_bytes(
            here.download(output), reference::decoded_sum(numel, here.group.size(), numel * rank,
                                                          numel, dtype, out_dtype)))
            << numel << " " << to_string(dtype);
      }
    }
  });
}

TEST_P(GroupContract, ARankThatQuantisesAndOneThatDoesNotGetTheUsualSentence) {
  expect_failures(3,
                  {"rank 1 called all_gather #1", "where ranks 0, 2 called all_gather #1",
                   "'w as plain blocks of 16' on rank 1", "'w' on rank 0"},
                  [](ContractRank& here) {
                    const PlainCodec codec(&here.device);
                    const Memory shard = here.allocate(4000);
                    const Memory full = here.allocate(12000);
                    const Gather gather{shard.data(), full.data(),
                                        1000,         DType::kFloat32,
                                        "w",          here.group.rank() == 1 ? &codec : nullptr};
                    here.group.start_all_gather({&gather, 1}).wait();
                  });
  expect_failures(3, {"rank 2 called reduce_scatter #1"}, [](ContractRank& here) {
    const PlainCodec codec(&here.device);
    const PlainCodec other(&here.device, "other blocks of 16");
    const Memory input = here.allocate(12000);
    const Memory output = here.allocate(4000);
    CallOptions options;
    options.codec = here.group.rank() == 2 ? &other : &codec;
    here.group
        .start_reduce_scatter(input.data(), output.data(), 1000, DType::kFloat32, DType::kFloat32,
                              options)
        .wait();
  });
}

TEST_P(GroupContract, WhatCannotBeEncodedIsRefused) {
  run(2, [](ContractRank& here) {
    const PlainCodec codec(&here.device);
    const Memory memory = here.allocate(12000);
    const Gather of_integers{memory.data(), memory.data() + 6000, 10, DType::kInt64, "w", &codec};
    EXPECT_THROW(std::ignore = here.group.start_all_gather({&of_integers, 1}), ConfigError);
    const Gather of_none{memory.data(), memory.data() + 6000, 10, DType::kFloat32, "w", &codec, 0};
    EXPECT_THROW(std::ignore = here.group.start_all_gather({&of_none, 1}), ConfigError);
    for (const KeptWires& kept :
         {KeptWires{nullptr, 0, 1}, {memory.data(), 1, 2}, {memory.data(), -1, 1}}) {
      const Gather keeps{memory.data(), memory.data() + 6000, 10, DType::kFloat32, "w", &codec, 1,
                         kept};
      EXPECT_THROW(std::ignore = here.group.start_all_gather({&keeps, 1}), ConfigError);
    }
    CallOptions options;
    options.codec = &codec;
    EXPECT_THROW(
        std::ignore = here.group.start_reduce_scatter(memory.data(), memory.data() + 6000, 10,
                                                      DType::kFloat64, DType::kFloat64, options),
        ConfigError);
    here.group.start_barrier().wait();
  });
}

}  // namespace
}  // namespace tessera::comm
