// The contracts over backend ipc, GPU ranks that read each other's memory, and what it must show by
// itself. A handle of GPU memory cannot be opened in the process that made it, so ranks are
// processes; they are forks, so this program itself must not use a GPU, nor any other test in it.
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/comm/contract.h"
#include "tests/comm/forked_ranks.h"
#include "tests/comm/ipc_network.h"
#include "tests/comm/reference.h"
#include "tests/support/contains.h"

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

ContractWorld in_place() { return ipc_world("InPlace", Role::kGradient); }
ContractWorld chunked() { return ipc_world("Chunked", Role::kOther); }

// Holds a rank up for random times, as a busy machine does.
ContractWorld late(const std::string& name, Role role) {
  return ipc_world(name, role, [](int rank, RoundPhase) { delay_at_random(rank, 300); });
}

const auto kWorlds = ::testing::Values(in_place(), late("InPlaceAndLate", Role::kGradient),
                                       chunked(), late("ChunkedAndLate", Role::kOther));

INSTANTIATE_TEST_SUITE_P(CudaIpc, MemoryContract, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, GroupContract,
                         ::testing::Values(in_place(), late("InPlaceAndLate", Role::kGradient)),
                         world_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, StreamContract, ::testing::Values(in_place(), chunked()),
                         world_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, LimitContract, ::testing::Values(in_place()), world_name);
INSTANTIATE_TEST_SUITE_P(CudaIpc, StreamLimitContract, ::testing::Values(in_place()), world_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StagedContract);  // nothing is staged

// Before anything is shared: the ranks need no store, and no GPU is used.
TEST(CudaIpcSize, MoreRanksThanASumHasAreTheReasonForAnotherBackend) {
  if (!ipc_built()) {
    GTEST_SKIP() << "this build has no CUDA";
  }
  std::string why_not;
  EXPECT_EQ(make_ipc_backend(nullptr, 0, 129, 0, "world", {}, why_not), nullptr);
  EXPECT_EQ(why_not, "backend ipc has at most 128 ranks, not 129");
}

// What the contracts do not have.
class IpcContract : public Contract {};
INSTANTIATE_TEST_SUITE_P(CudaIpc, IpcContract, ::testing::Values(in_place(), chunked()),
                         world_name);

