// Backend ipc: GPU ranks that read each other's memory. A handle of GPU memory cannot be opened in
// the process that made it, so ranks are processes: a test starts this program once per rank, with
// a filter for the test itself; there run() is the rank, and here it waits for all.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/comm/ipc_backend.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "tests/comm/contract.h"
#include "tests/comm/random_call.h"
#include "tests/comm/reference.h"
#include "tests/comm/time_limits.h"

extern char** environ;

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

constexpr std::chrono::seconds kStoreTimeout{120};

// What a process of a test is told by the one that starts it.
struct RankOfTest {
  int rank = 0;
  int run = 0;  // which run() of the test
  std::uint16_t port = 0;

  static constexpr const char* kVariable = "TESSERA_IPC_TEST_RANK";

  std::string text() const {
    return std::to_string(rank) + " " + std::to_string(run) + " " + std::to_string(port);
  }
  static std::optional<RankOfTest> find() {
    const char* const text = std::getenv(kVariable);
    if (text == nullptr) {
      return std::nullopt;
    }
    RankOfTest here;
    std::istringstream(text) >> here.rank >> here.run >> here.port;
    return here;
  }
};

struct IpcRank : ContractRank {
  Backend& backend;
  Store& store;
};

class IpcOnCuda : public ::testing::Test {
 protected:
  using Body = std::function<void(IpcRank&)>;

  struct World {
    int num_ranks = 2;
    Role role = Role::kGradient;  // of memory: gradients are read in place, others in chunks
    std::function<std::function<void(RoundPhase)>(int rank)> on_phase = {};
    int killed_rank = -1;  // ends by SIGKILL
  };

  void SetUp() override {
    if (!ipc_built()) {
      GTEST_SKIP() << "ipc is not in this build (no CUDA)";
    }
    if (device::num_cuda_devices() == 0) {
      GTEST_SKIP() << "no GPU: " << device::cuda_description();
    }
  }

  void run(const World& world, const Body& body) {
    ++num_runs_;
    if (!here_) {
      run_processes(world);
    } else if (here_->run == num_runs_) {
      run_rank(world, body);
    }
  }

  // For both kinds of memory.
  void run_all(const std::vector<int>& nums_ranks, const Body& body) {
    for (const int num_ranks : nums_ranks) {
      for (const Role role : {Role::kGradient, Role::kOther}) {
        run({.num_ranks = num_ranks, .role = role}, body);
      }
    }
  }

