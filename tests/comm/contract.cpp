#include "tests/comm/contract.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "testing/thread_backend.h"
#include "tests/comm/forked_ranks.h"

namespace tessera::comm {
namespace {

class ThreadNetwork final : public Network {
 public:
  explicit ThreadNetwork(const ThreadWorldOptions& options) : world_(options) {}
  std::unique_ptr<Backend> make_backend(int rank) override { return world_.make_backend(rank); }
  std::shared_ptr<StatusStore> make_status() override { return world_.status(); }

 private:
  ThreadWorld world_;
};

// These outlive the network: a call that failed may free its staging with it.
struct Books {
  Ledger ledger;
  std::unique_ptr<device::Device> device;
};

void run_rank(const ContractWorld& world, Network& network, int rank, int num_ranks,
              const std::function<void(ContractRank&)>& body, GroupOptions options, Books& books) {
  std::vector<int> world_ranks(static_cast<std::size_t>(num_ranks));
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  options.status = network.make_status();
  options.ledger = &books.ledger;
  books.device = world.make_device ? world.make_device(rank, books.ledger)
                                   : device::make_cpu_device({&books.ledger, {}, nullptr});
  options.device = world.make_device ? books.device.get() : nullptr;
  Group group(num_ranks == 1 ? make_solo_backend() : network.make_backend(rank), "world",
              world_ranks, options);
  if (world.staging_bytes > 0) {
    group.reserve_staging(world.staging_bytes);
  }
  ContractRank here{group, *books.device, books.ledger, world.role};
  try {
    body(here);
  } catch (const PeerError&) {
    throw;  // a consequence: nothing to tell the others
  } catch (const std::exception& error) {
    options.status->post_failure(rank, error);
    throw;
  }
}

void expect_no_staging(const Books& books, int rank) {
  EXPECT_EQ(books.ledger.current_bytes(Tier::kHost, Role::kStaging), 0U)
      << "rank " << rank << " still holds staging";
}

// A process that has asked for GPUs has no forks that can use them.
bool has_gpus(int num_gpus, bool as_processes) {
  const auto ask = [num_gpus] { return device::num_cuda_devices() >= num_gpus; };
  return as_processes ? is_true_in_a_fork(ask) : ask();
}

std::exception_ptr failure_of(const RankEnd& end) {
  return end.signal == 0 ? end.failure
                         : std::make_exception_ptr(
                               std::runtime_error(detail::concat("ended by signal ", end.signal)));
}

}  // namespace

std::vector<std::exception_ptr> run_world(const ContractWorld& world, int num_ranks,
                                          const std::function<void(ContractRank&)>& body,
                                          const GroupOptions& options) {
  std::vector<Books> books(static_cast<std::size_t>(num_ranks));
  const std::unique_ptr<Network> network = world.make_network(num_ranks);
  const auto run = [&](int rank) {
    run_rank(world, *network, rank, num_ranks, body, options,
             books[static_cast<std::size_t>(rank)]);
  };
  std::vector<std::exception_ptr> failures;
  if (world.as_processes) {
    const auto run_and_check = [&](int rank) {
      run(rank);
      expect_no_staging(books[static_cast<std::size_t>(rank)], rank);
    };
    for (const RankEnd& end : run_forked(num_ranks, run_and_check)) {
      failures.push_back(failure_of(end));
    }
    return failures;
  }
  failures.resize(books.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        run(rank);
      } catch (const std::exception&) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  // Not before: a rank as a thread may still copy from another's staging.
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!failures[static_cast<std::size_t>(rank)]) {
      expect_no_staging(books[static_cast<std::size_t>(rank)], rank);
    }
  }
  return failures;
}

device::Memory ContractRank::start_upload(const Bytes& source, device::Stream& stream) const {
  device::Memory memory = allocate(source.size());
  static_cast<void>(device.start_copy(memory.data(), source.data(), source.size(), stream));
  return memory;
}

device::Memory ContractRank::upload(const Bytes& source) const {
  device::Stream& stream = device.stream(device::StreamKind::kRead);
  device::Memory memory = start_upload(source, stream);
  stream.record().wait();
  return memory;
}

Bytes ContractRank::download(const device::Memory& memory) const {
  Bytes bytes(memory.bytes());
  device
      .start_copy(bytes.data(), memory.data(), bytes.size(),
                  device.stream(device::StreamKind::kWrite))
      .wait();
  return bytes;
}

std::unique_ptr<Network> make_thread_network(int num_ranks, std::uint32_t max_delay_us,
                                             bool on_streams) {
  ThreadWorldOptions options;
  options.num_ranks = num_ranks;
  options.max_delay_us = max_delay_us;
  options.seed = 5;
  options.on_streams = on_streams;
  return std::make_unique<ThreadNetwork>(options);
}

void delay_at_random(int rank, std::uint32_t max_delay_us) {
  thread_local std::mt19937 random(static_cast<unsigned>(rank) + 7U);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % max_delay_us));
}

std::string text_of(const std::exception_ptr& failure) {
  if (!failure) {
    return "";
  }
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void Contract::SetUp() {
  const ContractWorld& world = GetParam();
  if (world.needs_gpu && !has_gpus(1, world.as_processes)) {
    GTEST_SKIP() << "no GPU: " << device::cuda_description();
  }
  if (world.needs_gpu && !has_gpus(world.num_gpus, world.as_processes)) {
    GTEST_SKIP() << "needs " << world.num_gpus << " GPUs, one per rank; this machine has fewer";
  }
}

void Contract::run(int num_ranks, const Body& body) {
  const auto failures = run_collecting(num_ranks, body);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    EXPECT_EQ(text_of(failures[rank]), "") << "rank " << rank;
  }
}

void Contract::run_each(const std::vector<int>& numbers, const Body& body) {
  if (!GetParam().as_processes) {
    for (const int num_ranks : numbers) {
      run(num_ranks, body);
    }
    return;
  }
  run(*std::max_element(numbers.begin(), numbers.end()), [&](ContractRank& here) {
    for (const int num_ranks : numbers) {
      SCOPED_TRACE(detail::concat(num_ranks, " ranks"));
      const bool takes_part = here.group.rank() < num_ranks;
      const auto group = here.group.split(takes_part ? 0 : 1, "first");
      if (takes_part) {
        ContractRank member{*group, here.device, here.ledger, here.role};
        body(member);
      }
    }
  });
}

std::vector<int> Contract::ranks_up_to(int most) {
  std::vector<int> numbers(static_cast<std::size_t>(most - least_ranks() + 1));
  std::iota(numbers.begin(), numbers.end(), least_ranks());
  return numbers;
}

void Contract::expect_failures(int num_ranks, const std::vector<std::string>& words,
                               const Body& body, const GroupOptions& options) {
  const auto failures = run_collecting(num_ranks, body, options);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    ASSERT_TRUE(failures[rank]) << "rank " << rank << " saw nothing";
    EXPECT_THROW(std::rethrow_exception(failures[rank]), CommError);
    for (const std::string& word : words) {
      EXPECT_NE(text_of(failures[rank]).find(word), std::string::npos)
          << "rank " << rank << ": " << text_of(failures[rank]) << "\nlacks: " << word;
    }
  }
}

}  // namespace tessera::comm
