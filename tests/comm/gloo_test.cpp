// The contracts over Gloo: ranks are threads of this process, each with its own sockets, store
// connection and status store; what processes add is tested in tests/launch. With memory of the
// host, of a double that the host cannot touch, and of a GPU that several ranks share. And what
// Gloo itself must show: its errors, and the bytes on the wire.
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <thread>

#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/store.h"
#include "tessera/comm/tag_channel.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"
#include "testing/guarded_device.h"
#include "tests/comm/contract.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::seconds kStoreTimeout{60};

class GlooNetwork final : public Network {
 public:
  explicit GlooNetwork(int num_ranks) : num_ranks_(num_ranks) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    GlooOptions options;
    options.bind_host = "127.0.0.1";
    return make_gloo_backend(connect(), rank, num_ranks_, "world", options);
  }
  std::shared_ptr<StatusStore> make_status() override {
    return std::make_shared<StatusStore>(connect(), num_ranks_);
  }

 private:
  std::unique_ptr<Store> connect() {
    return connect_store("127.0.0.1", server_->port(), kStoreTimeout);
  }

  const int num_ranks_;
  const std::shared_ptr<Store> server_ = serve_store("127.0.0.1", 0, kStoreTimeout);
};

std::unique_ptr<Network> make_gloo(int num_ranks) {
  return std::make_unique<GlooNetwork>(num_ranks);
}

ContractWorld sockets() { return {.name = "Sockets", .make_network = make_gloo}; }

ContractWorld double_sockets() {
  ContractWorld world = sockets();
  world.make_device = [](int rank, Ledger& ledger) {
    return device::make_guarded_device(device::LateMode::kRandom, rank, ledger);
  };
  return world;
}

ContractWorld on_gpu(const std::string& name,
                     const std::function<std::unique_ptr<Network>(int)>& make_network) {
  return {.name = name,
          .make_network = make_network,
          .make_device =
              [](int rank, Ledger& ledger) {
                device::CudaDeviceOptions options;
                options.index = rank % device::num_cuda_devices();
                options.ledger = &ledger;
                return device::make_cuda_device(options);
              },
          .needs_gpu = true};
}

const auto kCudaWorlds = ::testing::Values(
    on_gpu("Threads", [](int num_ranks) { return make_thread_network(num_ranks, 0); }),
    on_gpu("Gloo", make_gloo));