 private:
  void run_processes(const World& world) {
    const std::shared_ptr<Store> store = serve_store("127.0.0.1", 0, kStoreTimeout);
    const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string filter =
        std::string("--gtest_filter=") + info->test_suite_name() + "." + info->name();
    std::vector<pid_t> processes;
    std::vector<std::string> outputs;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      const RankOfTest there{rank, num_runs_, store->port()};
      const std::string variable = std::string(RankOfTest::kVariable) + "=" + there.text();
      std::vector<char*> variables = {const_cast<char*>(variable.c_str())};
      for (char** each = environ; *each != nullptr; ++each) {
        if (!std::string_view(*each).starts_with("GTEST_")) {
          variables.push_back(*each);
        }
      }
      variables.push_back(nullptr);
      char* const arguments[] = {const_cast<char*>("ipc rank"), const_cast<char*>(filter.c_str()),
                                 const_cast<char*>("--gtest_brief=1"), nullptr};
      outputs.push_back(::testing::TempDir() + "ipc_test." + std::to_string(getpid()) + "." +
                        std::to_string(rank));
      posix_spawn_file_actions_t files;
      posix_spawn_file_actions_init(&files);
      posix_spawn_file_actions_addopen(&files, 1, outputs.back().c_str(),
                                       O_WRONLY | O_CREAT | O_TRUNC, 0600);
      posix_spawn_file_actions_adddup2(&files, 1, 2);
      pid_t process = 0;
      ASSERT_EQ(
          posix_spawn(&process, "/proc/self/exe", &files, nullptr, arguments, variables.data()), 0);
      posix_spawn_file_actions_destroy(&files);
      processes.push_back(process);
    }
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      int status = 0;
      waitpid(processes[at], &status, 0);
      std::stringstream output;
      output << std::ifstream(outputs[at]).rdbuf();
      std::remove(outputs[at].c_str());
      const bool is_expected = rank == world.killed_rank
                                   ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                   : WIFEXITED(status) && WEXITSTATUS(status) == 0;
      EXPECT_TRUE(is_expected) << "run " << num_runs_ << ", rank " << rank << " of "
                               << world.num_ranks << ", status " << status << ":\n"
                               << output.str();
    }
  }

  void run_rank(const World& world, const Body& body) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing is left of a test that was ended
    const int rank = here_->rank;
    const int index = rank % device::num_cuda_devices();
    Ledger ledger;
    device::CudaDeviceOptions device_options;
    device_options.index = index;
    device_options.ledger = &ledger;
    const auto device = device::make_cuda_device(device_options);
    const std::shared_ptr<Store> store = connect_store("127.0.0.1", here_->port, kStoreTimeout);
    IpcOptions options;
    if (world.on_phase) {
      options.on_phase = world.on_phase(rank);
    }
    std::string why_not;
    auto backend = make_ipc_backend(store, rank, world.num_ranks, index, "world", options, why_not);
    ASSERT_NE(backend, nullptr) << why_not;
    Backend& raw = *backend;
    GroupOptions group_options = patient();
    group_options.device = device.get();
    group_options.ledger = &ledger;
    group_options.status = std::make_shared<StatusStore>(
        connect_store("127.0.0.1", here_->port, kStoreTimeout), world.num_ranks);
    std::vector<int> ranks(static_cast<std::size_t>(world.num_ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    Group group(std::move(backend), "world", ranks, group_options);
    IpcRank here{{group, *device, ledger, world.role}, raw, *store};
    try {
      body(here);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }

  const std::optional<RankOfTest> here_ = RankOfTest::find();
  int num_runs_ = 0;
};

std::string error_of(const Pending& pending) {
  try {
    pending.wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << text << "' lacks: " << word;
  }
}

// None, one, odd, and more than an all-reduce takes at once.
constexpr std::size_t kSizes[] = {0, 1, 17, 1023, 20011};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64,
                             DType::kInt64,   DType::kInt32,    DType::kUInt8};

void expect_gather(const IpcRank& here, std::span<const std::uint8_t> wants) {
  const auto rank = static_cast<std::size_t>(here.group.rank());
  const auto num = static_cast<std::size_t>(here.group.size());
  const bool receives = wants.empty() || wants[rank] != 0;
  for (const bool in_place : {false, true}) {
    std::vector<Memory> shards;
    std::vector<Memory> fulls;
    std::vector<Gather> gathers;
    for (std::size_t i = 0; i < reference::kMixedTensors.size(); ++i) {
      const auto [numel, dtype] = reference::kMixedTensors[i];
      const Bytes shard = reference::array(i, here.group.rank(), 0, numel, dtype);
      Bytes full(shard.size() * num, std::byte{0xee});
      std::copy(shard.begin(), shard.end(),
                full.begin() + static_cast<std::ptrdiff_t>(rank * shard.size()));
      fulls.push_back(here.upload(full));
      shards.push_back(here.upload(shard));
      gathers.push_back(
          {in_place ? fulls.back().data() + rank * shard.size() : shards.back().data(),
           receives ? fulls.back().data() : nullptr, static_cast<std::int64_t>(numel), dtype});
    }
    if (wants.empty()) {
      Pending::all(here.group.start_all_gathers(gathers)).wait();
    } else {
      here.group.start_gather_to(gathers, wants).wait();
    }
    for (std::size_t i = 0; receives && i < fulls.size(); ++i) {
      const auto [numel, dtype] = reference::kMixedTensors[i];
      EXPECT_TRUE(here.download(fulls[i]) == reference::arrays(i, here.group.size(), numel, dtype))
          << "tensor " << i << (in_place ? ", in place" : "");
    }
  }
}

TEST_F(IpcOnCuda, GathersBringTheReferencesBytesToThoseThatWantThem) {
  run_all({2, 3, 4}, [](IpcRank& here) {
    const auto num = static_cast<std::size_t>(here.group.size());
    expect_gather(here, {});
    for (std::size_t one = 0; one < num; ++one) {
      std::vector<std::uint8_t> wants(num, 0);
      wants[one] = 1;
      expect_gather(here, wants);
      std::transform(wants.begin(), wants.end(), wants.begin(),
                     [](std::uint8_t want) { return want == 0 ? 1 : 0; });
      expect_gather(here, wants);
    }
    here.group.start_barrier().wait();
    here.group.start_gather_to({}, std::vector<std::uint8_t>(num, 0)).wait();
  });
}

