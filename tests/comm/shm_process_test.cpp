// What shared memory must show when a rank dies, leaves, or cannot share. Ranks are processes.
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/await_ranks.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"
#include "tessera/device/device_cpu.h"
#include "tests/comm/forked_ranks.h"
#include "tests/comm/reference.h"
#include "tests/comm/shm_network.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

constexpr int kNumRanks = 3;
constexpr int kVictim = 1;

// --- What is left in the system.

// Abstract sockets of the backend that are in use, by name; if `mine`, those of this process only.
std::set<std::string> backend_sockets(bool mine) {
  std::set<std::string> own;  // inodes
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) {
      own.insert(target.substr(8, target.size() - 9));
    }
  }
  std::set<std::string> names;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) {
      fields.push_back(word);
    }
    const bool is_ours = fields.size() == 8 && fields[7].starts_with("@tessera/");
    if (is_ours && (!mine || own.contains(fields[6]))) {
      names.insert(fields[7]);
    }
  }
  return names;
}

bool maps_shared_memory() {
  return read_whole("/proc/self/maps").find("/memfd:tessera") != std::string::npos;
}

// Which sockets ranks had, so that other programs of the machine do not disturb the test.
class SocketNames {
 public:
  // Of this process.
  void record() const {
    std::ofstream file(directory_.path() / std::to_string(getpid()));
    for (const std::string& name : backend_sockets(true)) {
      file << name << "\n";
    }
  }
  void expect_gone() const {
    const std::set<std::string> there = backend_sockets(false);
    std::size_t num_names = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      std::ifstream file(entry.path());
      for (std::string name; std::getline(file, name); ++num_names) {
        EXPECT_FALSE(there.contains(name)) << name;
      }
    }
    EXPECT_GT(num_names, 0U) << "no rank had a socket: this shows nothing";
  }

 private:
  testing::TemporaryDirectory directory_;
};

void expect_nothing_is_left(const SocketNames& sockets) {
  sockets.expect_gone();
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "a rank is left";
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("tessera-test-")) {  // a directory of another test (MemoryDirectory)
      EXPECT_LACKS(name, "tessera");
    }
  }
}

// --- Ranks that make calls.

enum class ShmCall { kGatherInPlace, kGatherChunked, kReduceScatter };

// In place: a page and a bit. Chunked: several chunks of each rank.
void run_call(const ContractRank& here, ShmCall call) {
  const std::size_t numel = call == ShmCall::kGatherChunked ? 200003 : 1100;
  const auto count = static_cast<std::int64_t>(numel);
  const auto num = static_cast<std::size_t>(here.group.size());
  CallOptions options;
  options.label = {"h.3", "attn.weight"};
  const int rank = here.group.rank();
  if (call == ShmCall::kReduceScatter) {
    const device::Memory input =
        here.upload(reference::array(1, rank, 0, numel * num, DType::kFloat32));
    const device::Memory sum = here.allocate(numel * sizeof(float));
    here.group
        .start_reduce_scatter(input.data(), sum.data(), count, DType::kFloat32, DType::kFloat32,
                              options)
        .wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(sum),
        reference::rank_order_sum(1, here.group.size(), numel * static_cast<std::size_t>(rank),
                                  numel, DType::kFloat32, DType::kFloat32)));
  } else {
    const device::Memory shard = here.upload(reference::array(1, rank, 0, numel, DType::kFloat32));
    const device::Memory full = here.allocate(numel * num * sizeof(float));
    const Gather gather{shard.data(), full.data(), count, DType::kFloat32};
    here.group.start_all_gather({&gather, 1}, options).wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(full), reference::arrays(1, here.group.size(), numel, DType::kFloat32)));
  }
}