std::string error_of(const Pending& pending) {
  try {
    pending.wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// None, one, odd, and more than an all-reduce takes at once.
constexpr std::size_t kSizes[] = {0, 1, 17, 1023, 20011};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64,
                             DType::kInt64,   DType::kInt32,    DType::kUInt8};

// All reductions, element by element on the host, in rank order.
Bytes reduced(const ContractRank& here, std::uint64_t seed, std::size_t begin, std::size_t numel,
              DType dtype, DType out_dtype, Reduction reduction) {
  Bytes parts;
  for (int rank = 0; rank < here.group.size(); ++rank) {
    const Bytes part = reference::array(seed, rank, begin, numel, dtype);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  Bytes out(numel * bytes_of(out_dtype));
  reduce_in_rank_order({parts.data(), dtype, here.group.size(), numel}, out.data(), out_dtype,
                       reduction);
  return out;
}

TEST_P(IpcContract, SumsMaximaAndMinimaHaveTheHostsBitsForAllTypesAndSizes) {
  run_each({2, 3, 4}, [](ContractRank& here) {
    const auto num = static_cast<std::size_t>(here.group.size());
    const auto rank = static_cast<std::size_t>(here.group.rank());
    for (const std::size_t numel : kSizes) {
      const auto count = static_cast<std::int64_t>(numel);
      for (const DType dtype : kDTypes) {
        const bool is_half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
        for (const DType out_dtype : {dtype, is_half ? DType::kFloat32 : dtype}) {
          const Memory input =
              here.upload(reference::array(numel, here.group.rank(), 0, numel * num, dtype));
          const Memory output = here.allocate(numel * bytes_of(out_dtype));
          here.group.start_reduce_scatter(input.data(), output.data(), count, dtype, out_dtype)
              .wait();
          EXPECT_TRUE(reference::same_bytes(
              here.download(output),
              reduced(here, numel, numel * rank, numel, dtype, out_dtype, Reduction::kSum)))
              << numel << " " << to_string(dtype) << " into " << to_string(out_dtype);
        }
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
          const Memory data =
              here.upload(reference::array(numel, here.group.rank(), 0, numel, dtype));
          here.group.start_all_reduce(data.data(), count, dtype, reduction).wait();
          EXPECT_TRUE(reference::same_bytes(
              here.download(data), reduced(here, numel, 0, numel, dtype, dtype, reduction)))
              << numel << " " << to_string(dtype) << " " << static_cast<int>(reduction);
        }
      }
    }
  });
}

// More than two chunks hold, with a rest.
TEST_P(IpcContract, LargeCallsBringTheReferencesBytes) {
  constexpr std::size_t kNumel = 3'300'007;
  constexpr auto kCount = static_cast<std::int64_t>(kNumel);
  run_each({2, 3}, [](ContractRank& here) {
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    const Bytes own = reference::array(1, rank, 0, kNumel, DType::kFloat32);
    const Memory shard = here.upload(own);
    const Memory full = here.allocate(own.size() * num);
    const Gather gather{shard.data(), full.data(), kCount, DType::kFloat32};
    here.group.start_all_gather({&gather, 1}).wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(full), reference::arrays(1, here.group.size(), kNumel, DType::kFloat32)));
    const Memory input = here.upload(reference::array(2, rank, 0, kNumel * num, DType::kBFloat16));
    const Memory output = here.allocate(kNumel * sizeof(float));
    here.group
        .start_reduce_scatter(input.data(), output.data(), kCount, DType::kBFloat16,
                              DType::kFloat32)
        .wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(output), reduced(here, 2, kNumel * static_cast<std::size_t>(rank), kNumel,
                                       DType::kBFloat16, DType::kFloat32, Reduction::kSum)));
    here.group.start_all_reduce(shard.data(), kCount, DType::kFloat32).wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(shard),
        reduced(here, 1, 0, kNumel, DType::kFloat32, DType::kFloat32, Reduction::kSum)));
  });
}

TEST_P(IpcContract, MemoryNeedNotBeAlignedToMoreThanItsElements) {
  run_each({2, 3}, [](ContractRank& here) {
    constexpr std::size_t kNumel = 1001;
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    for (const auto& [dtype, skipped] : {std::pair{DType::kUInt8, std::size_t{1}},
                                         {DType::kUInt8, 3},
                                         {DType::kBFloat16, 2},
                                         {DType::kFloat32, 4},
                                         {DType::kFloat32, 12}}) {
      const Bytes source = reference::array(4, rank, 0, kNumel * num, dtype);
      Bytes moved(skipped);
      moved.insert(moved.end(), source.begin(), source.end());
      const Memory input = here.upload(moved);
      const Memory output = here.upload(Bytes(kNumel * num * bytes_of(dtype) + skipped));
      const auto result = [&](std::size_t bytes) {
        Bytes all = here.download(output);
        return Bytes(all.begin() + static_cast<std::ptrdiff_t>(skipped),
                     all.begin() + static_cast<std::ptrdiff_t>(skipped + bytes));
      };
      const Gather gather{input.data() + skipped, output.data() + skipped, kNumel, dtype};
      here.group.start_all_gather({&gather, 1}).wait();
      EXPECT_TRUE(result(kNumel * num * bytes_of(dtype)) ==
                  reference::arrays(4, here.group.size(), kNumel, dtype))
          << to_string(dtype) << " at " << skipped;
      here.group
          .start_reduce_scatter(input.data() + skipped, output.data() + skipped, kNumel, dtype,
                                dtype)
          .wait();
      EXPECT_TRUE(result(kNumel * bytes_of(dtype)) ==
                  reduced(here, 4, kNumel * static_cast<std::size_t>(rank), kNumel, dtype, dtype,
                          Reduction::kSum))
          << to_string(dtype) << " at " << skipped;
    }
  });
}