// All reductions, element by element on the host, in rank order.
Bytes reduced(const IpcRank& here, std::uint64_t seed, std::size_t begin, std::size_t numel,
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

TEST_F(IpcOnCuda, SumsMaximaAndMinimaHaveTheHostsBitsForAllTypesAndSizes) {
  run_all({2, 3, 4}, [](IpcRank& here) {
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
          EXPECT_TRUE(here.download(output) ==
                      reduced(here, numel, numel * rank, numel, dtype, out_dtype, Reduction::kSum))
              << numel << " " << to_string(dtype) << " into " << to_string(out_dtype);
        }
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
          const Memory data =
              here.upload(reference::array(numel, here.group.rank(), 0, numel, dtype));
          here.group.start_all_reduce(data.data(), count, dtype, reduction).wait();
          EXPECT_TRUE(here.download(data) ==
                      reduced(here, numel, 0, numel, dtype, dtype, reduction))
              << numel << " " << to_string(dtype) << " " << static_cast<int>(reduction);
        }
      }
    }
  });
}

TEST_F(IpcOnCuda, ANaNOfOneRankIsInTheResultOfEveryReduction) {
  run({.num_ranks = 3}, [](IpcRank& here) {
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
      std::vector<float> values(3, static_cast<float>(here.group.rank()));
      values[static_cast<std::size_t>(here.group.rank())] = NAN;
      Bytes bytes(sizeof(float) * values.size());
      std::memcpy(bytes.data(), values.data(), bytes.size());
      const Memory data = here.upload(bytes);
      here.group.start_all_reduce(data.data(), 3, DType::kFloat32, reduction).wait();
      const Bytes result = here.download(data);
      std::memcpy(values.data(), result.data(), result.size());
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return std::isnan(v); }));
    }
  });
}

TEST_F(IpcOnCuda, BroadcastsAndAllToAllsBringTheReferencesBytes) {
  run_all({2, 3, 4}, [](IpcRank& here) {
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    for (const std::size_t numel : kSizes) {
      const auto count = static_cast<std::int64_t>(numel);
      for (int root = 0; root < here.group.size(); ++root) {
        const Memory data = here.upload(reference::array(3, rank, 0, numel, DType::kFloat32));
        here.group.start_broadcast(data.data(), count, DType::kFloat32, root).wait();
        EXPECT_TRUE(here.download(data) == reference::array(3, root, 0, numel, DType::kFloat32))
            << numel << " from " << root;
      }
      const Memory send = here.upload(reference::array(5, rank, 0, numel * num, DType::kUInt8));
      const Memory receive = here.allocate(send.bytes());
      here.group.start_all_to_all(send.data(), receive.data(), count, DType::kUInt8).wait();
      Bytes expected;
      for (int from = 0; from < here.group.size(); ++from) {
        const Bytes piece =
            reference::array(5, from, numel * static_cast<std::size_t>(rank), numel, DType::kUInt8);
        expected.insert(expected.end(), piece.begin(), piece.end());
      }
      EXPECT_TRUE(here.download(receive) == expected) << numel;
    }
  });
}

// More than two chunks hold, with a rest.
TEST_F(IpcOnCuda, LargeCallsBringTheReferencesBytes) {
  constexpr std::size_t kNumel = 3'300'007;
  constexpr auto kCount = static_cast<std::int64_t>(kNumel);
  run_all({2, 3}, [](IpcRank& here) {
    const int rank = here.group.rank();
    const auto num = static_cast<std::size_t>(here.group.size());
    const Bytes own = reference::array(1, rank, 0, kNumel, DType::kFloat32);
    const Memory shard = here.upload(own);
    const Memory full = here.allocate(own.size() * num);
    const Gather gather{shard.data(), full.data(), kCount, DType::kFloat32};
    here.group.start_all_gather({&gather, 1}).wait();
    EXPECT_TRUE(here.download(full) ==
                reference::arrays(1, here.group.size(), kNumel, DType::kFloat32));
    const Memory input = here.upload(reference::array(2, rank, 0, kNumel * num, DType::kBFloat16));
    const Memory output = here.allocate(kNumel * sizeof(float));
    here.group
        .start_reduce_scatter(input.data(), output.data(), kCount, DType::kBFloat16,
                              DType::kFloat32)
        .wait();
    EXPECT_TRUE(here.download(output) == reduced(here, 2, kNumel * static_cast<std::size_t>(rank),
                                                 kNumel, DType::kBFloat16, DType::kFloat32,
                                                 Reduction::kSum));
    here.group.start_all_reduce(shard.data(), kCount, DType::kFloat32).wait();
    EXPECT_TRUE(here.download(shard) ==
                reduced(here, 1, 0, kNumel, DType::kFloat32, DType::kFloat32, Reduction::kSum));
  });
}