INSTANTIATE_TEST_SUITE_P(Gloo, MemoryContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Gloo, GroupContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Gloo, LimitContract, ::testing::Values(sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Double, MemoryContract, ::testing::Values(double_sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Double, StagedContract, ::testing::Values(double_sockets()), world_name);
INSTANTIATE_TEST_SUITE_P(Cuda, MemoryContract, kCudaWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Cuda, StagedContract, kCudaWorlds, world_name);

// Ranks may be ahead of each other by any number of tags when one of them needs words, or others
// have agreed on bytes of the host.
TEST(TagChannel, BringsTagsInTheirOrderAndOtherBytesAtAnyTime) {
  for (const int num_ranks : {1, 3}) {
    const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.emplace_back([&, rank] {
        GlooOptions options;
        options.bind_host = "127.0.0.1";
        TagChannel channel(connect_store("127.0.0.1", server->port(), kStoreTimeout), rank,
                           num_ranks, "world", options);
        const auto size = static_cast<std::size_t>(num_ranks);
        const auto own = static_cast<std::size_t>(rank);
        std::vector<std::shared_ptr<std::vector<CallTag>>> sent;
        std::vector<Pending> pending;
        for (std::uint64_t call = 0; call < 50 + 7 * own; ++call) {
          sent.push_back(std::make_shared<std::vector<CallTag>>(size));
          (*sent.back())[own] = {.sequence = call, .total_bytes = own};
          pending.push_back(channel.start_tags(sent.back()));
        }
        for (std::uint64_t call = 0; call < 50; ++call) {
          pending[call].wait();
          for (std::size_t r = 0; r < size; ++r) {
            EXPECT_EQ((*sent[call])[r].sequence, call);
            EXPECT_EQ((*sent[call])[r].total_bytes, r);
          }
        }
        for (std::size_t bytes : {std::size_t{1}, std::size_t{70001}}) {
          const auto all = std::make_shared<std::vector<std::byte>>(bytes * size);
          std::fill_n(all->begin() + static_cast<std::ptrdiff_t>(own * bytes), bytes,
                      static_cast<std::byte>(own + 1));
          Call call;
          call.keep_alive = all;
          channel.start_host_gather(all->data(), bytes, call).wait();
          for (std::size_t i = 0; i < all->size(); ++i) {
            ASSERT_EQ((*all)[i], static_cast<std::byte>(i / bytes + 1));
          }
        }
        const auto words = std::make_shared<std::vector<WordsSlot>>(size);
        (*words)[own].num_bytes = static_cast<std::uint32_t>(own);
        (*words)[own].bytes.fill(static_cast<char>(own));
        channel.start_words(words).wait();
        for (std::size_t r = 0; r < size; ++r) {
          EXPECT_EQ((*words)[r].num_bytes, r);
          EXPECT_EQ((*words)[r].bytes.back(), static_cast<char>(r));
        }
        channel.abort();  // the tags of some will never come
      });
    }
    for (std::thread& rank : ranks) {
      rank.join();
    }
  }
}

// Joins as one rank of several that never join.
std::string error_of_joining(int rank, int num_ranks, const GlooOptions& options) {
  const auto server = serve_store("127.0.0.1", 0, kStoreTimeout);
  try {
    make_gloo_backend(connect_store("127.0.0.1", server->port(), kStoreTimeout), rank, num_ranks,
                      "world", options);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

TEST(GlooBackend, ARankThatNeverJoinsIsNamed) {
  GlooOptions options;
  options.timeout = std::chrono::milliseconds(300);
  options.bind_host = "127.0.0.1";
  const std::string error = error_of_joining(1, 3, options);
  EXPECT_NE(error.find("rank 0, rank 2 did not join within 0.3 s"), std::string::npos) << error;
}

TEST(GlooBackend, AnAddressThatIsNotOursIsAnErrorThatSaysSo) {
  GlooOptions options;
  options.interface = "nosuchinterface0";
  const std::string error = error_of_joining(0, 1, options);
  EXPECT_NE(error.find("nosuchinterface0"), std::string::npos) << error;
  EXPECT_NE(error.find("GLOO_SOCKET_IFNAME"), std::string::npos) << error;
}

// --- What we say we send, against what the kernel counted on the loopback interface.
//
// The test moves into a network namespace of its own where the system lets it, so that nothing else
// is on its loopback; elsewhere it shares the machine's and needs it to be quiet.

// True if this process is now alone on a loopback that is up.
bool enter_own_network() {
  if (unshare(CLONE_NEWNET) != 0) {
    return false;
  }
  const int fd = socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request{};
  request.ifr_name[0] = 'l';
  request.ifr_name[1] = 'o';
  const bool read = ioctl(fd, SIOCGIFFLAGS, &request) == 0;
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP);
  const bool up = read && ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  close(fd);
  return up;
}

// What the loopback interface has carried, less the headers of its packets. How many packets the
// kernel makes of a message is its own affair, and differs with the machine's speed.
std::uint64_t loopback_bytes() {
  constexpr std::uint64_t kHeaderBytes = 14 + 20 + 32;  // Ethernet, IP, TCP with time stamps
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    if (const auto at = line.find("lo:"); at != std::string::npos) {
      std::uint64_t bytes = 0;
      std::uint64_t packets = 0;
      std::istringstream(line.substr(at + 3)) >> bytes >> packets;
      return bytes - packets * kHeaderBytes;
    }
  }
  ADD_FAILURE() << "/proc/self/net/dev has no loopback";
  return 0;
}

class WireBytesTest : public Contract {
 protected:
  static void SetUpTestSuite() {
    if (!enter_own_network()) {
      std::cout << "no network namespace of its own here: other traffic on this machine's loopback "
                   "may disturb the comparison\n";
    }
  }

  // What the kernel counts beyond our own count, while `body` runs on every rank.
  double excess_of(int num_ranks, const std::function<void(Group&)>& body) {
    std::atomic<std::uint64_t> ours = 0;
    std::uint64_t kernel = 0;
    run(num_ranks, [&](ContractRank& here) {
      Group& group = here.group;
      group.start_barrier().wait();
      const std::uint64_t counted = group.rank() == 0 ? loopback_bytes() : 0;
      const WireBytes before = group.wire_bytes();
      group.start_barrier().wait();
      body(group);
      group.start_barrier().wait();
      if (group.rank() == 0) {
        kernel = loopback_bytes() - counted;
      }
      const WireBytes after = group.wire_bytes();
      ours += after.payload - before.payload + after.control - before.control;
      group.start_barrier().wait();
    });
    return static_cast<double>(kernel) / static_cast<double>(ours) - 1.0;
  }

  // Gloo puts a header before each message, and the store is asked now and then: 2 % is for those.
  // The kernel also sends segments again when an answer is late, which only adds and depends on how
  // busy the machine is: so the least of a few tries counts. What we send too much, we send every
  // time.
  void expect_agreement(const char* what, int num_ranks, const std::function<void(Group&)>& body) {
    constexpr int kMaxTries = 5;
    double excess = 0;
    for (int attempt = 0; attempt < kMaxTries; ++attempt) {
      excess = excess_of(num_ranks, body);
      EXPECT_GE(excess, -0.02) << what << " on " << num_ranks << " ranks: less than we say";
      if (excess <= 0.02) {
        return;
      }
    }
    ADD_FAILURE() << what << " on " << num_ranks << " ranks: " << 100.0 * excess
                  << " % more than we say";
  }
};
INSTANTIATE_TEST_SUITE_P(Gloo, WireBytesTest, ::testing::Values(sockets()), world_name);

constexpr std::int64_t kWireNumel = 3 << 20;

TEST_P(WireBytesTest, AgreeWithTheLoopbackInterfaceForEveryCollective) {
  for (const int num_ranks : {2, 3}) {
    const auto num = static_cast<std::size_t>(num_ranks);
    expect_agreement("all_gather", num_ranks, [num](Group& group) {
      std::vector<float> shard(kWireNumel);
      std::vector<float> full(kWireNumel * num);
      const Gather gather{shard.data(), full.data(), kWireNumel, DType::kFloat32};
      group.start_all_gather({&gather, 1}).wait();
    });
    expect_agreement("reduce_scatter", num_ranks, [num](Group& group) {
      std::vector<float> input(kWireNumel * num);
      std::vector<float> output(kWireNumel);
      group
          .start_reduce_scatter(input.data(), output.data(), kWireNumel, DType::kFloat32,
                                DType::kFloat32)
          .wait();
    });
    expect_agreement("reduce_scatter in bf16", num_ranks, [num](Group& group) {
      std::vector<BFloat16> input(kWireNumel * num);
      std::vector<float> output(kWireNumel);
      group
          .start_reduce_scatter(input.data(), output.data(), kWireNumel, DType::kBFloat16,
                                DType::kFloat32)
          .wait();
    });
    expect_agreement("all_reduce", num_ranks, [](Group& group) {
      std::vector<float> data(kWireNumel + 1);
      group.start_all_reduce(data.data(), kWireNumel + 1, DType::kFloat32).wait();
    });
    expect_agreement("broadcast", num_ranks, [](Group& group) {
      std::vector<float> data(kWireNumel);
      group.start_broadcast(data.data(), kWireNumel, DType::kFloat32, 1).wait();
    });
    expect_agreement("all_to_all", num_ranks, [num](Group& group) {
      std::vector<float> send(kWireNumel * num);
      std::vector<float> receive(kWireNumel * num);
      group.start_all_to_all(send.data(), receive.data(), kWireNumel, DType::kFloat32).wait();
    });
    expect_agreement("gather_to one rank", num_ranks, [num](Group& group) {
      std::vector<float> shard(kWireNumel);
      std::vector<float> full(group.rank() == 1 ? kWireNumel * num : 0);
      const Gather gather{shard.data(), full.empty() ? nullptr : full.data(), kWireNumel,
                          DType::kFloat32};
      std::vector<std::uint8_t> wants(num, 0);
      wants[1] = 1;
      group.start_gather_to({&gather, 1}, wants).wait();
    });
    expect_agreement("all_gathers of three tensors", num_ranks, [num](Group& group) {
      std::vector<float> shard(kWireNumel);
      std::vector<float> full(kWireNumel * num);
      const std::int64_t third = kWireNumel / 3;
      std::vector<Gather> gathers;
      for (std::int64_t i = 0; i < 3; ++i) {
        gathers.push_back({shard.data() + i * third,
                           full.data() + i * third * static_cast<std::int64_t>(num), third,
                           DType::kFloat32});
      }
      Pending::all(group.start_all_gathers(gathers)).wait();
    });
    expect_agreement("200 small tensors in one all_gather", num_ranks, [num](Group& group) {
      std::vector<float> shards(200 * 4001);
      std::vector<float> fulls(shards.size() * num);
      std::vector<Gather> gathers;
      for (std::size_t i = 0; i < 200; ++i) {
        gathers.push_back(
            {shards.data() + i * 4001, fulls.data() + i * 4001 * num, 4001, DType::kFloat32});
      }
      group.start_all_gather(gathers).wait();
    });
  }
}

}  // namespace
}  // namespace tessera::comm