// Keeps a stream from going on.
class Gate {
 public:
  explicit Gate(device::Stream& stream) {
    std::ignore = stream.enqueue([opened = opened_.get_future().share()] { opened.wait(); });
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

// The input is made behind a gate that opens only after the call has been started.
TEST_P(IpcContract, StartingACallBlocksNobodyAndStreamsAreOrderedBehindIt) {
  constexpr std::size_t kNumel = 20011;
  run_each({2, 3}, [](ContractRank& here) {
    const Bytes bytes = reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32);
    const Memory source = here.device.allocate(Tier::kPinned, bytes.size(), Role::kOther);
    std::copy(bytes.begin(), bytes.end(), source.data());
    const Memory data = here.allocate(bytes.size());
    const Memory copied = here.allocate(bytes.size());
    here.group.start_barrier().wait();
    device::Stream& gather = here.device.stream(StreamKind::kGather);
    Gate gate(gather);
    std::ignore = here.device.start_copy(data.data(), source.data(), bytes.size(), gather);
    CallOptions options;
    options.stream = &gather;
    const Pending call = here.group.start_all_reduce(data.data(), static_cast<std::int64_t>(kNumel),
                                                     DType::kFloat32, Reduction::kSum, options);
    device::Stream& write = here.device.stream(StreamKind::kWrite);
    write.wait(call);  // until all have started it, not until it is done
    const Pending last = here.device.start_copy(copied.data(), data.data(), bytes.size(), write);
    EXPECT_FALSE(call.done());
    EXPECT_FALSE(last.done());
    gate.open();
    last.wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(copied),
        reduced(here, 1, 0, kNumel, DType::kFloat32, DType::kFloat32, Reduction::kSum)));
  });
}

// Addresses are used again, and what peers have mapped must not be what was there before.
TEST_P(IpcContract, MemoryMayBeFreedAndTakenAgainBetweenCalls) {
  run(3, [](ContractRank& here) {
    const auto other = here.group.split(0, "other");
    for (std::size_t i = 0; i < 24; ++i) {
      const std::size_t numel = i % 3 == 0 ? 1000 + i : 700'000 + 150'000 * (i % 5);
      const Memory shard =
          here.upload(reference::array(i, here.group.rank(), 0, numel, DType::kFloat32));
      const Memory full =
          here.allocate(shard.bytes() * static_cast<std::size_t>(here.group.size()));
      const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(numel),
                          DType::kFloat32};
      (i % 2 == 0 ? here.group : *other).start_all_gather({&gather, 1}).wait();
      EXPECT_TRUE(reference::same_bytes(
          here.download(full), reference::arrays(i, here.group.size(), numel, DType::kFloat32)))
          << i;
    }
  });
}

// Regions of the emulated GPU that this process has mapped, its own and its peers'. Those of a GPU
// cannot be seen: none.
int num_mapped_regions() {
  std::ifstream maps("/proc/self/maps");
  int num = 0;
  for (std::string line; std::getline(maps, line);) {
    num += line.find("/memfd:emulated gpu") != std::string::npos ? 1 : 0;
  }
  return num;
}