TEST_F(IpcOnCuda, MemoryNeedNotBeAlignedToMoreThanItsElements) {
  run_all({2, 3}, [](IpcRank& here) {
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

// Holds a rank up for random times, as a busy machine does.
std::function<void(RoundPhase)> random_delays(int rank) {
  const auto random = std::make_shared<std::mt19937>(static_cast<unsigned>(rank) + 7U);
  return [random](RoundPhase) {
    std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 300));
  };
}

TEST_F(IpcOnCuda, ManyRandomCallsInFlightEqualTheReference) {
  for (const int num_ranks : {2, 3, 4}) {
    for (const Role role : {Role::kGradient, Role::kOther}) {
      for (const bool is_late : {false, true}) {
        World world{.num_ranks = num_ranks, .role = role};
        if (is_late) {
          world.on_phase = random_delays;
        }
        run(world, [](IpcRank& here) { run_random_calls(here, 300, 8); });
      }
    }
  }
}

// The input is made behind a gate that opens only after the call has been started.
TEST_F(IpcOnCuda, StartingACallBlocksNobodyAndStreamsAreOrderedBehindIt) {
  constexpr std::size_t kNumel = 20011;
  run_all({2, 3}, [](IpcRank& here) {
    const Bytes bytes = reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32);
    const Memory source = here.device.allocate(Tier::kPinned, bytes.size(), Role::kOther);
    std::copy(bytes.begin(), bytes.end(), source.data());
    const Memory data = here.allocate(bytes.size());
    const Memory copied = here.allocate(bytes.size());
    here.group.start_barrier().wait();
    std::promise<void> started;
    device::Stream& gather = here.device.stream(StreamKind::kGather);
    std::ignore = gather.enqueue([opened = started.get_future().share()] { opened.wait(); });
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
    started.set_value();
    last.wait();
    EXPECT_TRUE(here.download(copied) ==
                reduced(here, 1, 0, kNumel, DType::kFloat32, DType::kFloat32, Reduction::kSum));
  });
}

// Addresses are used again, and what peers have mapped must not be what was there before.
TEST_F(IpcOnCuda, MemoryMayBeFreedAndTakenAgainBetweenCalls) {
  run({.num_ranks = 3}, [](IpcRank& here) {
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
      EXPECT_TRUE(here.download(full) ==
                  reference::arrays(i, here.group.size(), numel, DType::kFloat32))
          << i;
    }
  });
}

TEST_F(IpcOnCuda, GroupsOfGroupsWorkSideBySide) {
  run({.num_ranks = 4}, [](IpcRank& here) {
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
      EXPECT_TRUE(here.download(memories[i]) == sum);
      EXPECT_TRUE(here.download(memories[i + 2]) == sum);
    }
  });
}

TEST_F(IpcOnCuda, BytesOfTheHostAreGatheredAndBroadcast) {
  run({.num_ranks = 3}, [](IpcRank& here) {
    std::int64_t number = here.group.rank() + 7;
    const HostGather all = here.group.start_gather_host(std::as_bytes(std::span(&number, 1)));
    all.done.wait();
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      std::int64_t other = 0;
      std::memcpy(&other, all.bytes.get() + sizeof(other) * static_cast<std::size_t>(rank),
                  sizeof(other));
      EXPECT_EQ(other, rank + 7);
    }
    here.group.broadcast_host(&number, sizeof(number), 1);
    EXPECT_EQ(number, 8);
  });
}