// A rank with a group and a device, gone with all that they hold when it returns or throws.
void run_shm_rank(ShmNetwork& network, int rank, int num_ranks, Role role,
                  const std::function<void(ContractRank&)>& body) {
  const std::uint64_t open_before = num_open_files();
  std::exception_ptr failure;
  try {
    Ledger ledger;
    const auto device = device::make_cpu_device({&ledger, {}, nullptr});
    GroupOptions options = patient();
    options.status = network.make_status();
    options.ledger = &ledger;
    std::vector<int> world_ranks;
    for (int r = 0; r < num_ranks; ++r) {
      world_ranks.push_back(r);
    }
    Group group(network.make_backend(rank), "world", world_ranks, options);
    EXPECT_GT(num_open_files(), open_before);
    EXPECT_TRUE(maps_shared_memory());
    ContractRank here{group, *device, ledger, role};
    body(here);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  EXPECT_EQ(num_open_files(), open_before) << "a rank keeps files or sockets";
  EXPECT_FALSE(maps_shared_memory());
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void expect_failure_names(const RankEnd& end, const std::vector<std::string>& words) {
  ASSERT_TRUE(end.failure) << "the rank saw nothing";
  EXPECT_THROW(std::rethrow_exception(end.failure), PeerError);
  for (const std::string& word : words) {
    EXPECT_HAS(text_of(end.failure), word);
  }
}

// Ends rank `kVictim`, or all, when it comes to a phase of its n-th round.
ShmNetwork::PhaseHook kill_at(ShmPhase phase, int round, bool all, const SocketNames& sockets) {
  return [=, &sockets, num_rounds = 0](int rank, ShmPhase at) mutable {
    num_rounds += at == ShmPhase::kPosting ? 1 : 0;
    if (num_rounds == 1 && at == ShmPhase::kPosting) {
      sockets.record();
    }
    if (at == phase && num_rounds == round && (all || rank == kVictim)) {
      raise(SIGKILL);
    }
  };
}

// --- Death at every phase of every kind of call.

using Death = std::tuple<ShmPhase, ShmCall>;

class ShmDeath : public ::testing::TestWithParam<Death> {
 protected:
  static std::vector<RankEnd> run_deaths(int round, bool all, const SocketNames& sockets) {
    const auto [phase, call] = GetParam();
    ShmNetwork network(kNumRanks, true, kill_at(phase, round, all, sockets));
    return run_forked(kNumRanks, [&, call = call](int rank) {
      const Role role = call == ShmCall::kGatherChunked ? Role::kOther : Role::kGradient;
      run_shm_rank(network, rank, kNumRanks, role, [&](ContractRank& here) {
        for (int i = 0; i < 5; ++i) {
          run_call(here, call);
        }
      });
    });
  }
};

std::string death_name(const ::testing::TestParamInfo<Death>& info) {
  constexpr std::array<const char*, 4> kPhases = {"Posting", "Posted", "Reading", "Read"};
  constexpr std::array<const char*, 3> kCalls = {"GatherInPlace", "GatherChunked", "ReduceScatter"};
  const auto [phase, call] = info.param;
  return std::string(kPhases.at(static_cast<std::size_t>(phase))) + "In" +
         kCalls.at(static_cast<std::size_t>(call));
}

INSTANTIATE_TEST_SUITE_P(Every, ShmDeath,
                         ::testing::Combine(::testing::Values(ShmPhase::kPosting, ShmPhase::kPosted,
                                                              ShmPhase::kReading, ShmPhase::kRead),
                                            ::testing::Values(ShmCall::kGatherInPlace,
                                                              ShmCall::kGatherChunked,
                                                              ShmCall::kReduceScatter)),
                         death_name);

TEST_P(ShmDeath, EndsTheOthersWithItsNameAndLeavesNothing) {
  const SocketNames sockets;
  const std::vector<RankEnd> ends = run_deaths(4, false, sockets);
  EXPECT_EQ(ends[kVictim].signal, SIGKILL);
  for (const int survivor : {0, 2}) {
    expect_failure_names(ends[static_cast<std::size_t>(survivor)],
                         {"rank 1 of group 'world' has ended", "'h.3'", "'attn.weight'"});
  }
  expect_nothing_is_left(sockets);
}

TEST_P(ShmDeath, OfAllRanksLeavesNothing) {
  const SocketNames sockets;
  for (const RankEnd& end : run_deaths(1, true, sockets)) {
    // One that dies late may have heard of the others' end before.
    EXPECT_TRUE(end.signal == SIGKILL || end.failure);
  }
  expect_nothing_is_left(sockets);
}

// Wherever it is in a call of many chunks.
TEST(ShmProcesses, ARankKilledAtAnyTimeEndsTheOthersWithItsName) {
  for (unsigned seed = 0; seed < support::rounds(6U, 3U); ++seed) {
    const SocketNames sockets;
    ShmNetwork network(kNumRanks, true, [&](int, ShmPhase) { sockets.record(); });
    const auto ends = run_forked(kNumRanks, [&](int rank) {
      run_shm_rank(network, rank, kNumRanks, Role::kOther, [&](ContractRank& here) {
        std::mt19937 random(seed);
        run_call(here, ShmCall::kGatherChunked);
        std::vector<float> shard(500003);
        std::vector<float> full(shard.size() * kNumRanks);
        const Gather gather{shard.data(), full.data(), static_cast<std::int64_t>(shard.size()),
                            DType::kFloat32};
        CallOptions options;
        options.label = {"h.4", "mlp.weight"};
        while (true) {
          const Pending pending = here.group.start_all_gather({&gather, 1}, options);
          if (here.group.rank() == kVictim) {
            for (unsigned spins = random() % 100000; spins > 0; --spins) {
              std::atomic_signal_fence(std::memory_order_seq_cst);
            }
            raise(SIGKILL);
          }
          pending.wait();
        }
      });
    });
    EXPECT_EQ(ends[kVictim].signal, SIGKILL);
    for (const int survivor : {0, 2}) {
      expect_failure_names(ends[static_cast<std::size_t>(survivor)],
                           {"rank 1 ", "'h.4'", "'mlp.weight'"});
    }
    expect_nothing_is_left(sockets);
  }
}

// Rank 3 is rank 1 of its part. The other part goes on until it needs it.
TEST(ShmProcesses, TheDeathOfARankIsToldByItsRankInTheWorld) {
  std::atomic<bool> is_armed{false};  // of each process
  ShmNetwork network(4, true, [&](int rank, ShmPhase phase) {
    if (is_armed && rank == 3 && phase == ShmPhase::kReading) {
      raise(SIGKILL);
    }
  });
  const auto ends = run_forked(4, [&](int rank) {
    run_shm_rank(network, rank, 4, Role::kGradient, [&](ContractRank& here) {
      const auto part = here.group.split(rank % 2, "part");
      is_armed = rank == 3;
      for (int i = 0; i < 3; ++i) {
        float value = 1;
        CallOptions options;
        options.label = {"h.5", "bias"};
        part->start_all_reduce(&value, 1, DType::kFloat32, Reduction::kSum, options).wait();
      }
      CallOptions options;
      options.label = {"loss", ""};
      here.group.start_barrier(options).wait();
    });
  });
  EXPECT_EQ(ends[3].signal, SIGKILL);
  expect_failure_names(ends[1], {"rank 3 gives no sign of life", "'h.5'", "'bias'"});
  for (const std::size_t rank : {0U, 2U}) {
    expect_failure_names(ends[rank], {"rank 3 ", "'loss'"});
  }
}

// The last call of a group: whoever has read may go, while others still hear that it has.
TEST(ShmProcesses, ARankThatHasReadMayEndBeforeTheOthersHaveHeardOfIt) {
  ShmNetwork network(kNumRanks, true, [](int rank, ShmPhase) {
    thread_local std::mt19937 random(static_cast<unsigned>(rank));
    for (unsigned yields = random() % 20; yields > 0; --yields) {
      sched_yield();
    }
  });
  for (const RankEnd& end : run_forked(kNumRanks, [&](int rank) {
         for (int i = 0; i < support::rounds(40, 10); ++i) {
           std::string why_not;
           auto backend = network.try_make_backend(rank, "group" + std::to_string(i), why_not);
           ASSERT_TRUE(backend) << why_not;
           Group group(std::move(backend), "group" + std::to_string(i), {0, 1, 2}, patient());
           const std::vector<float> shard(1000, static_cast<float>(rank));
           std::vector<float> full(3000);
           const Gather gather{shard.data(), full.data(), 1000, DType::kFloat32};
           group.start_all_gather({&gather, 1}).wait();
           EXPECT_EQ(full.back(), 2.0F);
         }
       })) {
    EXPECT_EQ(text_of(end.failure), "");
    EXPECT_EQ(end.signal, 0);
  }
}

// As signals of a user's own do, and completions of io_uring.
TEST(ShmProcesses, RanksWhoseSystemCallsAreInterruptedMeetAllTheSame) {
  ShmNetwork network(kNumRanks, true, {});
  for (const RankEnd& end : run_forked(kNumRanks, [&](int rank) {
         struct sigaction action {};
         action.sa_handler = [](int) {};
         action.sa_flags = SA_RESTART;
         ASSERT_EQ(sigaction(SIGALRM, &action, nullptr), 0);
         const itimerval often{{0, 150}, {0, 150}};
         ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
         for (int i = 0; i < support::rounds(40, 10); ++i) {
           std::string why_not;
           const auto backend =
               network.try_make_backend(rank, "group" + std::to_string(i), why_not);
           ASSERT_TRUE(backend) << why_not;
         }
       })) {
    EXPECT_EQ(text_of(end.failure), "");
    EXPECT_EQ(end.signal, 0);
  }
}

// --- Ranks that cannot share memory.

// Every rank must get no backend, and this reason.
void expect_no_shared_memory(const std::function<void(int rank)>& prepare,
                             const std::string& reason, int ranks_per_host = 0) {
  ShmNetwork network(kNumRanks, true, {}, ranks_per_host);
  for (const RankEnd& end : run_forked(kNumRanks, [&](int rank) {
         prepare(rank);
         const std::uint64_t open_before = num_open_files();
         std::string why_not;
         EXPECT_EQ(network.try_make_backend(rank, "world", why_not), nullptr);
         EXPECT_HAS(why_not, reason);
         EXPECT_EQ(num_open_files(), open_before);
         EXPECT_FALSE(maps_shared_memory());
       })) {
    EXPECT_EQ(text_of(end.failure), "");
    EXPECT_EQ(end.signal, 0);
  }
}

TEST(ShmProcesses, ALimitOfAddressSpaceOnOneRankIsTheReasonOnAll) {
  expect_no_shared_memory(
      [](int rank) {
        rlimit limit{};
        getrlimit(RLIMIT_AS, &limit);
        limit.rlim_cur = rlim_t{1} << 60U;  // a limit, but never reached
        if (rank == 2) {
          ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
        }
      },
      "rank 2: this process has a limit of address space (ulimit -v)");
}

// As a container has it. Its user may be another one there, too.
int leave_network() {
  return unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0 ? 0 : errno;
}

TEST(ShmProcesses, ARankInANetworkOfItsOwnIsTheReasonOnAll) {
  const SharedByRanks<std::atomic<int>> error;
  run_forked(1, [&](int) { *error = leave_network(); });
  if (*error != 0) {
    GTEST_SKIP() << "no network namespace can be had here: " << std::strerror(*error);
  }
  expect_no_shared_memory([](int rank) { EXPECT_EQ(rank == 0 ? leave_network() : 0, 0); },
                          "rank 1: no way to memory of rank 0 (another container?)");
}

TEST(ShmProcesses, RanksOfPretendedHostsShareNothing) {
  expect_no_shared_memory([](int) {},
                          "rank 0: rank 2 is on another host, as comm.ranks_per_host says", 2);
}

// --- Strangers, to whom abstract sockets are known as to everybody.

// Whom a rank of this process expects.
struct Expected {
  std::string socket;
  std::string token;
};

// They come before the ranks do: nobody knows yet where this rank listens.
class StrangersFirst final : public Store {
 public:
  using Visit = std::function<void(const Expected&)>;

  StrangersFirst(const std::filesystem::path& directory, Visit visit)
      : store_(directory), visit_(std::move(visit)) {}

  void set(const std::string& key, const std::string& value) override {
    if (key.find("memory.1") != std::string::npos) {
      std::istringstream words(value);
      std::string word;
      Expected expected;
      words >> word >> word >> expected.socket >> expected.token;
      visit_(expected);
    }
    store_.set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_.get(key, timeout);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return store_.try_get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    return store_.add(key, delta);
  }
  std::string address() const override { return store_.address(); }
  std::uint16_t port() const override { return store_.port(); }

 private:
  FileStore store_;
  const Visit visit_;
};

// Connects as a rank does, and sends `message`.
FileDescriptor connect_stranger(const std::string& name, const std::string& message) {
  FileDescriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0)
      << std::strerror(errno);
  EXPECT_EQ(send(fd.get(), message.data(), message.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(message.size()));
  return fd;
}

// What a rank begins with: the token and its number.
std::string introduction(const std::string& token, std::int32_t rank) {
  return token + std::string(reinterpret_cast<const char*>(&rank), sizeof(rank));
}

// All ranks must share memory all the same.
void expect_sharing_beside(const StrangersFirst::Visit& visit) {
  const testing::TemporaryDirectory directory;
  for (const RankEnd& end : run_forked(kNumRanks, [&](int rank) {
         StrangersFirst store(directory.path(), visit);
         PeerOptions options;
         options.rank = rank;
         options.size = kNumRanks;
         options.group = "world";
         options.control_bytes = 4096;
         options.timeout = patient().timeout;
         std::string why_not;
         const auto memory = connect_peers(store, options, why_not);
         ASSERT_TRUE(memory) << why_not;
         const auto at = static_cast<std::size_t>(rank);
         memory->controls[at]->data()[0] = static_cast<std::byte>(rank + 1);
         exchange_at_store(store, "world", "written", rank, kNumRanks, "", options.timeout,
                           nullptr);
         for (std::size_t r = 0; r < kNumRanks; ++r) {
           EXPECT_EQ(memory->controls[r]->data()[0], static_cast<std::byte>(r + 1));
           EXPECT_TRUE(r == at || memory->heaps[r]);
         }
         exchange_at_store(store, "world", "read", rank, kNumRanks, "", options.timeout, nullptr);
       })) {
    EXPECT_EQ(text_of(end.failure), "");
    EXPECT_EQ(end.signal, 0);
  }
}

TEST(ShmProcesses, RanksShareBesideAStrangerWithAnotherToken) {
  std::vector<FileDescriptor> strangers;  // of each process
  expect_sharing_beside([&](const Expected& rank) {
    strangers.push_back(
        connect_stranger(rank.socket, introduction(std::string(rank.token.size(), 'f'), 2)));
    strangers.push_back(connect_stranger(rank.socket, rank.token.substr(0, 7)));
    connect_stranger(rank.socket, "goes at once");
  });
}

TEST(ShmProcesses, RanksShareBesideAStrangerThatSendsNothing) {
  std::vector<FileDescriptor> strangers;  // of each process
  expect_sharing_beside(
      [&](const Expected& rank) { strangers.push_back(connect_stranger(rank.socket, "")); });
}

TEST(ShmProcesses, RanksShareBesideAnotherUserWhoKnowsTheirToken) {
  constexpr uid_t kNobody = 65534;
  if (!is_true_in_a_fork([] { return setuid(kNobody) == 0 && geteuid() == kNobody; })) {
    GTEST_SKIP() << "this user cannot start a process of another one";
  }
  expect_sharing_beside([](const Expected& rank) {
    EXPECT_TRUE(is_true_in_a_fork([&] {
      return setuid(kNobody) == 0 &&
             connect_stranger(rank.socket, introduction(rank.token, 2)).get() >= 0;
    }));
  });
}

// --- Bits.

// All results of a rank, one behind the other.
Bytes results_of(const ContractRank& here) {
  const int rank = here.group.rank();
  const auto num = static_cast<std::size_t>(here.group.size());
  Bytes results;
  const auto keep = [&](const device::Memory& memory) {
    const Bytes bytes = here.download(memory);
    results.insert(results.end(), bytes.begin(), bytes.end());
  };
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    // All ranks' parts of this many elements are just small.
    const std::size_t border = kSmallAllReduceBytes / num / bytes_of(dtype);
    for (const std::size_t numel :
         {std::size_t{1}, std::size_t{5}, border - 1, border, border + 1, 2 * border + 1}) {
      const auto count = static_cast<std::int64_t>(numel);
      const device::Memory data = here.upload(reference::array(++seed, rank, 0, numel, dtype));
      here.group.start_all_reduce(data.data(), count, dtype).wait();
      keep(data);
      const device::Memory input =
          here.upload(reference::array(++seed, rank, 0, numel * num, dtype));
      const device::Memory sum = here.allocate(numel * bytes_of(dtype));
      here.group.start_reduce_scatter(input.data(), sum.data(), count, dtype, dtype).wait();
      keep(sum);
      const device::Memory turned = here.allocate(input.bytes());
      here.group.start_all_to_all(input.data(), turned.data(), count, dtype).wait();
      keep(turned);
      const device::Memory full = here.allocate(data.bytes() * num);
      const Gather gather{data.data(), full.data(), count, dtype};
      here.group.start_all_gather({&gather, 1}).wait();
      keep(full);
    }
  }
  return results;
}

std::vector<std::string> bits_over(const ContractWorld& world, int num_ranks) {
  const testing::TemporaryDirectory directory;
  const auto failures = run_world(world, num_ranks, [&](ContractRank& here) {
    const Bytes bytes = results_of(here);
    std::ofstream(directory.path() / std::to_string(here.group.rank()), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  });
  std::vector<std::string> bits;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    EXPECT_EQ(text_of(failures[rank]), "");
    bits.push_back(read_whole(directory.path() / std::to_string(rank)));
  }
  return bits;
}

TEST(ShmProcesses, BitsAreThoseOfThreads) {
  const ContractWorld threads{.name = "Threads", .make_network = [](int num_ranks) {
                                return make_thread_network(num_ranks, 0);
                              }};
  for (const int num_ranks :
       support::kIsSanitized ? std::vector<int>{3} : std::vector<int>{2, 3, 7}) {
    const std::vector<std::string> expected = bits_over(threads, num_ranks);
    EXPECT_FALSE(expected.front().empty());
    for (const Role role : {Role::kGradient, Role::kOther}) {
      EXPECT_TRUE(bits_over(shm_world("Shm", role, 0, true), num_ranks) == expected)
          << num_ranks << " ranks, " << to_string(role);
    }
  }
}

}  // namespace
}  // namespace tessera::comm