// All groups of a process share the mappings of a peer. The list of the second group is full before
// it comes to a region that the first one has listed, and uses.
TEST(CudaIpcRegions, ThatOnlyAnotherGroupHasListedStayMapped) {
  if (!is_true_in_a_fork([] { return device::num_cuda_devices() > 0; })) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  constexpr std::size_t kListed = 3;  // chunks, and two shards
  const auto body = [](ContractRank& here) {
    constexpr std::size_t kNumel = 700'000;  // a region of its own
    const auto gather = [&here](Group& group, const Memory& shard, std::uint64_t seed) {
      const Memory full = here.device.allocate(Tier::kDevice, 2 * shard.bytes(), Role::kOther);
      const Gather both{shard.data(), full.data(), kNumel, DType::kFloat32};
      group.start_all_gather({&both, 1}).wait();
      EXPECT_TRUE(reference::same_bytes(here.download(full),
                                        reference::arrays(seed, 2, kNumel, DType::kFloat32)));
    };
    const auto shard = [&here](std::uint64_t seed) {
      return here.upload(reference::array(seed, here.group.rank(), 0, kNumel, DType::kFloat32));
    };
    const Memory first = shard(1);
    const Memory second = shard(2);
    gather(here.group, first, 1);
    gather(here.group, second, 2);
    const int num_mapped = num_mapped_regions();
    const auto other = here.group.split(0, "other");
    gather(*other, first, 1);
    EXPECT_EQ(num_mapped_regions(), num_mapped == 0 ? 0 : num_mapped + 2);  // chunks
    gather(*other, second, 2);
    gather(here.group, second, 2);
  };
  for (const auto& failure :
       run_world(ipc_world("FullLists", Role::kGradient, {}, kListed), 2, body)) {
    EXPECT_EQ(text_of(failure), "");
  }
}

TEST_P(IpcContract, GroupsOfGroupsWorkSideBySide) {
  run(4, [](ContractRank& here) {
    const int rank = here.group.rank();
    const auto pair = here.group.split(rank % 2, "pair");
    const auto all = here.group.split(0, "all");
    EXPECT_EQ(pair->backend_name(), "ipc");
    std::vector<Memory> memories;
    std::vector<Pending> calls;
    for (int i = 0; i < 50; ++i) {
      for (Group* group : {&here.group, pair.get(), all.get()}) {
        memories.push_back(here.upload(reference::array(1, rank, 0, 999, DType::kInt64)));
        calls.push_back(group->start_all_reduce(memories.back().data(), 999, DType::kInt64));
      }
    }
    Pending::all(calls).wait();
    const Bytes sum = reduced(here, 1, 0, 999, DType::kInt64, DType::kInt64, Reduction::kSum);
    for (std::size_t i = 0; i < memories.size(); i += 3) {
      EXPECT_TRUE(reference::same_bytes(here.download(memories[i]), sum));
      EXPECT_TRUE(reference::same_bytes(here.download(memories[i + 2]), sum));
    }
  });
}

// The sentence is the same on every rank, and nothing is written.
TEST_P(IpcContract, ARankThatDivergesIsNamedOnEveryRankInTheFirstCallAndTheHundredth) {
  for (const int diverging : {1, 100}) {
    const auto failures = run_collecting(3, [diverging](ContractRank& here) {
      constexpr std::int64_t kNumel = 5000;
      const Bytes bytes = reference::array(4, here.group.rank(), 0, kNumel, DType::kFloat32);
      CallOptions options;
      options.label = {"h.3", "attn.weight"};
      for (int call = 1; call < diverging; ++call) {
        const Memory data = here.upload(bytes);
        here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32, Reduction::kSum, options)
            .wait();
      }
      const Memory data = here.upload(bytes);
      const std::int64_t numel = here.group.rank() == 1 ? kNumel - 1 : kNumel;
      try {
        here.group.start_all_reduce(data.data(), numel, DType::kFloat32, Reduction::kSum, options)
            .wait();
      } catch (const CommError&) {
        EXPECT_TRUE(reference::same_bytes(here.download(data), bytes));
        throw;
      }
    });
    for (const auto& failure : failures) {
      EXPECT_HAS(text_of(failure), "rank 1 called");
      EXPECT_HAS(text_of(failure), "'h.3', parameter 'attn.weight'");
      EXPECT_EQ(text_of(failure), text_of(failures.front()));
    }
  }
}

// --- Ranks that end, or give up.

constexpr int kVictim = 1;

void expect_ended(const std::vector<std::exception_ptr>& failures) {
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    EXPECT_HAS(text_of(failures[rank]),
               rank == kVictim ? "ended by signal 9" : "rank 1 of group 'world' has ended");
  }
}