// The sentence is the same on every rank, and nothing is written.
TEST_F(IpcOnCuda, ARankThatDivergesIsNamedOnEveryRankInTheFirstCallAndTheHundredth) {
  for (const int diverging : {1, 100}) {
    run({.num_ranks = 3}, [diverging](IpcRank& here) {
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
      const std::string error = error_of(here.group.start_all_reduce(
          data.data(), numel, DType::kFloat32, Reduction::kSum, options));
      expect_words(error, {"rank 1 called", "h.3", "attn.weight"});
      EXPECT_TRUE(here.download(data) == bytes);
      here.store.set("error " + std::to_string(here.group.rank()), error);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(here.store.get("error " + std::to_string(rank), kStoreTimeout), error);
      }
    });
  }
}

TEST_F(IpcOnCuda, ARankThatIsKilledInAnyPhaseIsNamedByTheOthers) {
  for (const RoundPhase phase :
       {RoundPhase::kPosting, RoundPhase::kPosted, RoundPhase::kReading, RoundPhase::kRead}) {
    for (const Role role : {Role::kGradient, Role::kOther}) {
      World world{.num_ranks = 3, .role = role, .killed_rank = 1};
      world.on_phase = [phase](int rank) -> std::function<void(RoundPhase)> {
        if (rank != 1) {
          return {};
        }
        return [phase, num = std::make_shared<int>(0)](RoundPhase now) {
          if (now == phase && ++*num == 10) {
            raise(SIGKILL);
          }
        };
      };
      run(world, [](IpcRank& here) {
        constexpr std::int64_t kNumel = 100'000;
        const Memory shard =
            here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
        const Memory full = here.allocate(shard.bytes() * 3);
        const Gather gather{shard.data(), full.data(), kNumel, DType::kFloat32};
        std::string error;
        while (error.empty()) {
          error = error_of(here.group.start_all_gather({&gather, 1}));
        }
        expect_words(error, {"rank 1 of group 'world' has ended"});
        // The failure is kept, and the device's own streams go on.
        expect_words(error_of(here.group.start_barrier()), {"rank 1"});
        EXPECT_EQ(here.download(shard).size(), shard.bytes());
      });
    }
  }
}

// Its peers have handed their part to their GPUs, whose streams stand still.
TEST_F(IpcOnCuda, ARankThatIsKilledWhileStreamsWaitForItBlocksNoStream) {
  run({.num_ranks = 3, .killed_rank = 1}, [](IpcRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory data =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    here.group.start_barrier().wait();
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    std::promise<void> never;
    if (here.group.rank() == 1) {
      std::ignore = stream.enqueue([opened = never.get_future().share()] { opened.wait(); });
    }
    CallOptions options;
    options.stream = &stream;
    const Pending call =
        here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32, Reduction::kSum, options);
    device::Stream& compute = here.device.stream(StreamKind::kWrite);
    compute.wait(call);  // all have started it
    if (here.group.rank() == 1) {
      here.store.get("others wait", kStoreTimeout);
      raise(SIGKILL);
    }
    EXPECT_FALSE(call.done());
    if (here.store.add("waiting", 1) == 2) {
      here.store.set("others wait", "yes");
    }
    expect_words(error_of(call), {"rank 1 of group 'world' has ended"});
    expect_words(error_of(compute.record()), {"rank 1 of group 'world' has ended"});
  });
}

TEST_F(IpcOnCuda, AnAbortEndsCallsOnEveryRankWithItsReason) {
  run({.num_ranks = 2}, [](IpcRank& here) {
    constexpr std::int64_t kNumel = 100'000;
    const Memory data =
        here.upload(reference::array(1, here.group.rank(), 0, kNumel, DType::kFloat32));
    here.group.start_barrier().wait();
    device::Stream& stream = here.device.stream(StreamKind::kGather);
    std::promise<void> aborted;
    if (here.group.rank() == 1) {
      std::ignore = stream.enqueue([opened = aborted.get_future().share()] { opened.wait(); });
    }
    CallOptions options;
    options.stream = &stream;
    const Pending call =
        here.group.start_all_reduce(data.data(), kNumel, DType::kFloat32, Reduction::kSum, options);
    here.device.stream(StreamKind::kWrite).wait(call);  // all have started it
    if (here.group.rank() == 0) {
      here.backend.abort("enough of it");
      here.store.set("aborted", "yes");
    } else {
      here.store.get("aborted", kStoreTimeout);
      aborted.set_value();
    }
    expect_words(error_of(call), {"enough of it"});
  });
}

}  // namespace
}  // namespace tessera::comm
