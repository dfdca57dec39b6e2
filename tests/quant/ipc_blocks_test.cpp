// Calls of GPU ranks that read each other's memory (ipc), with blocks of integers in place of
// elements: encoded and decoded on the streams that wait for the other ranks, to the bits that the
// codec of the host gives. Ranks are forks, so this program itself must not use a GPU, nor any
// other test in it.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/quant/block_codec.h"
#include "tests/comm/contract.h"
#include "tests/comm/ipc_network.h"
#include "tests/comm/reference.h"

namespace tessera::quant {
namespace {

using comm::Bytes;
using comm::ContractRank;
using device::Memory;
using device::Pending;
using device::StreamKind;

class IpcBlocks : public comm::Contract {};

// Of random times, as a busy machine holds ranks up.
comm::ContractWorld late(const std::string& name, Role role) {
  return comm::ipc_world(name, role,
                         [](int rank, comm::RoundPhase) { comm::delay_at_random(rank, 300); });
}
INSTANTIATE_TEST_SUITE_P(CudaIpc, IpcBlocks,
                         ::testing::Values(comm::ipc_world("InPlace", Role::kGradient),
                                           late("InPlaceAndLate", Role::kGradient),
                                           comm::ipc_world("Chunked", Role::kOther),
                                           late("ChunkedAndLate", Role::kOther)),
                         comm::world_name);

// int8 as in gathers, int4 as in reductions, and blocks that the GPU's kernels do not cut evenly.
constexpr BlockFormat kFormats[] = {{8, 128}, {4, 128}, {8, 96}};

// On the host, where the contract of tests/quant compares it with the reference.
Bytes encoded(const BlockFormat& format, const Bytes& values, DType dtype) {
  const auto numel = static_cast<std::int64_t>(values.size() / bytes_of(dtype));
  Bytes wire(wire_bytes(format, numel));
  make_cpu_block_codec(format)->encode(values.data(), dtype, numel, wire.data(), nullptr).wait();
  return wire;
}
Bytes decoded(const BlockFormat& format, const Bytes& wire, std::size_t numel, DType dtype) {
  Bytes values(numel * bytes_of(dtype));
  make_cpu_block_codec(format)
      ->decode(wire.data(), static_cast<std::int64_t>(numel), values.data(), dtype, nullptr)
      .wait();
  return values;
}

// Values of a rank, of which one is a NaN: a block of it must arrive as one.
Bytes values_of(std::uint64_t seed, int rank, std::size_t begin, std::size_t numel, DType dtype) {
  Bytes values = comm::reference::array(seed, rank, begin, numel, dtype);
  if (dtype == DType::kFloat32 && rank == 1 && numel > 1000) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(values.data() + sizeof(nan) * (numel / 2), &nan, sizeof(nan));
  }
  return values;
}

struct CodedTensor {
  std::size_t numel;
  DType dtype;
  std::size_t num_wires;
};
constexpr CodedTensor kTensors[] = {{0, DType::kFloat32, 1},     {1, DType::kBFloat16, 1},
                                    {17, DType::kFloat32, 3},    {1049, DType::kFloat16, 2},
                                    {53003, DType::kFloat32, 1}, {27008, DType::kBFloat16, 2}};

// The wires of a rank, one behind the other, and what they decode to.
Bytes wires_of(const BlockFormat& format, std::size_t seed, int rank) {
  const auto [numel, dtype, num_wires] = kTensors[seed];
  Bytes all;
  for (std::size_t wire = 0; wire < num_wires; ++wire) {
    const Bytes one = encoded(format, values_of(seed, rank, wire * numel, numel, dtype), dtype);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}
Bytes decoded_wires(const BlockFormat& format, std::size_t seed, int num_ranks) {
  const auto [numel, dtype, num_wires] = kTensors[seed];
  Bytes all;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Bytes wires = wires_of(format, seed, rank);
    const std::size_t bytes = wires.size() / num_wires;
    for (std::size_t wire = 0; wire < num_wires; ++wire) {
      const auto begin = wires.begin() + static_cast<std::ptrdiff_t>(wire * bytes);
      const Bytes one(begin, begin + static_cast<std::ptrdiff_t>(bytes));
      const Bytes values = decoded(format, one, numel, dtype);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

// Of all kTensors. A rank keeps those that arrive behind its first, in turn in memory of the device
// and of the host.
class Wires {
 public:
  enum class Keeps : std::uint8_t { kSome, kNone };
  Wires(const ContractRank& here, const BlockFormat& format, const comm::Codec& codec,
        Keeps keeps = Keeps::kSome)
      : here_(here), format_(format), keeps_(keeps) {
    for (std::size_t i = 0; i < std::size(kTensors); ++i) {
      const auto [numel, dtype, num_wires] = kTensors[i];
      const auto num_pieces = static_cast<std::size_t>(here.group.size()) * num_wires;
      shards_.push_back(here.upload(wires_of(format, i, here.group.rank())));
      fulls_.push_back(here.upload(Bytes(num_pieces * numel * bytes_of(dtype), std::byte{0xee})));
      gathers_.push_back({shards_.back().data(), fulls_.back().data(),
                          static_cast<std::int64_t>(numel), dtype, "", &codec,
                          static_cast<int>(num_wires)});
      Bytes arriving;
      for (int rank = 0; rank < here.group.size(); ++rank) {
        const Bytes theirs = wires_of(format, i, rank);
        arriving.insert(arriving.end(), theirs.begin(), theirs.end());
      }
      const std::size_t wire_bytes = arriving.size() / num_pieces;
      const auto begin = static_cast<std::ptrdiff_t>(wire_bytes);
      arriving.erase(arriving.begin(), arriving.begin() + begin);
      expected_kept_.push_back(std::move(arriving));
      kept_.push_back(here.device.allocate(i % 2 == 0 ? Tier::kDevice : Tier::kPinned,
                                           expected_kept_.back().size(), Role::kOther));
      if (numel > 0 && keeps == Keeps::kSome) {
        gathers_.back().kept = {kept_.back().data(), 1, static_cast<int>(num_pieces) - 1};
      }
      bytes_ += shards_.back().bytes();
    }
  }

  std::vector<comm::Gather>& gathers() { return gathers_; }
  std::uint64_t bytes() const { return bytes_; }
  void expect_decoded() const {
    for (std::size_t i = 0; i < fulls_.size(); ++i) {
      EXPECT_TRUE(here_.download(fulls_[i]) == decoded_wires(format_, i, here_.group.size()))
          << to_string(format_) << ", tensor " << i;
      EXPECT_TRUE(keeps_ == Keeps::kNone || here_.download(kept_[i]) == expected_kept_[i])
          << to_string(format_) << ", what is kept of tensor " << i;
    }
  }

 private:
  const ContractRank& here_;
  const BlockFormat format_;
  const Keeps keeps_;
  std::vector<Memory> shards_;
  std::vector<Memory> fulls_;
  std::vector<Memory> kept_;
  std::vector<Bytes> expected_kept_;
  std::vector<comm::Gather> gathers_;
  std::uint64_t bytes_ = 0;
};

TEST_P(IpcBlocks, AreGatheredAndDecodedToTheHostsBits) {
  run_each({2, 3}, [](ContractRank& here) {
    for (const BlockFormat& format : kFormats) {
      const auto codec = make_cuda_block_codec(format, here.device);
      const auto peers = static_cast<std::uint64_t>(here.group.size() - 1);
      Wires together(here, format, *codec);
      comm::CallOptions options;
      options.stream = &here.device.stream(StreamKind::kGather);
      const std::uint64_t before = here.group.wire_bytes().payload;
      here.group.start_all_gather(together.gathers(), options).wait();
      EXPECT_EQ(here.group.wire_bytes().payload - before, peers * together.bytes());
      together.expect_decoded();
      Wires apart(here, format, *codec);
      Pending::all(here.group.start_all_gathers(apart.gathers())).wait();
      apart.expect_decoded();
    }
  });
}

TEST_P(IpcBlocks, ThatOnlySomeWantAreDecodedThere) {
  run(3, [](ContractRank& here) {
    const auto codec = make_cuda_block_codec(kFormats[0], here.device);
    const auto rank = static_cast<std::size_t>(here.group.rank());
    for (const std::array<std::uint8_t, 3>& wants :
         {std::array<std::uint8_t, 3>{0, 1, 0}, {1, 0, 1}, {0, 0, 0}}) {
      Wires wires(here, kFormats[0], *codec, Wires::Keeps::kNone);
      if (wants.at(rank) == 0) {
        for (comm::Gather& gather : wires.gathers()) {
          gather.full = nullptr;
        }
      }
      here.group.start_gather_to(wires.gathers(), wants).wait();
      if (wants.at(rank) != 0) {
        wires.expect_decoded();
      }
    }
  });
}

// Across hosts, then inside, as gathers in two phases are: the second call brings the wires of the
// first.
TEST_P(IpcBlocks, ThatWereGatheredAreGatheredAgainBeforeTheyAreDecoded) {
  run(4, [](ContractRank& here) {
    constexpr std::size_t kNumel = 20011;
    const auto across = here.group.split(here.group.rank() % 2, "across");
    const auto inside = here.group.split(here.group.rank() / 2, "inside");
    for (const BlockFormat& format : kFormats) {
      const auto codec = make_cuda_block_codec(format, here.device);
      const std::size_t bytes = wire_bytes(format, kNumel);
      const auto wire_of = [&](int rank) {
        return encoded(format, values_of(3, rank, 0, kNumel, DType::kFloat32), DType::kFloat32);
      };
      const Memory own = here.upload(wire_of(here.group.rank()));
      const Memory wires = here.allocate(2 * bytes);
      const Memory full = here.allocate(4 * kNumel * sizeof(float));
      comm::CallOptions options;
      options.stream = &here.device.stream(StreamKind::kGather);
      const comm::Gather first{own.data(), wires.data(), static_cast<std::int64_t>(bytes),
                               DType::kUInt8};
      options.ready = across->start_all_gather({&first, 1}, options);
      const comm::Gather second{wires.data(), full.data(), kNumel, DType::kFloat32,
                                "",           codec.get(), 2};
      inside->start_all_gather({&second, 1}, options).wait();
      Bytes expected;
      for (const int rank : {0, 2, 1, 3}) {
        const Bytes piece = decoded(format, wire_of(rank), kNumel, DType::kFloat32);
        expected.insert(expected.end(), piece.begin(), piece.end());
      }
      EXPECT_TRUE(here.download(full) == expected) << to_string(format);
    }
  });
}

// The sum of what the ranks' pieces decode to, each encoded by itself.
Bytes reduced(const BlockFormat& format, std::uint64_t seed, int num_ranks, std::size_t begin,
              std::size_t numel, DType dtype, DType out_dtype) {
  const std::size_t stride = wire_bytes(format, static_cast<std::int64_t>(numel));
  Bytes wires;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Bytes all = values_of(seed, rank, 0, numel * static_cast<std::size_t>(num_ranks), dtype);
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(begin * bytes_of(dtype));
    const Bytes piece(from, from + static_cast<std::ptrdiff_t>(numel * bytes_of(dtype)));
    const Bytes one = encoded(format, piece, dtype);
    wires.insert(wires.end(), one.begin(), one.end());
  }
  Bytes sum(numel * bytes_of(out_dtype));
  if (numel > 0) {
    make_cpu_block_codec(format)
        ->decode_sum(wires.data(), stride, num_ranks, static_cast<std::int64_t>(numel), sum.data(),
                     out_dtype, nullptr)
        .wait();
  }
  return sum;
}

TEST_P(IpcBlocks, AreReducedToTheHostsSumsInRankOrder) {
  const std::pair<DType, DType> dtypes[] = {{DType::kFloat32, DType::kFloat32},
                                            {DType::kBFloat16, DType::kFloat32},
                                            {DType::kBFloat16, DType::kBFloat16},
                                            {DType::kFloat16, DType::kFloat32}};
  run_each({2, 3, 4}, [&](ContractRank& here) {
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    for (const BlockFormat& format : kFormats) {
      const auto codec = make_cuda_block_codec(format, here.device);
      comm::CallOptions options;
      options.codec = codec.get();
      for (const std::size_t numel : {0U, 1U, 17U, 2048U, 20011U}) {
        for (const auto& [dtype, out_dtype] : dtypes) {
          const Memory input = here.upload(values_of(numel, rank, 0, numel * num, dtype));
          const Memory output = here.allocate(numel * bytes_of(out_dtype));
          const std::uint64_t before = here.group.wire_bytes().payload;
          here.group
              .start_reduce_scatter(input.data(), output.data(), static_cast<std::int64_t>(numel),
                                    dtype, out_dtype, options)
              .wait();
          EXPECT_EQ(here.group.wire_bytes().payload - before,
                    (num - 1) * wire_bytes(format, static_cast<std::int64_t>(numel)));
          EXPECT_TRUE(here.download(output) == reduced(format, numel, here.group.size(),
                                                       numel * static_cast<std::size_t>(rank),
                                                       numel, dtype, out_dtype))
              << to_string(format) << ", " << numel << " " << to_string(dtype);
        }
      }
    }
  });
}

// Taking memory of a GPU and freeing it waits for all its streams.
TEST_P(IpcBlocks, OfACallAreStagedInWhatTheCallBeforeHasLeft) {
  run(2, [](ContractRank& here) {
    constexpr std::int64_t kNumel = 20011;
    constexpr std::size_t kBytes = kNumel * sizeof(float);
    const auto codec = make_cuda_block_codec(kFormats[1], here.device);
    const Memory input = here.allocate(2 * kBytes);
    const Memory output = here.allocate(kBytes);
    comm::CallOptions options;
    options.codec = codec.get();
    const auto call = [&] {
      here.group
          .start_reduce_scatter(input.data(), output.data(), kNumel, DType::kFloat32,
                                DType::kFloat32, options)
          .wait();
    };
    const auto held = [&] { return here.ledger.current_bytes(Tier::kDevice, Role::kStaging); };
    const std::size_t before = held();
    call();
    const std::size_t taken = comm::encoded_reduce_scatter_staging_bytes(
        wire_bytes(kFormats[1], kNumel), here.group.size());
    EXPECT_EQ(held(), before + taken);
    here.ledger.reset_peaks();
    call();
    EXPECT_EQ(held(), before + taken);
    EXPECT_EQ(here.ledger.peak_bytes(Tier::kDevice, Role::kStaging), before + taken);
  });
}

// As a step has them: encoded, gathered, reduced and measured on streams that nobody waits for in
// between, call behind call.
TEST_P(IpcBlocks, FollowOneAnotherOnStreamsWithoutAWait) {
  run_each({2, 3}, [](ContractRank& here) {
    constexpr std::size_t kNumel = 9000;
    constexpr auto kCount = static_cast<std::int64_t>(kNumel);
    constexpr int kCalls = 8;
    const BlockFormat format{4, 128};
    const auto codec = make_cuda_block_codec(format, here.device);
    const auto num = static_cast<std::size_t>(here.group.size());
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    std::vector<Memory> kept;
    const auto keep = [&](Memory memory) {
      kept.push_back(std::move(memory));
      return kept.back().data();
    };
    std::vector<std::size_t> at;  // of each call's memory: full, sum, error
    std::vector<Pending> pending;
    for (int call = 0; call < kCalls; ++call) {
      const auto seed = static_cast<std::uint64_t>(call);
      const auto* const values =
          keep(here.upload(values_of(seed, here.group.rank(), 0, kNumel, DType::kFloat32)));
      const auto* const gradients =
          keep(here.upload(values_of(seed, here.group.rank(), 0, kNumel * num, DType::kBFloat16)));
      auto* const wire = keep(here.allocate(wire_bytes(format, kCount)));
      at.push_back(kept.size());
      auto* const full = keep(here.allocate(kNumel * num * sizeof(float)));
      auto* const sum = keep(here.allocate(kNumel * sizeof(float)));
      auto* const error = keep(here.allocate(2 * sizeof(double)));
      comm::CallOptions options;
      options.stream = &stream;
      options.ready = codec->encode(values, DType::kFloat32, kCount, wire, &stream);
      const comm::Gather gather{wire, full, kCount, DType::kFloat32, "", codec.get()};
      pending.push_back(here.group.start_all_gather({&gather, 1}, options));
      options.ready = {};
      options.codec = codec.get();
      pending.push_back(here.group.start_reduce_scatter(gradients, sum, kCount, DType::kBFloat16,
                                                        DType::kFloat32, options));
      pending.push_back(codec->measure(values, DType::kFloat32, kCount, wire,
                                       reinterpret_cast<double*>(error), false, &stream));
    }
    Pending::all(pending).wait();
    for (int call = 0; call < kCalls; ++call) {
      const auto seed = static_cast<std::uint64_t>(call);
      const std::size_t first = at[static_cast<std::size_t>(call)];
      Bytes full;
      for (int rank = 0; rank < here.group.size(); ++rank) {
        const Bytes wire =
            encoded(format, values_of(seed, rank, 0, kNumel, DType::kFloat32), DType::kFloat32);
        const Bytes piece = decoded(format, wire, kNumel, DType::kFloat32);
        full.insert(full.end(), piece.begin(), piece.end());
      }
      EXPECT_TRUE(here.download(kept[first]) == full) << "call " << call;
      EXPECT_TRUE(here.download(kept[first + 1]) ==
                  reduced(format, seed, here.group.size(),
                          kNumel * static_cast<std::size_t>(here.group.rank()), kNumel,
                          DType::kBFloat16, DType::kFloat32))
          << "call " << call;
      const Bytes own = values_of(seed, here.group.rank(), 0, kNumel, DType::kFloat32);
      double expected[2] = {};
      make_cpu_block_codec(format)
          ->measure(own.data(), DType::kFloat32, kCount,
                    encoded(format, own, DType::kFloat32).data(), expected, false, nullptr)
          .wait();
      double found[2] = {};
      std::memcpy(found, here.download(kept[first + 2]).data(), sizeof(found));
      EXPECT_TRUE(found[1] == expected[1] || std::isnan(expected[1])) << "call " << call;
      EXPECT_TRUE(found[0] == expected[0] || (std::isnan(expected[0]) && std::isnan(found[0])))
          << "call " << call << ": " << found[0] << " " << expected[0];
    }
  });
}

}  // namespace
}  // namespace tessera::quant