class IpcDeath : public ::testing::TestWithParam<std::tuple<RoundPhase, Role>> {
 protected:
  void SetUp() override {
    if (!is_true_in_a_fork([] { return device::num_cuda_devices() > 0; })) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(
    CudaIpc, IpcDeath,
    ::testing::Combine(::testing::Values(RoundPhase::kPosting, RoundPhase::kPosted,
                                         RoundPhase::kReading, RoundPhase::kRead),
                       ::testing::Values(Role::kGradient, Role::kOther)));

TEST_P(IpcDeath, InAnyPhaseOfAGatherEndsTheOthersWithItsName) {
  const auto [phase, role] = GetParam();
  const auto kill = [phase = phase, num = 0](int rank, RoundPhase now) mutable {
    if (rank == kVictim && now == phase && ++num == 10) {
      raise(SIGKILL);
    }
  };
  expect_ended(run_world(ipc_world("Killed", role, kill), 3, [](ContractRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory shard =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    const Memory full = here.allocate(shard.bytes() * 3);
    const Gather gather{shard.data(), full.data(), kNumel, DType::kFloat32};
    std::string error;
    while (error.empty()) {
      error = error_of(here.group.start_all_gather({&gather, 1}));
    }
    // The failure is kept, and the device's own streams go on.
    EXPECT_HAS(error_of(here.group.start_barrier()), "rank 1 of group 'world' has ended");
    EXPECT_TRUE(reference::same_bytes(
        here.download(shard), reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32)));
    throw PeerError(error);
  }));
}

// Its peers have handed their part to their GPUs, whose streams stand still.
TEST_P(IpcContract, ARankThatIsKilledWhileStreamsWaitForItBlocksNoStream) {
  const RankLatch others_wait(2);
  expect_ended(run_collecting(3, [&](ContractRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory data =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    here.group.start_barrier().wait();
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    std::optional<Gate> gate;
    if (here.group.rank() == kVictim) {
      gate.emplace(stream);
    }
    CallOptions options;
    options.stream = &stream;
    const Pending call =
        here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32, Reduction::kSum, options);
    device::Stream& behind = here.device.stream(StreamKind::kWrite);
    behind.wait(call);  // all have started it
    if (here.group.rank() == kVictim) {
      others_wait.wait();
      raise(SIGKILL);
    }
    EXPECT_FALSE(call.done());
    const Pending later = behind.record();
    others_wait.count_down();
    EXPECT_HAS(error_of(later), "rank 1 of group 'world' has ended");
    call.wait();
  }));
}

// --- Memory that is freed while streams wait: see [Note: what a stream may wait for].

// A rank's own thread is held up before it has handed its part to its GPU. Until then no stream of
// the others waits for it, so what waits for all of theirs comes to an end.
TEST(CudaIpcHeldUp, FreeingMemoryWaitsForNothingThatARankMustStillEnqueue) {
  if (!is_true_in_a_fork([] { return device::num_cuda_devices() > 0; })) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  const RankLatch has_freed(1);
  const auto hold = [&has_freed, num = 0](int rank, RoundPhase now) mutable {
    if (rank == 1 && now == RoundPhase::kPosted && ++num == 2) {
      has_freed.wait();
    }
  };
  for (const auto& failure :
       run_world(ipc_world("HeldUp", Role::kGradient, hold), 2, [&](ContractRank& here) {
         const Memory data =
             here.upload(reference::array(1, here.group.rank(), 0, 999, DType::kInt64));
         here.group.start_barrier().wait();
         const Pending call = here.group.start_all_reduce(data.data(), 999, DType::kInt64);
         for (int i = 0; i < 100 && here.group.rank() == 0; ++i) {
           here.device.allocate(Tier::kDevice, 1000, Role::kOther).reset();
           delay_at_random(0, 2000);
         }
         if (here.group.rank() == 0) {
           EXPECT_FALSE(call.done());
           has_freed.count_down();
         }
         call.wait();
       })) {
    EXPECT_EQ(text_of(failure), "");
  }
}

// Its peers stand in a call into CUDA that waits for their streams and blocks all other calls.
TEST_P(IpcContract, ARankThatIsKilledWhileOthersFreeMemoryBlocksNobody) {
  const RankLatch others_wait(2);
  expect_ended(run_collecting(3, [&](ContractRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory data =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    Memory freed = here.device.allocate(Tier::kDevice, 1000, Role::kOther);
    here.group.start_barrier().wait();
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    std::optional<Gate> gate;
    if (here.group.rank() == kVictim) {
      gate.emplace(stream);
    }
    CallOptions options;
    options.stream = &stream;
    const Pending call =
        here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32, Reduction::kSum, options);
    here.device.stream(StreamKind::kWrite).wait(call);  // all have started it
    if (here.group.rank() == kVictim) {
      others_wait.wait();
      // They end in either case; this lets them get into the call that blocks.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      raise(SIGKILL);
    }
    others_wait.count_down();
    freed.reset();
    call.wait();
  }));
}

// In the middle of gathers that are on their way; what was allocated before is freed as the
// exception goes, and nobody has been told.
TEST_P(IpcContract, ARankThatRunsOutOfMemoryBetweenGathersEndsAllRanksWithItsName) {
  const auto failures = run_collecting(3, [](ContractRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory shard =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    std::vector<Memory> full;
    std::vector<Pending> calls;
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    CallOptions options;
    options.stream = &stream;
    for (int i = 0; i < 40; ++i) {
      const bool is_out = here.group.rank() == kVictim && i == 20;
      full.push_back(here.device.allocate(
          Tier::kDevice, is_out ? std::size_t{1} << 60 : shard.bytes() * 3, Role::kOther));
      const Gather gather{shard.data(), full.back().data(), kNumel, DType::kFloat32};
      calls.push_back(here.group.start_all_gather({&gather, 1}, options));
      here.device.stream(StreamKind::kCompute).wait(calls.back());
    }
    Pending::all(calls).wait();
  });
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    ASSERT_TRUE(failures[rank]) << "rank " << rank;
    EXPECT_HAS(text_of(failures[rank]), rank == kVictim ? "asked for" : "rank 1");
  }
}

// See [Note: streams that share a connection].
TEST_P(IpcContract, IsRefusedOnEveryRankWhereStreamsWouldShareConnections) {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
  ASSERT_EQ(setenv(kVariable, "2", /*overwrite=*/1), 0);
  const auto failures = run_collecting(2, [](ContractRank&) {});
  unsetenv(kVariable);
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure);
    const std::string text = text_of(failure);
    EXPECT_HAS(text, "CUDA_DEVICE_MAX_CONNECTIONS=2 in the environment");
    EXPECT_HAS(text, "raise it, or unset it");
  }
}

TEST_P(IpcContract, AnAbortEndsCallsOnEveryRankWithItsReason) {
  const RankLatch is_handed_over(1);  // by the rank whose stream stands still
  const RankLatch is_aborted(1);
  for (const auto& failure : run_collecting(2, [&](ContractRank& here) {
         constexpr std::int64_t kNumel = 100'000;
         const Memory data =
             here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
         here.group.start_barrier().wait();
         device::Stream& stream = here.device.stream(StreamKind::kGather);
         std::optional<Gate> gate;
         if (here.group.rank() == 1) {
           gate.emplace(stream);
         }
         CallOptions options;
         options.stream = &stream;
         const Pending call = here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32,
                                                          Reduction::kSum, options);
         here.device.stream(StreamKind::kWrite).wait(call);  // all have started it
         if (here.group.rank() == 0) {
           is_handed_over.wait();
           IpcNetwork::last_made->abort("enough of it");
           is_aborted.count_down();
         } else {
           is_handed_over.count_down();
           is_aborted.wait();
           gate->open();
         }
         call.wait();
       })) {
    EXPECT_HAS(text_of(failure), "enough of it");
  }
}

}  // namespace
}  // namespace tessera::comm
